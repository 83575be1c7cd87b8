"""Several corpora in one run, and stores that are prefilled straight into a bucket."""

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offload_decode.common.errors import (
    BucketError,
    ConfigError,
    CorpusError,
    ModelError,
    StoreBusy,
    StoreForeign,
    StoreMismatch,
)
from offload_decode.prefill_jobs import destinations, many
from offload_decode.prefill_jobs.buckets import pull
from offload_decode.prefill_jobs.job import PrefillReport, Settings, prefill
from offload_decode.prefill_jobs.many import Job, jobs_of, prefill_many
from offload_decode.store.reader import KVStore
from offload_decode.store.staging import locked
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import tree
from tests.prefill_jobs.services import BUCKET, exists

SETTINGS = Settings(options={"chunk": "32"})


@pytest.fixture
def corpora(tmp_path: Path) -> list[str]:
    """Three corpora of about a hundred tokens: two files and a folder."""
    folder = tmp_path / "corpora"
    (folder / "c").mkdir(parents=True)
    (folder / "a.txt").write_text("alpha " * 20)
    (folder / "b.html").write_text("<p>" + "beta " * 25)
    (folder / "c" / "one.md").write_text("gamma " * 15)
    return [str(folder / name) for name in ("a.txt", "b.html", "c")]


def run(inputs: Path, corpora: list[str], out: str | Path, **more: Any) -> dict[str, Any]:
    """Results by the name of the store."""
    more = {"model": str(inputs / "model"), "settings": SETTINGS, **more}
    results = prefill_many(jobs_of(corpora, f"{out}/"), **more)
    return {job.store.rpartition("/")[2]: result for job, result in results.items()}


def alone(inputs: Path, corpus: str, store: Path) -> dict[str, bytes]:
    """What a prefill of this corpus and no other makes."""
    prefill(corpus, model=str(inputs / "model"), out=store, settings=SETTINGS)
    return tree(store)


def interrupt_at(stage: str, about: str = "") -> Any:
    """Progress that is interrupted in mid-stage."""

    seen = 0

    def progress(now: str, done: int, total: int, where: str = "") -> None:
        nonlocal seen
        seen += now == stage and about in where
        if seen == 2:
            raise KeyboardInterrupt

    return progress


def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(many, "load", load)
    monkeypatch.setattr("offload_decode.prefill_jobs.job.load", load)


def test_each_corpus_becomes_the_store_it_would_become_alone(inputs, corpora, tmp_path):
    seen: list[tuple[str, int, int, str]] = []
    results = run(inputs, corpora, tmp_path / "out", progress=lambda *now: seen.append(now))
    assert list(results) == ["a.kv", "b.kv", "c.kv"]
    for corpus, (name, report) in zip(corpora, results.items(), strict=True):
        assert isinstance(report, PrefillReport)
        assert not report.kept
        assert tree(tmp_path / "out" / name) == alone(inputs, corpus, tmp_path / "alone" / name)
    steps = [(done, total, about) for stage, done, total, about in seen if stage == "prefill"]
    assert {total for _, total, _ in steps} == {sum(report.n_tokens for report in results.values())}
    assert [done for done, _, _ in steps] == sorted(done for done, _, _ in steps)
    assert steps[-1][0] == steps[-1][1]
    assert steps[-1][2] == f"3 of 3, {corpora[2]}"


def test_a_corpus_that_fails_stops_no_other(inputs, corpora, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "out" / "b.kv.partial").mkdir(parents=True)
    (tmp_path / "out" / "b.kv.partial" / "mine").write_text("not of a store")
    given = [corpora[0], str(tmp_path / "missing"), corpora[1], str(tmp_path / "empty.txt"), corpora[2]]
    results = run(inputs, given, tmp_path / "out")
    assert [type(result) for result in results.values()] == [
        PrefillReport,
        CorpusError,
        StoreForeign,
        CorpusError,
        PrefillReport,
    ]
    KVStore.open(tmp_path / "out" / "a.kv").verify()
    KVStore.open(tmp_path / "out" / "c.kv").verify()


def test_no_model_is_loaded_where_nothing_can_be_read(tmp_path, monkeypatch):
    no_model(monkeypatch)
    results = run(tmp_path, [str(tmp_path / "x"), str(tmp_path / "y")], tmp_path / "out")
    assert all(isinstance(result, CorpusError) for result in results.values())


