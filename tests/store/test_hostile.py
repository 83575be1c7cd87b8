"""Stores made to harm whoever opens them, with checksums that fit: wrong numbers, names that lead out, pipes,
text without end. Each is refused in a sentence, at once.
"""

import json
import os
import random
import subprocess
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import StoreDamaged, StoreError, StoreForeign, StoreIncomplete
from offload_decode.kv.indexes import indexes_folder
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.store import KVStore, Manifest, files, verify_store
from offload_decode.store.reader import names_of
from offload_decode.store.staging import LOCK, REPLACED, STORE, WINDOWS, partial_path
from tests.fuzz.edits import DEEP, Edit, apply, places, put_back
from tests.store.jobs import FULL, SLIDING, Job, begun, make_job, read_all, seal

WRONG: list[Any] = [None, True, 0, -1, 2.5, 10**9, 2**63, 10**40, "", "x", "\x1b[31m", "../../.."]
WRONG += ["x" * 100_000, [], [None], ["keys"], {}, {"method": 3}, DEEP]


@pytest.fixture(scope="module", params=["auto", "int8"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "store"
    return make_job(40, layers=(FULL, SLIDING), kv=request.param).write(path)


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    copy = json.loads(json.dumps(value))
    if not path:
        return to
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return copy


def survives(path: Path) -> bool:
    """Whether a store opens; any error but a sentence fails the test."""
    seals = [(path / name).read_bytes() for name in (files.SUMS, files.SEAL)]
    fit(path)
    try:
        read_all(path)
    except StoreError:
        return False
    finally:
        for name, data in zip((files.SUMS, files.SEAL), seals, strict=True):
            (path / name).write_bytes(data)
    return True


def fit(path: Path) -> None:
    """Make the checksums fit the metadata, the only files that are changed here."""
    sums = files.read_sums(path)
    small = [name for name in sums if name.endswith("zarr.json")]
    seal(path, files.render(sums | files.hash_files(path, small)))


@pytest.mark.parametrize("name", ["zarr.json", "layers/000/keys/zarr.json", "documents/names/zarr.json"])
def test_no_value_of_the_metadata_does_harm(pristine: Path, name: str) -> None:
    file = pristine / name
    whole = file.read_bytes()
    document = json.loads(whole)
    chosen = random.Random(0)
    try:
        for where in places(document):
            for wrong in chosen.sample(WRONG, 4):
                file.write_text(json.dumps(changed(document, where, wrong)))
                survives(pristine)
    finally:
        file.write_bytes(whole)
    read_all(pristine)


# What may hold any text, and values that are shown and handed through.
TEXTS = {"model_id", "model_config_hash", "weights_hash", "tokenizer_hash", "token_hash", "software"}
OPEN = {"rope", "prefill", "opening"}


def test_a_manifest_takes_no_wrong_type_and_no_wrong_range(pristine: Path) -> None:
    manifest = json.loads((pristine / "zarr.json").read_bytes())["attributes"]["offload_decode"]
    taken: dict[str, list[Any]] = {}
    for where in filter(None, places(manifest)):
        for wrong in WRONG:
            other = changed(manifest, where, wrong)
            try:
                Manifest.from_json(other)
            except StoreForeign:
                continue
            if json.dumps(other) != json.dumps(manifest):
                taken.setdefault(where[0], []).append(wrong)
    assert {type(each) for name in TEXTS for each in taken[name]} == {str}
    assert all(type(each) is int and each > 0 for each in taken["n_tokens"])
    # The range alone: what their arrays and files say of these is looked at when a store is opened.
    ranged = {"n_tokens", "page_size", "query_samples", "shape", "kv_error"}
    assert taken.keys() <= TEXTS | OPEN | ranged


@pytest.mark.parametrize(
    "text",
    [
        *(
            lambda manifest, given=given: manifest.replace('"n_tokens": 40', '"n_tokens": ' + given)
            for given in ("NaN", '40, "n_tokens": 40', "40.0", "1e999", "9" * 5000, "[" * 100_000)
        ),
        lambda manifest: "[" * 100_000,
        lambda manifest: manifest + "\xff",
    ],
)
def test_text_that_is_no_strict_json_is_refused(pristine: Path, text: Any) -> None:
    file = pristine / "zarr.json"
    whole = file.read_bytes()
    try:
        file.write_bytes(text(whole.decode()).encode("latin-1"))
        assert file.read_bytes() != whole
        assert not survives(pristine)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("offsets", [[0, 20, -1], [0, 50, 40], [1 << 62, 20, 40], [0, 20, 1301]])
def test_documents_outside_of_the_tokens_are_refused(store: Path, offsets: list[int]) -> None:
    file = store / "documents/offsets/c.0"
    file.write_bytes(np.array(offsets, "<i8").tobytes())
    with pytest.raises(StoreDamaged, match="contradict"):
        _ = KVStore.open(store).documents


def test_query_positions_outside_of_the_tokens_are_refused(store: Path) -> None:
    file = store / "query_positions/c.0"
    for wrong in (-1, 1300):
        positions = np.frombuffer(file.read_bytes(), "<i8").copy()
        positions[3] = wrong
        file.write_bytes(positions.tobytes())
        with pytest.raises(StoreDamaged, match="contradict"):
            _ = KVStore.open(store).query_positions


@pytest.mark.parametrize(
    "name",
    [
        "zarr.json",
        "SHA256SUMS",
        "SHA256SUMS.sha256",
        "layers/000/keys/zarr.json",
        "layers/000/keys/c.0.0.0",
        "tokens/c.0",
        "documents/names/c.0",
    ],
)
def test_what_is_no_plain_file_never_hangs_and_never_passes(store: Path, name: str) -> None:
    before = {name: (store / name).read_bytes()}
    for kind in ("pipe", "link", "folder", "socket"):
        apply(store, [Edit(name, "kind", (kind,))])
        for read in (KVStore.open, verify_store):
            with pytest.raises(StoreError, match=Path(name).name.replace(".", r"\.")):
                read(store)
        put_back(store, before, [name])
    verify_store(store)


def test_a_folder_that_is_a_link_does_not_pass(store: Path, tmp_path: Path) -> None:
    (store / "layers/000").rename(tmp_path / "elsewhere")
    (store / "layers/000").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(StoreDamaged, match=r"layers/000 is a link"):
        KVStore.open(store)
    with pytest.raises(StoreDamaged, match=r"layers/000 \(a link\)"):
        verify_store(store)


def test_a_store_may_be_reached_by_a_link(store: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(store, target_is_directory=True)
    read_all(tmp_path / "link")
    verify_store(tmp_path / "link")


@pytest.mark.parametrize("size", [0, 100])
def test_a_file_that_shrinks_while_it_is_mapped_is_a_sentence(store: Path, size: int) -> None:
    opened = KVStore.open(store)
    opened.keys(0, 0)
    opened.keys(2, 0)
    opened.check_mapped(0)
    os.truncate(store / "layers/000/keys/c.0.1.0", size)
    for use_again in (lambda: opened.check_mapped(0), lambda: opened.keys(0, 0)):
        with pytest.raises(StoreDamaged, match=f"keys/c.0.1.0 has {size} bytes and should have"):
            use_again()
    opened.check_mapped(2)
    assert opened.keys(0, 1).shape == (1300, 64)


def test_a_staged_file_that_shrinks_is_a_sentence(tmp_path: Path) -> None:
    job = make_job(600)
    with job.open(tmp_path / "s") as writer:
        job.feed(writer, until=200)
        assert writer.keys(0, 0).shape == (200, 64)
        os.truncate(tmp_path / "s.partial/store/layers/000/keys/c.0.0.0", 10)
        with pytest.raises(StoreDamaged, match="has 10 bytes and should have"):
            writer.keys(0, 0)


def with_line(store: Path, name: str) -> None:
    """Name a file more in the store's list of checksums."""
    seal(store, (store / files.SUMS).read_bytes() + f"{'0' * 64}  {name}\n".encode())


@pytest.mark.parametrize(
    "name", ["../{}/zarr.json", "/etc/zarr.json", "a\0b/zarr.json", "./zarr.json", "tokens/c.0"]
)
def test_checksums_name_files_of_the_store_once(store: Path, name: str) -> None:
    with_line(store, name.format(store.name))
    with pytest.raises(StoreDamaged, match="not a list of the files of a store"):
        KVStore.open(store)


def test_verify_takes_no_path_without_end(store: Path) -> None:
    with_line(store, "/".join(["a"] * 200_000))
    with pytest.raises(StoreDamaged, match="names what is no file of a store") as caught:
        verify_store(store)
    assert len(str(caught.value)) < 1000


def test_verify_walks_into_no_folders_without_end(store: Path) -> None:
    here = os.open(store, os.O_RDONLY)
    for _ in range(1200):  # deeper than Python recurses
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    with pytest.raises(StoreDamaged, match=r"d/d/d.* \(not of this store\)"):
        verify_store(store)
    subprocess.run(["rm", "-r", store / "d"], check=True)


@pytest.mark.parametrize("name", [STORE, WINDOWS, REPLACED])
def test_a_pipe_in_a_staging_folder_is_removed(job: Job, tmp_path: Path, name: str) -> None:
    partial = partial_path(tmp_path / "s")
    partial.mkdir()
    (partial / LOCK).touch()
    os.mkfifo(partial / name)
    job.write(tmp_path / "s")
    verify_store(tmp_path / "s")
    assert not partial.exists()


@pytest.mark.parametrize("kind", ["flat.partial", "flat.old"])
def test_a_pipe_beside_indexes_is_removed(store: Path, kind: str) -> None:
    build_indexes(store, "flat")
    os.mkfifo(indexes_folder(store) / kind)
    build_indexes(store, "flat")
    assert [path.name for path in indexes_folder(store).iterdir()] == ["flat"]


def test_a_sentence_does_not_name_a_hundred_thousand_files(store: Path) -> None:
    sums = files.read_sums(store) | {f"more/{n}": "0" * 64 for n in range(100_000)}
    seal(store, files.render(sums))
    with pytest.raises(StoreDamaged, match=r"and 99,950 more\)") as caught:
        KVStore.open(store)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    "text", ["[[],[],[]]", '["a", {}]', '["a"', "[1]", '{"a": "b"}', '"a"', "", '["a" b]']
)
def test_names_are_texts_before_they_are_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=r"list of names|Expecting"):
        names_of(text.encode())


def test_names_are_read_as_they_were_written() -> None:
    names = ["a", "", 'b "c" \\ [', "ü\n", "]"]
    assert names_of(json.dumps(names).encode()) == names
    assert names_of(b"[]") == []


def test_addresses_that_there_are_not_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "f"
    with pytest.raises(StoreError, match="cannot be mapped into memory"):
        files.map_files([file] * 2, 1 << 62)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_lock_is_a_plain_file(job: Job, tmp_path: Path, kind: str) -> None:
    lock = begun(job, tmp_path / "s", 100) / "lock"
    lock.unlink()
    {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path / "made"), "folder": os.mkdir}[kind](
        lock
    )
    with pytest.raises(StoreDamaged, match="lock in"):
        job.open(tmp_path / "s")
    assert not (tmp_path / "made").exists(), "a link would make a file elsewhere"


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "x"},
        {"tokens": [100]},
        {"tokens": -100},
        {"crcs": {"tokens": ["x"]}},
        {"segments": {"1": [["../..", 100, 0]]}},
        {"segments": {"1": [[0, 100, 0], [50, 100, 0]]}},
        {"errors": {"layers/000/keys": [0.0]}},
    ],
)
def test_progress_from_elsewhere_is_looked_at(job: Job, tmp_path: Path, change: dict[str, object]) -> None:
    progress = begun(job, tmp_path / "s", 100) / "progress.json"
    body = json.loads(progress.read_text()) | change
    body.pop("crc")
    progress.write_text(json.dumps({**body, "crc": zlib.crc32(json.dumps(body).encode())}))
    with pytest.raises(StoreIncomplete, match="run it again to go on"):
        KVStore.open(tmp_path / "s")
    with pytest.raises(StoreDamaged, match="is damaged: remove"):
        job.open(tmp_path / "s")


