"""Sparse prefill: what each method chooses, by its definition, and what becomes of the choice."""

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from offload_decode.common.errors import ConfigError
from offload_decode.hf.compat import with_cache
from offload_decode.prefill_jobs.methods.registry import BUILT_IN, create, get
from offload_decode.testing import MethodContract
from offload_decode.testing.method_contract import CHUNK, SHAPE, TOKENS, Written, asked, prefilled
from offload_decode.testing.tiny import tiny_llama
from tests.tiny import eager

SPARSE = sorted(set(BUILT_IN) - {"dense"})


class TestDense(MethodContract):
    name = "dense"


class TestQuoKA(MethodContract):
    name = "quoka"

    def test_the_store_names_every_option(self, tmp_path):
        store = prefilled(tmp_path / "store", "quoka", {"budget": "25%", "reduce": "mean"})
        assert store.manifest.prefill == {
            "method": "quoka",
            "chunk": CHUNK,
            "budget": "25%",
            "queries": 16,
            "similarity": "cosine",
            "reduce": "mean",
        }


class TestSample(MethodContract):
    name = "sample"


class TestWindow(MethodContract):
    name = "window"


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


def chosen(name, **options):
    ids = create(name, options, SHAPE).select(1, asked(), Written())
    assert ids.shape[0] == 2
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    return [set(row) for row in ids.tolist()]


@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_quoka_is_algorithm_1(similarity, reduce):
    found = chosen("quoka", budget="9", queries="4", similarity=similarity, reduce=reduce)
    for head, rows in enumerate(asked().vectors.unflatten(1, (2, 12))):
        kept = [own[(unit(own) @ unit(own.mean(0))).argsort()[:4]] for own in rows]
        keys = Written().drawn(1, head)
        if similarity == "cosine":
            kept, keys = [unit(own) for own in kept], unit(keys)
        scores = (sum(kept) / 2) @ keys.T
        scores = scores.amax(0) if reduce == "max" else scores.mean(0)
        assert found[head] == set(scores.topk(9).indices.tolist())


def test_sample_keeps_tokens_that_evenly_sampled_queries_attend_to():
    found = chosen("sample", budget="25%", queries="3")
    for head, rows in enumerate(asked().vectors.unflatten(1, (2, 12))):
        logits = 0.3 * rows[:, [2, 6, 10]] @ Written().drawn(1, head).T
        assert found[head] == set(logits.softmax(-1).sum((0, 1)).topk(10).indices.tolist())


def test_window_takes_the_first_and_the_last():
    assert chosen("window", budget="10") == [{0, 1, 2, 3, *range(34, 40)}] * 2
    assert chosen("window", budget="3") == [{0, 1, 2}] * 2


@pytest.mark.parametrize("method", SPARSE)
def test_a_chunk_attends_to_itself_and_to_the_chosen_tokens(method, tmp_path, monkeypatch):
    """The keys and values of layer 1 are those of plain transformers under a mask of layer 0's choices."""
    mask = torch.zeros(1, 4, TOKENS, TOKENS, dtype=torch.bool)
    for start in range(0, TOKENS, CHUNK):
        part = slice(start, start + CHUNK)
        mask[:, :, part, part] = torch.ones(CHUNK, CHUNK).tril().bool()[: TOKENS - start, : TOKENS - start]
    kind = get(method)
    select = kind.select

    def watched(self, layer, queries, earlier):
        ids = select(self, layer, queries, earlier)
        if layer == 0:
            kept = range(earlier.length) if ids is None else ids
            for head in range(4):
                own = kept if ids is None else kept[head // 2]
                mask[0, head, earlier.length : earlier.length + CHUNK, own] = True
        return ids

    monkeypatch.setattr(kind, "select", watched)
    store = prefilled(tmp_path / "store", method, {"budget": "30%"})
    assert not mask.tril().equal(torch.ones_like(mask).tril())

    plain = eager(tiny_llama())
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        added = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        plain(
            torch.from_numpy(store.tokens.copy()).long()[None],
            attention_mask=added,
            **with_cache(plain, cache),
        )
    for stored, expected in ((store.keys, cache.layers[1].keys), (store.values, cache.layers[1].values)):
        for head in range(2):
            np.testing.assert_allclose(stored(1, head), expected[0, head], atol=2e-5)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("quaka", {}, "unknown prefill method 'quaka'; known are: dense, quoka, sample, window"),
        ("dense", {"budget": "5"}, "prefill method 'dense' has no option 'budget'; it has: chunk"),
        ("dense", {"chunk": "0"}, "chunk 0 is out of range"),
        ("quoka", {"chunk": "-1"}, "chunk -1 is out of range"),
        ("quoka", {"budget": "mass=0.9"}, "cannot be used by a prefill: give a count"),
        ("window", {"budget": "3/4"}, "cannot be used by a prefill: give a count"),
        ("window", {"budget": "much"}, "none of these: a count"),
        ("sample", {"budget": "1,2,3"}, "lists 3 layers, but 2 layers are searched"),
        ("sample", {"queries": "0"}, "queries 0 is out of range"),
        ("quoka", {"similarity": "cos"}, "unknown similarity 'cos'"),
    ],
)
def test_mistakes_show_before_the_first_chunk(method, options, said):
    with pytest.raises(ConfigError, match=said):
        create(method, options, SHAPE)
