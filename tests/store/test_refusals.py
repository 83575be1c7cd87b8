import json
import os
import shutil
from pathlib import Path

import pytest

from offload_decode.common.errors import (
    StoreDamaged,
    StoreError,
    StoreForeign,
    StoreIncomplete,
    StoreNotFound,
)
from offload_decode.store import FORMAT_VERSION, KVStore, files, verify_store
from tests.store.jobs import Job, flipped, seal, tree

OPENERS = [KVStore.open, verify_store]


def reseal(store: Path) -> None:
    """Make the checksums fit, as if the store had been made this way."""
    seal(store, files.render(files.hash_files(store, tree(store).keys() - {*SUMS})))


SUMS = (files.SUMS, files.SEAL)


def edit(store: Path, name: str, **changes: object) -> None:
    """Change fields of the manifest (`zarr.json`) or of the metadata of an array, and fit the checksums."""
    file = store / name
    data = json.loads(file.read_text())
    (data["attributes"]["offload_decode"] if name == "zarr.json" else data).update(changes)
    file.write_text(json.dumps(data))
    reseal(store)


def grid(*chunk: int) -> dict[str, object]:
    return {"name": "regular", "configuration": {"chunk_shape": list(chunk)}}


@pytest.fixture(params=OPENERS, ids=["open", "verify"])
def refuses(request: pytest.FixtureRequest):
    def check(path: Path, error: type[StoreError], match: str) -> None:
        with pytest.raises(error, match=match) as caught:
            request.param(path)
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)

    return check


def test_nothing_there(refuses, tmp_path: Path) -> None:
    refuses(tmp_path / "none", StoreNotFound, "There is no store at .*none: make one")


def test_a_prefill_that_has_not_finished(refuses, job: Job, tmp_path: Path) -> None:
    with job.open(tmp_path / "store") as writer:
        refuses(tmp_path / "store", StoreIncomplete, r"store\.partial has not finished \(0 of 1,300 tokens\)")
        job.feed(writer, until=500)
    refuses(tmp_path / "store", StoreIncomplete, r"\(500 of 1,300 tokens\): run it again")
    refuses(tmp_path / "store.partial", StoreIncomplete, r"\(500 of 1,300 tokens\)")
    shutil.rmtree(tmp_path / "store.partial/store")
    (tmp_path / "store.partial/progress.json").unlink()
    refuses(tmp_path / "store", StoreIncomplete, "an unknown number")


