"""Stores made to harm whoever opens them, with checksums that fit: each is refused in a sentence, at once."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import StoreDamaged, StoreError, StoreForeign
from offload_decode.store import KVStore, Manifest, files, verify_store
from tests.store.jobs import FULL, SLIDING, make_job
from tests.store.test_refusals import reseal

DEEP: Any = []
for _ in range(40):
    DEEP = [DEEP]

WRONG: list[Any] = [
    None,
    True,
    0,
    -1,
    2.5,
    10**9,
    2**63,
    10**40,
    "",
    "x",
    "\x1b[31m",
    "../../..",
    "x" * 100_000,
    [],
    [None],
    ["keys"],
    {},
    {"method": 3},
    DEEP,
]


@pytest.fixture(scope="module", params=["auto", "int8"])
def pristine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile") / "store"
    return make_job(40, layers=(FULL, SLIDING), kv=request.param).write(path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value lies in a JSON document, those inside of others too."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    copy = json.loads(json.dumps(value))
    if not path:
        return to
    inner = copy
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = to
    return copy


def use(path: Path) -> None:
    """Everything that a store gives without a model."""
    store = KVStore.open(path)
    _ = store.tokens, store.documents, store.query_positions, store.cost(), store.manifest.to_json()
    for layer in store.manifest.shape.full_layers:
        for head in range(store.manifest.shape.kv_heads):
            store.keys(layer, head), store.values(layer, head), store.queries(layer, head)
            store.pages(layer, head), store.key_norms(layer, head)
    for layer in set(range(len(store.manifest.shape.layers))) - set(store.manifest.shape.full_layers):
        store.window(layer)


def survives(path: Path) -> bool:
    """Whether a store opens; any error but a sentence fails the test."""
    seals = [(path / name).read_bytes() for name in (files.SUMS, files.SEAL)]
    fit(path)
    try:
        use(path)
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
    text = files.render(sums | files.hash_files(path, small))
    (path / files.SUMS).write_bytes(text)
    (path / files.SEAL).write_bytes(files.seal_of(text))


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
    use(pristine)


# What may hold any text, and values that are shown and handed through.
TEXTS = {"model_id", "model_config_hash", "weights_hash", "tokenizer_hash", "token_hash", "software"}
OPEN = {"rope", "prefill"}


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
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": NaN'),
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": 40, "n_tokens": 40'),
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": 40.0'),
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": 1e999'),
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": ' + "9" * 5000),
        lambda manifest: manifest.replace('"n_tokens": 40', '"n_tokens": ' + "[" * 100_000),
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


def odd_kinds(file: Path, elsewhere: Path) -> Iterator[str]:
    """In place of `file`: a pipe, a link to the same bytes, a folder, a socket."""
    data = file.read_bytes()
    elsewhere.write_bytes(data)
    for kind in ("pipe", "link", "folder", "socket"):
        file.unlink()
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "link":
            file.symlink_to(elsewhere)
        elif kind == "folder":
            file.mkdir()
        else:
            here = os.getcwd()
            os.chdir(file.parent)  # the names of sockets are short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(file.name)
            os.chdir(here)
        yield kind
        file.rmdir() if kind == "folder" else file.unlink()
        file.write_bytes(data)


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
def test_what_is_no_plain_file_never_hangs_and_never_passes(store: Path, tmp_path: Path, name: str) -> None:
    for kind in odd_kinds(store / name, tmp_path / "elsewhere"):
        with pytest.raises(StoreError, match=Path(name).name.replace(".", r"\.")):
            KVStore.open(store)
        with pytest.raises(StoreError, match=Path(name).name.replace(".", r"\.")):
            verify_store(store)
        assert kind
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
    use(tmp_path / "link")
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


def test_checksums_of_everything_can_be_made_to_fit(store: Path) -> None:
    reseal(store)
    use(store)
