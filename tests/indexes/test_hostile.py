"""Files of an index that someone changed on purpose: refused in a sentence, before anything uses a number."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import IndexDamaged, IndexMismatch, VectorIndexError
from offload_decode.indexes import files, get
from offload_decode.indexes.approximate import ApproximateIndex
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.testing.index_contract import clustered_keys, near_queries
from tests.indexes.hostile import write

KINDS = ["clusters", "faiss-ivf", "faiss-hnsw", "hnswlib"]
ROOT = Path(__file__).parents[2]


def survived(kind: str, trials: int, seed: int) -> dict[str, int]:
    command = [sys.executable, "-m", "tests.indexes.hostile", kind, str(trials), str(seed)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, (ran.returncode, ran.stderr[-2000:])
    outcomes: dict[str, int] = json.loads(ran.stdout)
    return outcomes


@pytest.mark.parametrize(("trials", "seed"), [(60, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_number_in_a_native_file_does_harm(kind: str, trials: int, seed: int) -> None:
    outcomes = survived(kind, trials, seed)
    assert outcomes.keys() == {"refused", "answered"}, "codes and centroids may be anything, ids may not"
    assert sum(outcomes.values()) == trials


def saved(kind: str, folder: Path) -> tuple[ApproximateIndex, Path]:
    index = get(kind).build(clustered_keys(2000), near_queries(64), digest="d", k=8)
    assert isinstance(index, ApproximateIndex)
    index.save(folder / "i")
    return index, folder / "i"


def forge(path: Path, **fields: Any) -> None:
    """Change fields of the metadata, and make its checksum right."""
    file = path.with_suffix(".json")
    body = {name: value for name, value in json.loads(file.read_text()).items() if name != "sha256"} | fields
    file.write_text(files._rendered(body | {"sha256": files._body_sha256(body)}))


NOT_NUMBERS = ["1", None, [], {}, float("nan")]
RECALLS: list[tuple[str, Any]] = [
    *(("target", bad) for bad in [*NOT_NUMBERS, True, -0.5, 1.5]),
    *(("k", bad) for bad in [*NOT_NUMBERS, True, 0, 2.0, 2**40]),
    *(("measured", bad) for bad in [*NOT_NUMBERS, -1, 1.1]),
    *(("queries", bad) for bad in [*NOT_NUMBERS, 0, 3.5]),
    *(("source", bad) for bad in ["", 3, None, ["keys"]]),
    *(("parameter", bad) for bad in [3, None, "another", {}]),
    *(("value", bad) for bad in [*NOT_NUMBERS, 0, -1, 1e300, 10**400, float("inf")]),
    *(("full_scan", bad) for bad in [0, "no", None]),
    *((name, bad) for name in ("mass", "lost", "best") for bad in ["1", True, -0.1, 1.1, float("nan")]),
]


def test_a_recall_of_the_wrong_type_or_out_of_range_is_refused(tmp_path: Path) -> None:
    index, path = saved("faiss-ivf", tmp_path)
    recall = files.metadata(path)["recall"]
    for name, bad in RECALLS:
        forge(path, recall=recall | {name: bad})
        with pytest.raises(IndexDamaged, match="build the index again"):
            type(index).load(path, index.keys, digest="d")
    for other in (None, 3, [], "recall", {}, recall | {"more": 1}, {"k": 1}):
        forge(path, recall=other)
        with pytest.raises(IndexDamaged, match="build the index again"):
            type(index).load(path, index.keys, digest="d")
    forge(path, recall=recall)
    assert type(index).load(path, index.keys, digest="d").recall == index.recall


def test_a_recall_of_an_earlier_version_has_no_attention(tmp_path: Path) -> None:
    index, path = saved("faiss-ivf", tmp_path)
    recall = files.metadata(path)["recall"]
    attention = [recall.pop(name) for name in ("mass", "low", "lost", "best")]
    assert None not in attention
    forge(path, recall=recall)
    loaded = type(index).load(path, index.keys, digest="d").recall
    assert (loaded.mass, loaded.lost, loaded.best, loaded.measured) == (None, None, None, recall["measured"])


@pytest.mark.parametrize("bad", [{}, 3, {"value": -1.0}, {"k": 0}, {"more": 1}], ids=str)
def test_a_recall_of_many_that_cannot_be_is_refused(tmp_path: Path, bad: Any) -> None:
    index, path = saved("clusters", tmp_path)
    recall = files.metadata(path)["recall"]
    forge(path, recall_of_many=recall | bad if bad and isinstance(bad, dict) else bad)
    with pytest.raises(IndexDamaged, match="build the index again"):
        type(index).load(path, index.keys, digest="d")


def test_a_native_file_is_the_one_beside_its_metadata(tmp_path: Path) -> None:
    index, path = saved("clusters", tmp_path)
    native = files.metadata(path)["native"]
    others = [native | {"suffix": "/../i.cells"}, native | {"suffix": 3}, native | {"size": "9"}]
    others += [native | {"size": -1}, native | {"sha256": None}, {"suffix": ".cells"}, {}]
    for other in (*others, None, 3, [], "x"):
        forge(path, native=other)
        with pytest.raises(IndexDamaged):
            type(index).load(path, index.keys, digest="d")


@pytest.mark.parametrize("field", ["kind", "digest", "n", "dim", "dtype", "format_version"])
def test_other_fields_of_the_wrong_type_are_of_another_index(tmp_path: Path, field: str) -> None:
    index, path = saved("clusters", tmp_path)
    for bad in (None, -1, "x", [], {}, 1e300):
        forge(path, **{field: bad})
        with pytest.raises((IndexDamaged, IndexMismatch)):
            type(index).load(path, index.keys, digest="d")


def test_metadata_that_is_no_small_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "i"
    os.mkfifo(tmp_path / "i.json")
    with pytest.raises(IndexDamaged, match="not the metadata"):
        files.metadata(path)
    (tmp_path / "i.json").unlink()
    with open(tmp_path / "i.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(IndexDamaged, match="not the metadata"):
        files.metadata(path)
    for text in ("[" * 100_000, "{}", "[]", '{"format_version": 2}', "1" * 5000, '"\\ud800"', "\0"):
        (tmp_path / "i.json").unlink()
        (tmp_path / "i.json").write_text(text)
        with pytest.raises(VectorIndexError):
            files.metadata(path)


def test_cells_that_shrink_under_a_reader_are_a_sentence(tmp_path: Path) -> None:
    index, path = saved("clusters", tmp_path)
    loaded, queries = ClusteredIndex.load(path, index.keys, digest="d"), near_queries(3)
    before = loaded.search(queries, 8)
    index.save(path)  # replaced by a rename: who has mapped the old one goes on with it
    np.testing.assert_array_equal(loaded.search(queries, 8).ids, before.ids)
    again = ClusteredIndex.load(path, index.keys, digest="d")
    os.truncate(f"{path}.cells", 4096)
    with pytest.raises(IndexDamaged, match="shorter than it was"):
        again.search(queries, 8)


def test_cells_that_name_a_key_twice_are_refused(tmp_path: Path) -> None:
    index, path = saved("clusters", tmp_path)
    assert isinstance(index, ClusteredIndex)
    assert ClusteredIndex.load(path, index.keys, digest="d").cells.nbytes == index.cells.nbytes
    bad = index.cells._replace(ids=index.cells.ids.copy())
    first, second = np.flatnonzero(bad.ids >= 0)[:2]
    bad.ids[first] = bad.ids[second]
    index._native.cells = bad
    index.save(path)
    with pytest.raises(IndexDamaged, match="names a key twice"):
        ClusteredIndex.load(path, index.keys, digest="d")


def test_a_file_of_an_index_is_no_link(tmp_path: Path) -> None:
    index, path = saved("clusters", tmp_path)
    for file in (tmp_path / "i.cells", tmp_path / "i.json"):
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(IndexDamaged, match="is not"):
            type(index).load(path, index.keys, digest="d")
        (tmp_path / "elsewhere").replace(file)
    type(index).load(path, index.keys, digest="d")


@pytest.mark.parametrize(
    ("place", "word"), [(72, 1 << 20), (80, 1 << 30), (80, 0x3FD71547652B8300), (88, 1 << 40)]
)
def test_a_graph_that_would_be_extended_otherwise_is_refused(tmp_path: Path, place: int, word: int) -> None:
    """hnswlib links further keys by these: more links than there is room for, on levels without end."""
    pytest.importorskip("hnswlib")
    index, path = saved("hnswlib", tmp_path)
    raw = bytearray((tmp_path / "i.hnsw").read_bytes())
    raw[place : place + 8] = word.to_bytes(8, "little")
    write(path, ".hnsw", bytes(raw))
    with pytest.raises(IndexDamaged, match="can be read"):
        type(index).load(path, index.keys, digest="d")