def test_the_same_run_again_keeps_existing_stores(inputs, corpora, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(inputs, corpora, out, progress=interrupt_at("prefill", "2 of 3"))
    assert sorted(path.name for path in out.iterdir()) == ["a.kv", "b.kv.partial"]
    before = {path: path.stat().st_mtime_ns for path in (out / "a.kv").rglob("*")}
    results = run(inputs, corpora, out)
    assert [result.kept for result in results.values()] == [True, False, False]
    assert 0 < results["b.kv"].resumed_from < results["b.kv"].n_tokens
    assert {path: path.stat().st_mtime_ns for path in (out / "a.kv").rglob("*")} == before
    assert tree(out / "b.kv") == alone(inputs, corpora[1], tmp_path / "b.kv")


def test_a_store_of_other_tokens_or_settings_is_not_kept(inputs, corpora, tmp_path):
    run(inputs, corpora[:2], tmp_path / "out")
    before = tree(tmp_path / "out")
    Path(corpora[0]).write_text("something else")
    results = run(inputs, corpora, tmp_path / "out")
    assert isinstance(results["a.kv"], StoreMismatch)
    assert "another text" in str(results["a.kv"])
    assert "choose another --out" in str(results["a.kv"])
    assert results["b.kv"].kept
    again = run(inputs, corpora[1:], tmp_path / "out", settings=Settings(options={"chunk": "16"}))
    assert "prefill" in str(again["b.kv"])
    assert {
        name: data for name, data in tree(tmp_path / "out").items() if not name.startswith("c.kv")
    } == before


def test_a_damaged_store_is_not_kept(inputs, corpora, tmp_path):
    run(inputs, corpora, tmp_path / "out")
    (tmp_path / "out" / "a.kv" / "tokens" / "c.0").unlink()
    results = run(inputs, corpora, tmp_path / "out")
    assert "tokens/c.0" in str(results["a.kv"])
    assert results["b.kv"].kept
    assert results["c.kv"].kept


def test_errors_of_all_corpora_stop_at_once(inputs, corpora, tmp_path):
    with pytest.raises(ModelError):
        run(inputs, corpora, tmp_path / "out", model=str(tmp_path / "nothing"))
    with pytest.raises(ConfigError):
        run(inputs, corpora, tmp_path / "out", settings=Settings("quoka", {"budget": "1/0"}))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("corpora", "out", "stores"),
    [
        (["a.txt"], "out/", ["out/a.kv"]),
        (["x/a.txt", "b.tar.gz", "-"], "out", ["out/a.kv", "out/b.tar.kv", "out/stdin.kv"]),
        (["v1.2", "v1.2/..", "v1.2/"[:-1] + "/x.y.md"], "o", ["o/v1.2.kv", "o/here.kv", "o/x.y.kv"]),
        (["a#b c.txt"], "s3://b/", ["s3://b/a#b c.kv"]),
        (["a#b c.txt"], "s3://b/x/", ["s3://b/x/a#b c.kv"]),
        (["a#b c.txt"], "file:///x/", ["file:///x/a%23b%20c.kv"]),
    ],
)
def test_stores_are_named_after_their_corpora(corpora, out, stores, tmp_path, monkeypatch):
    (tmp_path / "here" / "v1.2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert jobs_of(corpora, out) == [Job(*pair) for pair in zip(corpora, stores, strict=True)]


def test_two_stores_of_one_name_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^x/a\.txt and y/a\.md would both become a\.kv: "):
        jobs_of(["x/a.txt", "b", "y/a.md"], "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        jobs_of(["a", "b"], str(tmp_path / "file"))


class Bucketed:
    """One corpus and a URL of a folder for it."""

    def __init__(self, inputs: Path, corpus: str, folder: Path) -> None:
        self.inputs, self.corpus = inputs, corpus
        self.folder, self.staging = folder, folder / "staging"
        self.url = f"file://{folder}/bucket/a.kv"

    def run(self, **more: Any) -> PrefillReport:
        more = {"model": str(self.inputs / "model"), "settings": SETTINGS, **more}
        return prefill(self.corpus, out=self.url, staging=self.staging, **more)

    @property
    def staged(self) -> list[str]:
        return sorted(path.name for path in self.staging.glob("*/*"))


@pytest.fixture
def bucketed(inputs: Path, corpora: list[str], tmp_path: Path) -> Bucketed:
    return Bucketed(inputs, corpora[0], tmp_path)


def test_a_store_goes_straight_into_a_bucket(bucketed):
    report = bucketed.run()
    assert report.store == bucketed.url
    assert report.pushed
    found = tree(bucketed.folder / "bucket" / "a.kv")
    assert found == alone(bucketed.inputs, bucketed.corpus, bucketed.folder / "alone")
    assert report.pushed.files == len(found) - 2, "all but the lists of checksums, which go last"
    assert list(bucketed.staging.iterdir()) == []


@pytest.mark.parametrize("stage", ["prefill", "push"])
def test_interrupted_on_its_way_into_a_bucket(bucketed, stage):
    with pytest.raises(KeyboardInterrupt):
        bucketed.run(progress=interrupt_at(stage))
    assert bucketed.staged == ["lock", "store.partial" if stage == "prefill" else "store"]
    report = bucketed.run()
    assert report.resumed_from >= 32
    assert (report.resumed_from == report.n_tokens) == (stage == "push"), "what is whole is not made again"
    assert tree(bucketed.folder / "bucket" / "a.kv") == alone(
        bucketed.inputs, bucketed.corpus, bucketed.folder / "alone"
    )
    assert list(bucketed.staging.iterdir()) == []


@pytest.mark.parametrize("moment", ["before", "amid"])
def test_killed_when_only_the_local_copy_was_left(bucketed, moment, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "before":
            patch.setattr(destinations.InBucket, "_remove", killed)
        else:
            patch.setattr(destinations, "shutil", SimpleNamespace(rmtree=killed))
        with pytest.raises(KeyboardInterrupt):
            bucketed.run()
    assert exists(bucketed.url)
    assert bucketed.staged == ["lock", "store" if moment == "before" else "pushed"]
    assert bucketed.run().kept
    assert list(bucketed.staging.iterdir()) == []


def test_killed_before_its_very_last_step(bucketed):
    bucketed.run()
    destinations.InBucket(bucketed.url, bucketed.staging).folder.mkdir()
    assert bucketed.run().kept
    assert list(bucketed.staging.iterdir()) == []


def test_a_staged_store_of_another_corpus_is_not_used(bucketed):
    with pytest.raises(KeyboardInterrupt):
        bucketed.run(progress=interrupt_at("push"))
    Path(bucketed.corpus).write_text("something else")
    with pytest.raises(StoreMismatch, match="another text"):
        bucketed.run()
    assert not exists(bucketed.url)


def test_one_process_at_a_time_stages_a_store(bucketed):
    folder = destinations.InBucket(bucketed.url, bucketed.staging).folder
    with locked(folder), pytest.raises(StoreBusy):
        bucketed.run()


def test_a_bucket_is_tried_before_the_work_begins(bucketed, corpora, tmp_path, monkeypatch):
    bucketed.run()
    assert bucketed.run().kept
    no_model(monkeypatch)
    (tmp_path / "file").write_text("")
    bucketed.url = f"file://{tmp_path}/file/a.kv"
    with pytest.raises(BucketError):
        bucketed.run()
    with pytest.raises(BucketError):
        run(bucketed.inputs, corpora, f"file://{tmp_path}/file", staging=tmp_path / "s")
    with pytest.raises(ConfigError, match="s3://BUCKET/NAME"):
        run(bucketed.inputs, corpora, "az://b/x", staging=tmp_path / "s")


def test_several_corpora_into_a_bucket(s3, inputs, corpora, tmp_path):
    given: dict[str, Any] = {"staging": tmp_path / "staging"}
    folder = f"s3://{BUCKET}{tmp_path}/deep"
    first = run(inputs, corpora[:2], folder, **given)
    assert [result.kept for result in first.values()] == [False, False]
    for corpus, name in zip(corpora, first, strict=False):
        pull(f"{folder}/{name}", tmp_path / "pulled" / name)
        assert tree(tmp_path / "pulled" / name) == alone(inputs, corpus, tmp_path / "alone" / name)
    Path(corpora[0]).write_text("something else")
    again = run(inputs, corpora, folder, **given)
    assert isinstance(again["a.kv"], StoreMismatch)
    assert again["b.kv"].kept
    assert again["b.kv"].pushed is None
    assert again["b.kv"].bytes == first["b.kv"].bytes
    assert again["c.kv"].pushed
    assert list((tmp_path / "staging").iterdir()) == []


def test_a_bucket_that_goes_away_keeps_the_staged_store(s3, inputs, corpora, tmp_path, monkeypatch):
    def closing(stage: str, done: int, total: int, about: str) -> None:
        if stage == "push" and done and about.startswith("1 of 2"):
            s3.refuse_after = 0

    given: dict[str, Any] = {"staging": tmp_path / "staging"}
    results = run(inputs, corpora[:2], f"s3://{BUCKET}{tmp_path}", **given, progress=closing)
    assert all(isinstance(result, BucketError) for result in results.values())
    s3.refuse_after = None
    again = run(inputs, corpora[:2], f"s3://{BUCKET}{tmp_path}", **given)
    assert [result.resumed_from == result.n_tokens for result in again.values()] == [True, True]
    no_model(monkeypatch)
    with pytest.raises(BucketError, match="no bucket"):
        run(inputs, corpora, "s3://nowhere/x", **given)


_EMPTIED = ("a.kv.pushing", "b.kv.pushing")
"""What the lock of a push to a folder may leave, with nothing in it."""


@pytest.mark.parametrize("fifty", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_on_the_way_into_a_bucket(runner, inputs, tmp_path, fifty):
    """Two corpora on their way, killed at steps of the file system and run again."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} corpus " * 12)
    url, more = f"file://{tmp_path}/bucket/", ("--staging", str(tmp_path / "staging"), "-o", "chunk=64")
    command = killing.prefill(tmp_path / "a.txt", inputs / "model", url, str(tmp_path / "b.txt"), *more)
    whole = runner.run(command)
    assert whole.code == 0, whole
    expected, last = tree(tmp_path / "bucket"), whole.steps - 4  # threads make a few more in one run
    steps = random.Random(7).sample(range(last), 3)
    if fifty:
        steps = [*random.Random(8).sample(range(1, last - 30), 35), *range(last - 30, last, 2)]
    for step in steps:
        for name in ("bucket", "staging"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        ran = runner.run(command, kill_at=step)
        assert ran.killed, f"it has no step {step}: {ran}"
        again = runner.run(command)
        assert again.code == 0, again
        found = tree(tmp_path / "bucket")
        assert {name: data for name, data in found.items() if data or name not in _EMPTIED} == expected, step
        assert list((tmp_path / "staging").iterdir()) == [], step
