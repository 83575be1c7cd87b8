"""`topk` behind clusters in one compiled call attends as its three parts do one after the other."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from offload_decode.common.rows import threads
from offload_decode.engine.step import StoredPrefix
from offload_decode.indexes.clusters import index as clusters
from offload_decode.kv.host_cache import HostKV
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.store.reader import KVStore
from tests.tiny import random_ids, served_model, token_store

N = 3000


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch):
    """Rows that are read twice, by two tasks, count twice."""
    monkeypatch.setattr(threads, "THREADS", 2)


@pytest.fixture(scope="module", params=["float32", "int8"])
def host(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("one pass") / "store"
    kinds = {} if request.param == "float32" else {"kv": "int8"}
    token_store(path, served_model("llama", num_hidden_layers=2), random_ids(N), **kinds)
    build_indexes(path, "clusters", k=16, recall=0.5)
    return HostKV(KVStore.open(path), torch.device("cpu"))


def prefix_of(host, **options):
    return StoredPrefix.over(host, host.store.manifest.shape, "topk", {"budget": "20", **options})


def attended(host, tokens=1, softcap=None, **options):
    """A state and the statistics, in one pass and the long way; whether the first was one."""
    shape = host.store.manifest.shape
    generator = torch.Generator().manual_seed(tokens)
    query = torch.randn(1, shape.query_heads, tokens, shape.head_dim, generator=generator)
    layer, found = shape.full_layers[-1], []
    for long_way in (False, True):
        prefix = prefix_of(host, **options)
        taken = []
        if long_way:
            prefix.one_pass = None
        elif prefix.one_pass is not None:
            own = prefix.one_pass
            taken.append(own.attend(layer, prefix.grouped(query, 0.3, softcap)))
        found.append((prefix.attend(layer, query, 0.3, softcap), prefix.take_stats(), taken))
    once, other = found
    for one, two in zip(once[0], other[0], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    for name in ("selected", "rows", "bytes_moved", "by_layer", "attended"):
        assert getattr(once[1], name) == getattr(other[1], name), name
    return bool(once[2]) and once[2][0] is not None


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"tail": "off"}])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_it_is_the_three_parts(host, tokens, options, softcap):
    assert attended(host, tokens, softcap, **options)
    assert not attended(host, 40, softcap, **options), "so many rows share more apart"


@pytest.mark.parametrize(
    "options",
    [
        {"budget": "mass=0.9"},
        {"budget": "20/30"},
        {"dense_layers": "0,1"},
        {"tail": "sample:16"},
        {"tail": "clusters"},
        {"index": "flat"},
        {"budget": f"{N}"},
    ],
)
def test_other_ways_are_taken_one_after_the_other(host, options):
    assert not attended(host, **options)


def test_where_threads_share_a_head_it_is_searched_in_parts(host, monkeypatch):
    monkeypatch.setattr(clusters, "_parts", lambda *_: 2)
    assert prefix_of(host).one_pass is not None
    shape = host.store.manifest.shape
    prefix = prefix_of(host)
    queries = prefix.grouped(torch.randn(1, shape.query_heads, 1, shape.head_dim), 0.3, None)
    assert prefix.one_pass.attend(shape.full_layers[0], queries) is None


def test_what_is_not_finite_is_left_to_the_errors_of_the_parts(host):
    shape = host.store.manifest.shape
    prefix = prefix_of(host)
    queries = prefix.grouped(torch.randn(1, shape.query_heads, 1, shape.head_dim), 0.3, None)
    broken = replace(queries, vectors=torch.full_like(queries.vectors, np.nan))
    assert prefix.one_pass.attend(shape.full_layers[0], broken) is None


def test_the_search_has_its_share_of_the_time(host):
    shape = host.store.manifest.shape
    prefix = prefix_of(host)
    prefix.attend(shape.full_layers[0], torch.randn(1, shape.query_heads, 1, shape.head_dim), 0.3, None)
    stats = prefix.take_stats()
    assert stats.search_s > 0
    assert stats.attend_s > 0
