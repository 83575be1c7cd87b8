"""What every index kind promises. Inherit, set `kind`, and pytest collects the promises."""

import json
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from offload_decode.common.errors import IndexDamaged, IndexMismatch, IndexNotFound, InvalidIndexInput
from offload_decode.common.rows import encodings
from offload_decode.indexes import Hits, VectorIndex, get, keys_digest

ENCODINGS = [encodings.INT8, encodings.INT4]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]
FORMS = [*DTYPES, *ENCODINGS]
DIM = 32
Array = npt.NDArray[Any]


def clustered_keys(n: int, dtype: Any = np.float16, seed: int = 0) -> Array:
    """Keys `[n, DIM]` around 60 centres that share an offset, as a head's keys do; `seed` draws the keys."""
    world = np.random.default_rng(60)
    centres = world.standard_normal((60, DIM)) + 2 * world.standard_normal(DIM)
    rng = np.random.default_rng(seed)
    keys = centres[rng.integers(0, 60, n)] + 0.6 * rng.standard_normal((n, DIM))
    if dtype in ENCODINGS:
        return encodings.encode(keys.astype(np.float32), dtype)
    return np.ascontiguousarray(keys.astype(np.float32).astype(dtype))


def near_queries(count: int, seed: int = 1) -> Array:
    """Queries drawn as the keys are."""
    return clustered_keys(count, np.float32, seed)


def foreign_queries(count: int, seed: int = 1) -> Array:
    """Queries of another distribution: another offset, no clusters, three times as long."""
    rng = np.random.default_rng(1000)
    offset = 2 * rng.standard_normal(DIM)
    noise = np.random.default_rng(seed).standard_normal((count, DIM))
    return (offset + 3 * noise).astype(np.float32)


def exact_scores(queries: Array, keys: Array) -> Array:
    return queries.astype(np.float64) @ encodings.decode(keys).astype(np.float64).T


def recall_of(hits: Hits, queries: Array, keys: Array, k: int) -> float:
    """Share of the true top-k ids, by sorting all float64 scores."""
    truth = np.argsort(-exact_scores(queries, keys), axis=1, kind="stable")[:, :k]
    found = [len(np.intersect1d(a, b)) for a, b in zip(truth, hits.ids, strict=True)]
    return sum(found) / truth.size


def assert_well_formed(hits: Hits, rows: int, k: int, n: int) -> None:
    """Types, shapes, padding at the end, ids unique and in range, scores descending."""
    filled = min(k, n)
    assert hits.ids.dtype == np.int64
    assert hits.scores.dtype == np.float32
    assert hits.ids.shape == hits.scores.shape == (rows, k)
    assert (hits.ids[:, filled:] == -1).all()
    assert (hits.scores[:, filled:] == -np.inf).all()
    for ids, scores in zip(hits.ids[:, :filled], hits.scores[:, :filled], strict=True):
        assert len(set(ids.tolist())) == filled
        assert ids.min(initial=0) >= 0
        assert ids.max(initial=0) < max(1, n)
        assert (np.diff(scores) <= 0).all()


def assert_truthful(hits: Hits, queries: Array, keys: Array) -> None:
    """Each score is the inner product with the stored key, to float32 rounding."""
    truth = np.take_along_axis(exact_scores(queries, keys), hits.ids, axis=1)
    sizes = np.abs(queries).astype(np.float64) @ np.abs(encodings.decode(keys).astype(np.float64)).T
    assert (np.abs(hits.scores - truth) <= 2e-6 * sizes.max() + 1e-6).all()


@cache
def shared_keys() -> Array:
    keys = clustered_keys(3000)
    keys.flags.writeable = False
    return keys


@cache
def shared_index(kind: str) -> VectorIndex:
    return get(kind).build(shared_keys(), foreign_queries(256, seed=3), k=16)


