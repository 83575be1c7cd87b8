"""Neighbours: whoever reads meets one whole store, whoever writes is alone, or a sentence says so."""

import errno
import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import (
    IndexDamaged,
    IndexNotWritten,
    StoreBusy,
    StoreError,
    StoreMismatch,
)
from offload_decode.indexes.flat import FlatIndex
from offload_decode.prefill_jobs.indexing import alone
from offload_decode.store import KVStore, files, reader, verify_store
from tests.store.jobs import Job
from tests.store.test_growth import Corpus

ROOT = Path(__file__).parents[2]


def test_readers_and_verify_beside_appends(tmp_path: Path) -> None:
    """Whoever opens a store while another takes its place has the one or the other, not some of each."""
    corpus, path, lengths = Corpus(tokens=500), tmp_path / "s", (100, 200, 300, 400, 500)
    corpus.write(path, lengths[0])
    over = threading.Event()
    counts = {"verified": 0, "read": 0}

    def verify() -> None:
        while not over.is_set():
            verify_store(path)
            counts["verified"] += 1

    def read() -> None:
        while not over.is_set():
            store = KVStore.open(path)
            with suppress(StoreMismatch):  # "open it again"
                assert len(store.tokens) == store.manifest.n_tokens
                expected = corpus.whole.keys[0][0, : store.manifest.n_tokens]
                np.testing.assert_array_equal(store.keys(0, 0), expected)
                counts["read"] += 1

    with ThreadPoolExecutor() as pool:
        beside = [pool.submit(verify), pool.submit(read)]
        for length in lengths[1:]:
            corpus.grow(path, length)
        over.set()
        for each in beside:
            each.result()
    assert min(counts.values()) > 0
    verify_store(path)


def swapped(path: Path, other: Path) -> None:
    os.rename(path, path.with_name("aside"))
    os.rename(other, path)


@pytest.mark.parametrize("read", [KVStore.open, verify_store])
def test_a_store_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    corpus, path = Corpus(tokens=300), tmp_path / "s"
    corpus.write(path, 100)
    corpus.write(tmp_path / "longer", 300)
    real, left = files.read_sums, [tmp_path / "longer"]
    real_tree = files.check_tree

    def read_sums(root: Path) -> dict[str, str]:
        found = real(root)
        if left:
            swapped(path, left.pop())
        return found

    def check_tree(root: Path, *given: Any) -> None:
        if left:
            swapped(path, left.pop())
            raise reader.StoreDamaged("some of each")
        real_tree(root, *given)

    monkeypatch.setattr(files, "read_sums", read_sums)
    monkeypatch.setattr(files, "check_tree", check_tree)
    read(path)
    assert not left
    assert KVStore.open(path).manifest.n_tokens == 300


def test_two_builders_of_indexes(tmp_path: Path) -> None:
    folder = tmp_path / "s.indexes"
    with alone(folder), pytest.raises(StoreBusy, match="builds indexes"), alone(folder):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_sentence(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.raises(StoreError, match=r"cannot lock it.* use a folder on a local disk"):
        job.open(tmp_path / "s")
    with pytest.raises(StoreError, match="cannot lock it"), alone(tmp_path / "s.indexes"):
        pass
    keys = np.zeros((4, 8), np.float32)
    with pytest.raises(IndexNotWritten, match="cannot lock it"):
        FlatIndex.build(keys, digest="d").save(tmp_path / "i")


def fails(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_fails_is_a_sentence(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = np.random.default_rng(0).standard_normal((300, 8)).astype(np.float32)
    FlatIndex.build(keys, digest="d").save(tmp_path / "i")
    monkeypatch.setattr(files.hashlib, "file_digest", fails)
    with pytest.raises(StoreError, match="cannot be read: Input/output error"):
        verify_store(store)
    monkeypatch.setattr(os, "fdopen", fails)
    with pytest.raises(StoreError, match="cannot be read: Input/output error"):
        KVStore.open(store)
    with pytest.raises(IndexDamaged, match=r"cannot be read.*Input/output error"):
        FlatIndex.load(tmp_path / "i", keys, digest="d")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems raise other signals")
def test_a_store_that_shrinks_under_a_command_is_a_sentence(store: Path) -> None:
    """Cut after it was looked at and while it is read: the processor meets it, no check can."""
    program = f"""
        import os
        import numpy as np
        from offload_decode.cli.compiling import exit_on_bus_error
        from offload_decode.store import KVStore
        exit_on_bus_error()
        keys = KVStore.open({str(store)!r}).keys(0, 0)
        os.truncate({str(store / "layers/000/keys/c.0.0.0")!r}, 0)
        np.array(keys)
        print("still here")
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith(
        "error: a file of the store or of its index shrank while it was read, or its"
    )
    assert ran.stderr.count("\n") == 1
