"""A power cut takes what was not flushed, in any order; what was committed before is there."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offload_decode.common import files
from offload_decode.prefill_jobs import indexing
from offload_decode.store import KVStore, verify_store
from tests.store.disk import Disk, PowerCut
from tests.store.jobs import FULL, SLIDING, Job, make_job, tree
from tests.store.test_growth import HYBRID, Corpus

CHUNK, MANY = 40, 2000


def flushes(folder: Path, patch: pytest.MonkeyPatch, work: Callable[[], object]) -> int:
    """How many flushes the work makes."""
    disk = Disk(folder, MANY)
    with patch.context() as patched:
        disk.watch(patched)
        work()
    disk.close()
    assert 0 < disk.left < MANY
    return MANY - disk.left


def cut(folder: Path, case: tuple[int, int], patch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Do the work until the power fails, before a flush; False where it ended first. With it the case has the
    chance by which something is lost.
    """
    disk = Disk(folder, case[0])
    with patch.context() as patched:
        disk.watch(patched)
        try:
            work()
            disk.close()
            return False
        except PowerCut:
            pass
    disk.lose(random.Random(case[1]))
    return True


def prefilled(job: Job, path: Path, committed: list[int]) -> None:
    with job.open(path) as writer:
        assert writer.done >= max(committed, default=0), "what was committed is there"
        while writer.done < job.manifest.n_tokens:
            job.feed(writer, [CHUNK], until=min(writer.done + CHUNK, job.manifest.n_tokens))
            committed.append(writer.done)
        writer.publish()


def survives(case: tuple[int, int], folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Whether the power failed; a prefill is gone on with then, and ends in the same bytes."""
    job, path, committed = make_job(3 * CHUNK, layers=(FULL, SLIDING)), folder / "disk/s", list[int]()
    path.parent.mkdir()
    failed = cut(path.parent, case, patch, lambda: prefilled(job, path, committed))
    if path.exists():  # it has its name: then it is whole
        verify_store(path)
    else:
        prefilled(job, path, committed)
    assert tree(path) == tree(job.write(folder / "whole"))
    shutil.rmtree(path.parent)
    shutil.rmtree(folder / "whole")
    return failed


def of_a_prefill(folder: Path, patch: pytest.MonkeyPatch) -> int:
    """The flushes of the prefill of `survives`."""
    job, path = make_job(3 * CHUNK, layers=(FULL, SLIDING)), folder / "counted/s"
    path.parent.mkdir()
    return flushes(path.parent, patch, lambda: prefilled(job, path, []))


def test_a_prefill_goes_on_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = of_a_prefill(tmp_path, monkeypatch)
    for flush in (1, 2, 3, 5, 9, 14, *range(20, last - 3, 10), last - 2, last - 1, last):
        assert survives((flush, flush), tmp_path, monkeypatch)
    assert not survives((last + 1, 0), tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_prefill_goes_on_after_any_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flush in range(1, of_a_prefill(tmp_path, monkeypatch) + 1):
        for seed in range(5):
            assert survives((flush, seed), tmp_path, monkeypatch)


def test_without_flushes_commits_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the disk of these tests forgets: else they would show nothing. Which files one power cut takes is
    chance, as threads write them in any order.
    """
    lost = 0
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        disk = Disk(folder, MANY)
        with monkeypatch.context() as patched, files.synced(False):
            disk.watch(patched)
            with (job := make_job(3 * CHUNK)).open(folder / "s") as writer:
                job.feed(writer)
        assert disk.left == MANY
        disk.lose(random.Random(seed))
        partial = folder / "s.partial"
        lost += not ((partial / "progress.json").exists() and (partial / "store").exists())
    assert lost > 1


@pytest.mark.parametrize("share", [0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 1])
def test_an_append_goes_on_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """The earlier store has its name until the longer one has it."""
    corpus, path = Corpus(HYBRID, 200), tmp_path / "disk/s"
    path.parent.mkdir()
    short, long = (
        tree(corpus.write(tmp_path / "short", 70).path),
        tree(corpus.write(tmp_path / "long", 200).path),
    )
    corpus.write(path, 70)
    counted = tmp_path / "counted/s"
    shutil.copytree(path.parent, counted.parent)
    flush = max(1, round(share * flushes(counted.parent, monkeypatch, lambda: corpus.grow(counted, 200))))
    assert cut(path.parent, (flush, flush), monkeypatch, lambda: corpus.grow(path, 200))
    verify_store(path)
    assert tree(path) in (short, long)
    if tree(path) == short:
        corpus.grow(path, 200)
    assert tree(path) == long
    assert KVStore.open(path).manifest.n_tokens == 200


@pytest.mark.parametrize("flush", range(1, 7))
def test_indexes_are_those_of_before_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: int
) -> None:
    kind, staging = tmp_path / "disk/flat", tmp_path / "disk/flat.partial"
    for folder, text in ((kind, "old"), (staging, "new")):
        folder.mkdir(parents=True)
        for name in ("a", "b"):
            (folder / name).write_text(text)
    ended = not cut(kind.parent, (flush, flush), monkeypatch, lambda: indexing.publish(staging, kind, ()))
    assert ended == (flush == 6), "it makes five flushes"
    if staging.exists():
        indexing.publish(staging, kind, ())
    found = {file.read_text() for file in kind.iterdir()}
    assert found == {"new"}