class IndexContract:
    """Promises of `indexes.base.VectorIndex`, of its files too: `indexes.files` keeps most of these."""

    kind: ClassVar[str]

    @property
    def cls(self) -> type[VectorIndex]:
        return get(self.kind)

    @pytest.fixture
    def keys(self) -> Array:
        return shared_keys()

    @pytest.fixture
    def index(self) -> VectorIndex:
        return shared_index(self.kind)

    def assert_truthful(self, hits: Hits, queries: Array, keys: Array) -> None:
        """Scores are what the kind says they are: inner products, or estimates, of which nothing is asked."""
        if self.cls.exact_scores:
            assert_truthful(hits, queries, keys)

    # Shapes and padding

    @pytest.mark.parametrize("k", [0, 1, 16, 2999, 3000, 3007])
    @pytest.mark.parametrize("rows", [0, 1, 7])
    def test_hits_are_well_formed(self, index: VectorIndex, rows: int, k: int) -> None:
        assert_well_formed(index.search(foreign_queries(rows), k), rows, k, len(index))

    @pytest.mark.parametrize("n", [0, 1, 2, 39, 81])
    def test_few_keys(self, n: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        keys, queries = clustered_keys(n), foreign_queries(3)
        index = self.cls.build(keys, foreign_queries(8))
        hits = index.search(queries, 100)
        assert_well_formed(hits, 3, 100, n)
        assert (np.sort(hits.ids[:, :n], axis=1) == np.arange(n)).all()
        index.save(tmp_path / "few")
        assert (self.cls.load(tmp_path / "few", keys).search(queries, 100).ids == hits.ids).all()
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("k", [0, 9, 3007])
    def test_heads_searched_together_answer_as_each_alone(self, index: VectorIndex, k: int) -> None:
        other = self.cls.build(clustered_keys(3000, seed=9), foreign_queries(64, seed=3), k=16)
        heads, queries = [index, other, index], np.stack([foreign_queries(5, seed) for seed in range(3)])
        together = self.cls.search_heads(heads, queries, k)
        assert together.ids.shape == together.scores.shape == (3, 5, k)
        for head, own, ids, scores in zip(heads, queries, together.ids, together.scores, strict=True):
            alone = head.search(own, k)
            np.testing.assert_array_equal(ids, alone.ids)
            np.testing.assert_array_equal(scores, alone.scores)

    def test_all_keys_are_found_at_k_equal_n(self, index: VectorIndex, keys: Array) -> None:
        hits = index.search(foreign_queries(3), len(keys))
        assert (np.sort(hits.ids, axis=1) == np.arange(len(keys))).all()

    # Scores

    @pytest.mark.parametrize("dtype", FORMS)
    def test_scores_are_inner_products_with_the_stored_keys(self, dtype: Any) -> None:
        keys, queries = clustered_keys(2000, dtype), foreign_queries(6)
        index = self.cls.build(keys, foreign_queries(64, seed=2), k=8)
        for k in (8, 40):
            hits = index.search(queries, k)
            assert_well_formed(hits, 6, k, 2000)
            self.assert_truthful(hits, queries, keys)

    def test_duplicate_keys_are_distinct_hits_of_equal_score(self) -> None:
        keys = clustered_keys(2000)
        keys[::4] = keys[0]
        queries = keys[:1].astype(np.float32) * 5
        queries -= queries.mean()
        hits = self.cls.build(keys, foreign_queries(64)).search(queries, 600)
        assert_well_formed(hits, 1, 600, 2000)
        self.assert_truthful(hits, queries, keys)
        copies = hits.scores[0][hits.ids[0] % 4 == 0]
        np.testing.assert_allclose(copies, copies[:1].repeat(len(copies)), rtol=1e-5)

    def test_zero_keys_are_legal(self) -> None:
        keys = np.zeros((1000, DIM), np.float16)
        hits = self.cls.build(keys, foreign_queries(8)).search(foreign_queries(2), 10)
        assert_well_formed(hits, 2, 10, 1000)
        assert (hits.scores == 0).all()

    # Recall

    @pytest.mark.parametrize("draw", [near_queries, foreign_queries])
    def test_recall_floor(self, draw: Any, keys: Array) -> None:
        index = self.cls.build(keys, draw(512, seed=5), target_recall=0.9, k=16)
        queries = draw(128, seed=6)
        for k in (4, 16, 64, 512):
            assert recall_of(index.search(queries, k), queries, keys, k) >= 0.86, k
        record = index.recall
        assert (record is None) == index.exhaustive
        if record is not None:
            assert (record.target, record.k) == (0.9, 16)
            assert (record.source, record.queries) == ("prefill queries", 256)
            assert record.measured >= 0.86

    def test_full_recall_is_reached_when_it_is_the_target(self, keys: Array) -> None:
        index = self.cls.build(keys, foreign_queries(64, seed=5), target_recall=1.0, k=16)
        queries = foreign_queries(64, seed=5)
        assert recall_of(index.search(queries, 16), queries, keys, 16) >= 0.99

    def test_keys_stand_in_for_missing_queries_and_the_record_says_so(self, keys: Array) -> None:
        for queries in (None, np.zeros((0, DIM), np.float32)):
            index = self.cls.build(keys, queries, k=16)
            assert index.exhaustive or (index.recall is not None and index.recall.source == "keys")

    # More keys

    @pytest.mark.parametrize("dtype", FORMS)
    def test_an_extended_index_holds_its_target(self, dtype: Any, tmp_path: Path) -> None:
        keys, queries = clustered_keys(3000, dtype), near_queries(64, seed=6)
        first = self.cls.build(keys[:2200], near_queries(256, seed=3), target_recall=0.9, k=16)
        first.save(tmp_path / "first")
        first = self.cls.load(tmp_path / "first", keys[:2200])
        before = first.search(queries, 16)
        index = first.extended(keys, near_queries(512, seed=5), digest="all")
        assert (len(index), index.digest) == (3000, "all")
        hits = index.search(queries, 16)
        assert_well_formed(hits, 64, 16, 3000)
        self.assert_truthful(hits, queries, keys)
        assert recall_of(hits, queries, keys, 16) >= 0.86
        added = encodings.decode(keys[2200:])
        assert recall_of(index.search(added, 1), added, keys, 1) >= 0.86
        if not index.exhaustive:
            assert index.recall is not None
            assert (index.recall.target, index.recall.k, index.recall.queries) == (0.9, 16, 256)
        assert (first.search(queries, 16).ids == before.ids).all(), "the earlier index stays as it is"
        index.save(tmp_path / "all")
        loaded = self.cls.load(tmp_path / "all", keys, digest="all")
        assert loaded.recall == index.recall
        np.testing.assert_array_equal(loaded.search(queries, 16).ids, hits.ids)

    @pytest.mark.parametrize(
        ("n", "more"), [(0, 0), (0, 50), (1, 1), (1, 2), (40, 2000), (500, 500), (500, 501)]
    )
    def test_few_keys_are_extended(self, n: int, more: int) -> None:
        keys, queries = clustered_keys(more), foreign_queries(3)
        index = self.cls.build(keys[:n], foreign_queries(8)).extended(keys, foreign_queries(8), digest="d")
        hits = index.search(queries, more + 1)
        assert_well_formed(hits, 3, more + 1, more)
        assert (np.sort(hits.ids[:, :more], axis=1) == np.arange(more)).all()

    def test_other_keys_cannot_extend_it(self, index: VectorIndex, keys: Array) -> None:
        for other in (keys[:-1], keys.astype(np.float32), encodings.encode(keys, encodings.INT8)):
            with pytest.raises(InvalidIndexInput, match="cannot be extended"):
                index.extended(other, digest="d")
        odd = np.concatenate([keys[:500], np.full((1, DIM), np.inf, keys.dtype)])
        first = self.cls.build(keys[:500], k=16)
        with pytest.raises(InvalidIndexInput, match="infinite"):
            first.extended(odd, digest="d").search(foreign_queries(1), 4)

    # Files

    @pytest.mark.parametrize("dtype", FORMS)
    def test_a_loaded_index_answers_as_the_saved_one(self, dtype: Any, tmp_path: Path) -> None:
        keys, queries = clustered_keys(1500, dtype), foreign_queries(5)
        keys.tofile(tmp_path / "keys")
        mapped = np.memmap(tmp_path / "keys", keys.dtype, "r", shape=keys.shape)
        index = self.cls.build(mapped, foreign_queries(64, seed=2), k=8)
        index.save(tmp_path / "layer.00" / "head.01")
        loaded = self.cls.load(tmp_path / "layer.00" / "head.01", mapped)
        assert loaded.recall == index.recall
        assert loaded.nbytes == index.nbytes
        assert loaded.digest == index.digest == keys_digest(keys)
        for k in (3, 40, 1600):
            before, after = index.search(queries, k), loaded.search(queries, k)
            np.testing.assert_array_equal(before.ids, after.ids)
            np.testing.assert_array_equal(before.scores, after.scores)
        assert not list(tmp_path.rglob("*.tmp"))
        assert not list(tmp_path.rglob("*.pkl"))

    def test_saving_again_replaces(self, index: VectorIndex, keys: Array, tmp_path: Path) -> None:
        self.cls.build(keys[:50]).save(tmp_path / "i")
        index.save(tmp_path / "i")
        assert len(self.cls.load(tmp_path / "i", keys)) == len(keys)

    def test_index_of_other_keys_is_refused(self, index: VectorIndex, keys: Array, tmp_path: Path) -> None:
        index.save(tmp_path / "i")
        other = keys.copy()
        other[7, 3] += 1
        for wrong, digest in ((other, None), (keys, "another store's")):
            with pytest.raises(IndexMismatch, match="digest"):
                self.cls.load(tmp_path / "i", wrong, digest=digest)
        name = "named by the store"
        self.cls.build(keys, digest=name).save(tmp_path / "named")
        assert self.cls.load(tmp_path / "named", keys, digest=name).digest == name
        for wrong, message in (
            (keys[:-1], "n is"),
            (keys.astype(np.float32), "dtype"),
            (encodings.encode(keys, encodings.INT8), "dtype is 'float16', not 'int8-rows'"),
        ):
            with pytest.raises(IndexMismatch, match=message):
                self.cls.load(tmp_path / "named", wrong, digest=name)

    def test_index_of_another_kind_is_refused(self, index: VectorIndex, keys: Array, tmp_path: Path) -> None:
        index.save(tmp_path / "i")
        other = get("flat" if self.kind != "flat" else "faiss-ivf")
        with pytest.raises(IndexMismatch, match="kind"):
            other.load(tmp_path / "i", keys)

    def test_another_format_version_is_refused(self, index: VectorIndex, keys: Array, tmp_path: Path) -> None:
        index.save(tmp_path / "i")
        metadata = json.loads((tmp_path / "i.json").read_text())
        (tmp_path / "i.json").write_text(json.dumps(metadata | {"format_version": 99}))
        with pytest.raises(IndexMismatch, match="99"):
            self.cls.load(tmp_path / "i", keys)

    def test_nothing_saved_is_said_so(self, keys: Array, tmp_path: Path) -> None:
        with pytest.raises(IndexNotFound, match="build"):
            self.cls.load(tmp_path / "nowhere", keys, digest="any")

    def test_damage_to_any_file_is_refused(self, index: VectorIndex, keys: Array, tmp_path: Path) -> None:
        index.save(tmp_path / "i")
        for file in sorted(tmp_path.iterdir()):
            whole = file.read_bytes()
            for place in np.linspace(0, len(whole) - 2, 25).astype(int):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << int(place % 7)
                file.write_bytes(flipped)
                if file.suffix == ".json" and _same_json(whole, flipped):
                    continue
                with pytest.raises((IndexDamaged, IndexMismatch)):
                    self.cls.load(tmp_path / "i", keys, digest=index.digest)
            for length in (0, 1, len(whole) // 2, len(whole) - 2):
                file.write_bytes(whole[:length])
                with pytest.raises(IndexDamaged):
                    self.cls.load(tmp_path / "i", keys, digest=index.digest)
            file.write_bytes(whole)
            self.cls.load(tmp_path / "i", keys, digest=index.digest)
            if file.suffix != ".json":
                file.unlink()
                with pytest.raises(IndexDamaged, match="missing"):
                    self.cls.load(tmp_path / "i", keys, digest=index.digest)
                file.write_bytes(whole)

    # What it states

    @pytest.mark.parametrize("dtype", ["float16", "float32", encodings.INT8])
    @pytest.mark.parametrize("dim", [32, 64])
    def test_stated_bytes_equal_those_of_a_built_index(self, dim: int, dtype: str, tmp_path: Path) -> None:
        # Within a tenth: how many levels of a graph a key is on, and where cells end, is drawn or found.
        drawn = np.random.default_rng(0).standard_normal((4000, dim)).astype(np.float32)
        keys = encodings.encode(drawn, dtype) if dtype == encodings.INT8 else drawn.astype(dtype)
        built = self.cls.build(keys)
        built.summarize(keys)
        stated = self.cls.costs(len(keys), dim, keys.dtype, 64)
        built.save(tmp_path / "i")
        file = sum(path.stat().st_size for path in tmp_path.iterdir() if path.suffix != ".json")
        assert stated.file == pytest.approx(file, rel=0.1)
        assert (stated.memory or stated.file) == pytest.approx(built.nbytes, rel=0.1)

    def test_stated_reads_grow_with_keys_and_queries_up_to_all_keys(self) -> None:
        def read(n: int, rows: int = 1, k: int = 64) -> int:
            return self.cls.costs(n, 64, np.dtype(np.float16), k, rows).read

        assert 0 < read(1_000) <= read(10_000) <= read(100_000)
        assert read(100_000) <= read(100_000, rows=4)
        costs = self.cls.costs(100_000, 64, np.dtype(np.float16), 64)
        everything = 100_000 * 128 + max(costs.memory, costs.file)
        assert read(100_000, rows=1000, k=10_000) <= everything
        assert self.cls.search_bytes(100_000, 64, 2, 4) > 0

    # Wrong input

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite_are_refused(self, bad: float, index: VectorIndex) -> None:
        keys = clustered_keys(500)
        keys[321, 5] = bad
        with pytest.raises(InvalidIndexInput, match="infinite"):
            self.cls.build(keys)
        queries = foreign_queries(4)
        queries[2, 1] = bad
        with pytest.raises(InvalidIndexInput, match="infinite"):
            index.search(queries, 3)

    def test_wrong_input_is_refused(self, index: VectorIndex, keys: Array) -> None:
        encoded = encodings.encode(keys, encodings.INT8)
        records = (encoded[None], encoded[::2], encoded.view(np.uint8), encoded["codes"])
        for wrong in (keys[0], keys.astype(np.float64), keys[:, ::2], keys[:, :0], keys.tolist(), *records):
            with pytest.raises(InvalidIndexInput):
                self.cls.build(wrong)
        queries = foreign_queries(2)
        asked: list[Any] = [(queries, k) for k in (-1, 2.5, None)]
        asked += [(wrong, 3) for wrong in (queries[0], queries[:, :-1], queries.astype(np.int64))]
        for given, k in asked:
            with pytest.raises(InvalidIndexInput):
                index.search(given, k)
        for options in ({"target_recall": 0.0}, {"target_recall": 1.1}, {"k": 0}):
            with pytest.raises(InvalidIndexInput):
                self.cls.build(keys, **options)

    def test_queries_of_16_bits_are_widened(self, index: VectorIndex) -> None:
        queries = foreign_queries(3).astype(ml_dtypes.bfloat16)
        narrow, wide = index.search(queries, 5), index.search(queries.astype(np.float32), 5)
        np.testing.assert_array_equal(narrow.ids, wide.ids)


def _same_json(a: bytes, b: bytes | bytearray) -> bool:
    """Whether a flipped bit changed nothing but white space."""
    try:
        return bool(json.loads(a) == json.loads(bytes(b)))
    except ValueError:
        return False
