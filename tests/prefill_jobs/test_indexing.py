"""Indexes are tuned, and what they find is reported, by the attention of the model whose keys they hold."""

import numpy as np

from offload_decode.indexes.flat import FlatIndex
from offload_decode.kv.indexes import heads_of
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs import indexing
from offload_decode.prefill_jobs.append import append_texts
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.indexing import asked_of, build_indexes
from offload_decode.prefill_jobs.job import Settings, prefill_texts
from offload_decode.store.reader import KVStore
from tests.tiny import random_ids, served_model, text_model, tiny_tokenizer, token_store

SCALING = 0.7
TEXTS = [TextDocument(name, f"{name} is a letter. " * 9) for name in "ab"]


def all_asked(path):
    store = KVStore.open(path)
    return [asked_of(store, layer, head) for layer, head in heads_of(store)]


def test_queries_have_the_attention_of_the_models_own_scaling(tmp_path):
    model = served_model("granite", attention_multiplier=SCALING)
    store = KVStore.open(token_store(tmp_path / "store", model, random_ids(300)))
    layer, head = heads_of(store)[-1]
    keys, queries = store.keys(layer, head), store.queries(layer, head)
    logits = asked_of(store, layer, head) @ keys.T / np.sqrt(keys.shape[1])
    np.testing.assert_allclose(logits, SCALING * queries @ keys.T, rtol=1e-4, atol=1e-4)


def test_queries_of_a_model_that_scales_by_the_width_are_as_they_are_stored(tmp_path):
    store = KVStore.open(token_store(tmp_path / "store", served_model("llama"), random_ids(300)))
    assert np.array_equal(asked_of(store, 0, 0), store.queries(0, 0))


def test_indexes_are_given_these_queries_when_they_are_built_and_extended(tmp_path, monkeypatch):
    given = []

    class Noting(FlatIndex):
        @classmethod
        def build(cls, keys, queries=None, **others):
            given.append(queries)
            return super().build(keys, queries, **others)

        def extended(self, keys, queries=None, *, digest):
            given.append(queries)
            return super().extended(keys, queries, digest=digest)

    monkeypatch.setattr(indexing.registry, "get", lambda kind: Noting)
    model = wrap(text_model(family="granite", attention_multiplier=SCALING), tiny_tokenizer())
    store = tmp_path / "store"
    prefill_texts(model, TEXTS[:1], store, Settings(options={"chunk": 16}))
    build_indexes(store, "flat")
    expected = all_asked(store)
    append_texts(model, TEXTS[1:], store)
    expected += all_asked(store)
    assert all(np.array_equal(one, other) for one, other in zip(given, expected, strict=True))
