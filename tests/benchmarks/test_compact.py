"""Keys in few bits, and codes of few bits that find them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.compact import GROUPS, TOGETHER, rounded, with_keys
from benchmarks.compact_tasks import asked, row
from benchmarks.search_bits import best, bytes_read, coded, found, rows, spread
from offload_decode.evals import answering
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.runs import run
from offload_decode.indexes.clusters.cells import build
from offload_decode.indexes.clusters.index import ClusteredIndex
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.testing.stores import stored
from tests.evals.made_up import looked_up
from tests.tiny import text_model, tiny_tokenizer

WORDS = Haystack("words", "".join(f"Sentence {number}. " for number in range(400)))
RNG = np.random.default_rng(3)


def test_no_key_is_off_by_more_than_half_a_step_of_its_group() -> None:
    keys = torch.from_numpy(RNG.standard_normal((3 * TOGETHER + 5, 16), np.float32))
    for bits in (4, 2):
        off = (rounded(keys, bits, "key") - keys).abs()
        half = (keys.amax(1) - keys.amin(1)) / (2**bits - 1) / 2
        assert (off <= half[:, None] + 1e-6).all()
        assert (rounded(keys, bits, "key")[0].unique().numel()) <= 2**bits
        for first in range(0, len(keys), TOGETHER):
            own = keys[first : first + TOGETHER]
            near = rounded(keys, bits, "channel")[first : first + TOGETHER]
            half = (own.amax(0) - own.amin(0)) / (2**bits - 1) / 2
            assert ((near - own).abs() <= half + 1e-6).all()


def test_a_long_channel_costs_the_others_nothing_where_each_has_its_scale_or_means_are_off() -> None:
    keys = torch.from_numpy(RNG.standard_normal((TOGETHER, 16), np.float32))
    keys[:, 3] += 100
    of_keys, without_mean, of_channels = (
        (rounded(keys, 4, group) - keys).square().mean() for group in GROUPS
    )
    assert of_channels < of_keys / 100
    assert without_mean < of_keys / 100


def test_keys_that_are_all_alike_stay_as_they_are() -> None:
    keys = torch.full((TOGETHER, 8), 0.3)
    for group in GROUPS:
        torch.testing.assert_close(rounded(keys, 2, group), keys)


def test_rounded_keys_stand_beside_the_stores_own_values(tmp_path: Path) -> None:
    store = stored(tmp_path, 50, 4, 2)
    near = with_keys(store, 4, "key")
    assert near.manifest.n_tokens == store.manifest.n_tokens
    for layer, head in ((0, 1), (1, 0)):
        np.testing.assert_array_equal(near.values(layer, head), store.values(layer, head).astype(np.float32))
        keys = torch.from_numpy(store.keys(layer, head).astype(np.float32))
        np.testing.assert_array_equal(near.keys(layer, head), rounded(keys, 4, "key").numpy())


def test_four_bits_are_those_of_the_index() -> None:
    keys = RNG.standard_normal((1000, 24), np.float32)
    cells = build(keys)
    rest = keys - spread(cells, len(keys))
    real = cells.ids >= 0
    steps = coded(rest, 4)[cells.ids[real]] / cells.scales[real, None]
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert np.abs(steps).max() == pytest.approx(7, abs=1e-4)


def test_more_bits_are_nearer_and_few_have_the_right_product_with_their_own_key() -> None:
    rest = RNG.standard_normal((200, 64), np.float32)
    rest[7] = 0
    off = [np.square(coded(rest, bits) - rest).mean() for bits in (4, 3, 2)]
    assert off == sorted(off)
    for bits in (3, 2):
        products = (coded(rest, bits) * rest).sum(1)
        np.testing.assert_allclose(products, np.square(rest).sum(1), rtol=1e-4, atol=1e-6)


def test_candidates_that_hold_the_best_keys_find_them_all() -> None:
    logits = RNG.standard_normal((5, 100), np.float32)
    every = best(logits, 100)
    np.testing.assert_allclose(found(logits, logits, every[:, :20], 8), 1, rtol=1e-6)
    without = found(logits, logits, every[:, 1:21], 8)  # the best key is no candidate
    held = np.sort(np.exp(logits), 1)[:, ::-1]
    np.testing.assert_allclose(without, held[:, 1:9].sum(1) / held[:, :8].sum(1), rtol=1e-5)


def test_the_rows_of_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stored(tmp_path, 200, 4, 2)
    build_indexes(store.path, "clusters")
    assert [row[0] for row in rows(store, [200])] == ["int8 keys, all", "without their mean, all"]
    monkeypatch.setattr(ClusteredIndex, "scans", lambda index, k: False)
    table = rows(store, [200])
    assert len(table) == 2 + 12
    assert {row[1] for row in table} == {"100.00%, 100.0%, 0.00%"}  # all keys are wanted


def test_fewer_bits_read_fewer_bytes_and_candidates_cost_theirs() -> None:
    cells = build(RNG.standard_normal((4096, 64), np.float32))
    four, two = (bytes_read(cells, 4096, bits, 64, 64) for bits in (4, 2))
    more = bytes_read(cells, 4096, 2, 64, 128)
    assert two < four
    assert more - two == 64 * (64 + 4)


def test_tasks_are_asked_behind_stores_of_as_many_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = wrap(text_model(), tiny_tokenizer(), "tiny")
    monkeypatch.setattr(answering, "reply", looked_up)
    kept = []
    for bits in ("auto", "int8"):
        evaluation = asked(loaded, WORDS, "niah_single_2", bits, 600, 1)
        with evaluation.stores(WORDS.text[:400], lambda done: None) as store:
            kept.append(store.manifest.kv["keys"])
        results = run(evaluation, loaded, tmp_path / f"{bits}.jsonl")
        assert row("needle", bits, results) == [f"needle, {bits}", "1", *["100 (21 to 100)"] * 2]
    assert kept[1] == "int8-rows" != kept[0]