def test_foreign_things(refuses, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", StoreForeign, "not a KV store")
    (tmp_path / "file").write_text("hello")
    refuses(tmp_path / "file", StoreForeign, "not a KV store")
    other = tmp_path / "zarr"
    other.mkdir()
    for text in (
        '{"zarr_format": 3, "node_type": "group", "attributes": {}}',
        "not json",
        "[]",
        "\x00\xff",
        "",
    ):
        (other / "zarr.json").write_text(text)
        refuses(other, StoreForeign, "not a KV store")
    (other / "SHA256SUMS").write_text("somebody else's")
    refuses(other, StoreForeign, "not a KV store")


def test_other_versions_and_unknown_fields(refuses, store: Path) -> None:
    edit(store, "zarr.json", format_version=FORMAT_VERSION + 1)
    refuses(store, StoreForeign, f"format version {FORMAT_VERSION + 1}")
    edit(store, "zarr.json", format_version=FORMAT_VERSION, codec="int4")
    refuses(store, StoreForeign, "'codec'")


DATA = ["layers/000/keys/c.1.2.0", "layers/001/window_keys/c.0.0.0", "tokens/c.0", "documents/names/c.0"]
METADATA = ["zarr.json", "layers/zarr.json", "layers/002/values/zarr.json", *SUMS]


@pytest.mark.parametrize("name", [*DATA, *METADATA])
def test_truncated_grown_and_missing_files_and_damaged_metadata(refuses, store: Path, name: str) -> None:
    data = (store / name).read_bytes()
    every = [data[:-1], data[:-2], data[: len(data) // 2], b"", data + b"\0"]
    if name in METADATA:
        every.append(data[:40] + b"#" + data[41:])
    for broken in every:
        (store / name).write_bytes(broken)
        refuses(store, StoreDamaged, name)
    (store / name).unlink()
    refuses(store, StoreDamaged, f"{name}.*missing")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("layers/000/keys/zarr.json", {"shape": [2, 1299, 64]}),
        ("layers/000/keys/zarr.json", {"data_type": "uint16"}),
        ("layers/000/keys/zarr.json", {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}),
        ("layers/000/keys/zarr.json", {"codecs": [{"name": "bytes"}, {"name": "crc32c"}]}),
        ("layers/000/keys/zarr.json", {"codecs": []}),
        ("layers/000/keys/zarr.json", {"chunk_grid": {"name": "other"}}),
        ("layers/000/keys/zarr.json", {"chunk_grid": grid(1, 100, 64)}),
        ("layers/000/keys/zarr.json", {"chunk_grid": grid(2, 512, 64)}),
        ("layers/000/keys/zarr.json", {"chunk_grid": grid(1, 0, 64)}),
        ("layers/000/keys/zarr.json", {"attributes": {}}),
        ("documents/offsets/zarr.json", {"shape": [0]}),
        ("zarr.json", {"dtype": "float32", "kv": {"keys": "float32", "values": "float32"}}),
        ("zarr.json", {"kv": {"keys": "int8-rows", "values": "float16"}}),
        ("zarr.json", {"n_tokens": 1301}),
        ("zarr.json", {"page_size": 32}),
        ("zarr.json", {"query_samples": 3}),
    ],
)  # fmt: skip
def test_metadata_that_contradicts_the_manifest(refuses, store: Path, name: str, changes: dict) -> None:
    edit(store, name, **changes)
    refuses(store, StoreDamaged, "manifest|list")


def test_arrays_that_contradict_the_manifest(store: Path) -> None:
    for name, where in (("tokens/c.0", 100), ("documents/offsets/c.0", 9)):
        data = bytearray((store / name).read_bytes())
        data[where] ^= 0x40
        (store / name).write_bytes(data)
        reseal(store)
        KVStore.open(store)
        with pytest.raises(StoreDamaged, match="contradict its manifest"):
            verify_store(store)
        data[where] ^= 0x40
        (store / name).write_bytes(data)


@pytest.mark.parametrize(
    "names", [b'["a.txt", "b/\\u00fc.md"}', b'["a.txt.and.b/\\u00fc.md"]', b"17                     "]
)
def test_a_list_of_documents_that_cannot_be_read(store: Path, names: bytes) -> None:
    file = store / "documents/names/c.0"
    file.write_bytes(names.ljust(file.stat().st_size)[: file.stat().st_size])
    opened = KVStore.open(store)
    with pytest.raises(StoreDamaged, match="list of documents"):
        _ = opened.documents


def test_what_cannot_be_read_is_a_sentence(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(store / "zarr.json"))

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(StoreError, match=r"zarr.json cannot be read: Permission denied"):
        KVStore.open(store)


def test_every_bit_of_the_small_files(store: Path) -> None:
    for name in ("SHA256SUMS.sha256", "zarr.json"):
        size = (store / name).stat().st_size
        for bit in range(0, 8 * size, 7):  # of every byte one at least, and of each place in a byte
            with flipped(store / name, bit), pytest.raises(StoreError):
                KVStore.open(store)
    KVStore.open(store)


def test_every_damaged_file_is_named(store: Path) -> None:
    keys, values, tokens = "layers/000/keys/c.1.0.0", "layers/000/values/c.0.0.0", "tokens/c.0"
    data = bytearray((store / keys).read_bytes())
    data[-1] ^= 128  # the padding counts too
    (store / keys).write_bytes(data)
    size = (store / values).stat().st_size
    (store / values).write_bytes(b"short")
    (store / tokens).unlink()
    (store / "notes.txt").write_text("mine")
    (store / "layers/000/empty").mkdir()
    (store / "layers/000/link").symlink_to(store)
    with pytest.raises(StoreDamaged) as caught:
        verify_store(store)
    for part in (
        f"{keys} (changed)",
        f"{values} (5 bytes instead of {size:,})",
        f"{tokens} (missing)",
        "notes.txt (not of this store)",
        "layers/000/empty (not of this store)",
        "layers/000/link (not of this store)",
    ):
        assert part in str(caught.value)
    assert str(caught.value).count("(") == 6


def test_progress_ends_with_every_byte(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    KVStore.open(store).verify(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    sizes = {name: len(data) for name, data in tree(store).items()}
    expected = sum(size for name, size in sizes.items() if not name.startswith("SHA256SUMS"))
    assert seen[-1] == (expected, expected)