def test_no_more_queries_than_their_places_may_take(store: Path) -> None:
    """A sparse file of a terabyte of them takes no disk, and would take all memory."""
    manifest = json.loads((store / "zarr.json").read_text())["attributes"]["offload_decode"]
    Manifest.from_json(manifest | {"query_samples": 10**12})  # of 1,300 tokens there are 2,600
    with pytest.raises(StoreForeign, match="more than 1,048,576 queries"):
        Manifest.from_json(manifest | {"query_samples": 10**12, "n_tokens": 10**9, "seam": 0})


@pytest.mark.parametrize("name", ["layers/000/keys/c.0.0.0", "zarr.json", "tokens/zarr.json"])
def test_verify_reads_no_hole_of_terabytes(store: Path, name: str) -> None:
    """It would take hours: what a file of the store should have, or could, is known."""
    with open(store / name, "ab") as file:
        file.truncate(1 << 42)
    with pytest.raises(StoreDamaged, match=f"{name} .*4,398,046,511,104 bytes"):
        verify_store(store)


def test_verify_names_a_file_of_another_size_beside_those_that_changed(store: Path) -> None:
    keys, values = (store / f"layers/000/{name}/c.0.0.0" for name in ("keys", "values"))
    size = keys.stat().st_size
    os.truncate(keys, size + 1)
    values.write_bytes(bytes(values.stat().st_size))
    with pytest.raises(StoreDamaged) as caught:
        verify_store(store)
    assert f"keys/c.0.0.0 ({size + 1:,} bytes instead of {size:,})" in str(caught.value)
    assert "values/c.0.0.0 (changed)" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["001/window_keys/c.0.0.0", "000/keys/c.0.0.0", "000/key_norms/c.0.0.0", "000/zarr.json"]
)
def test_a_staged_file_of_another_size_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    job = make_job(300, layers=(FULL, SLIDING))
    os.truncate(begun(job, tmp_path / "s", 100) / f"store/layers/{name}", 1 << 42)
    with pytest.raises(StoreDamaged, match=name.removesuffix("/c.0.0.0")):
        job.open(tmp_path / "s")
