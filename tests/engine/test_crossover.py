"""From how many tokens on a search pays is measured once, and decides where a user asks for speed."""

import math
from dataclasses import asdict, replace

import pytest
import torch

from offload_decode.engine import crossover
from offload_decode.engine.crossover import Crossover
from offload_decode.engine.engine import Engine
from offload_decode.hf import user_cache
from offload_decode.prefill_jobs.indexing import build_indexes
from tests.tiny import random_ids, served_model, token_store

N, BUDGET = 600, 50
SLOWER = Crossover(N, 0.1, 64, 0.2, 300, 0.3)


@pytest.mark.parametrize(
    ("dense_s", "few_s", "many_s", "largest"),
    [
        (1.0, 1.0, 2.0, 0),
        (1.0, 0.5, 1.5, 544),
        (2.0, 0.5, 1.0, 2944),
        (9.0, 0.5, 1.0, 4000),  # all tokens
        (1.0, 0.5, 0.4, 4000),  # measured beside other work
        (0.4, 0.5, 0.4, 0),
    ],
)
def test_seconds_grow_along_a_line(dense_s, few_s, many_s, largest):
    assert Crossover(4000, dense_s, 64, few_s, 1024, many_s).largest_k == largest


@pytest.fixture(scope="module")
def loaded():
    return served_model("llama")


@pytest.fixture(scope="module")
def store(loaded, tmp_path_factory):
    path = token_store(tmp_path_factory.mktemp("crossover") / "store", loaded, random_ids(N))
    build_indexes(path, "clusters", k=16)
    return path


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(user_cache, "_known", {})


def asked(store, loaded, wanted=False, **options):
    own = {"budget": str(BUDGET), "dense_layers": "", **options}
    return Engine.open(store, loaded, options=own, crossover=wanted)


@pytest.mark.parametrize(("found", "attended"), [(SLOWER, N), (replace(SLOWER, dense_s=1.0), BUDGET)])
def test_everything_is_attended_to_where_that_is_faster(store, loaded, found, attended, monkeypatch):
    monkeypatch.setattr(crossover, "measure", lambda *_: found)
    for wanted, options, selected in (
        (False, {"crossover": "yes"}, attended),
        (True, {}, attended),
        (True, {"crossover": "no"}, BUDGET),
        (True, {"index": "clusters"}, BUDGET),
        (True, {"tail": "off"}, BUDGET),
        (False, {}, BUDGET),
    ):
        engine = asked(store, loaded, wanted, **options)
        engine.ask("Who?")
        stats = engine.prefix.take_stats()
        assert stats.selected == selected * stats.rows
        assert ("attends" in engine.prefix.selector.report()) == (selected == N)


def test_a_layer_whose_search_reads_every_key_is_attended_to(store, loaded, monkeypatch):
    """Where the fastest way is asked for, and in that layer alone."""
    monkeypatch.setattr(crossover, "measure", lambda *_: replace(SLOWER, dense_s=1.0))
    selector = asked(store, loaded, crossover="yes").prefix.selector
    layers = loaded.shape.full_layers
    scanned = selector.indexes.layer(layers[0], loaded.shape.kv_heads)[0]
    monkeypatch.setattr(scanned, "scans", lambda k: True)
    for index in [one for layer in layers for one in selector.indexes.layer(layer, loaded.shape.kv_heads)]:
        if index is not scanned:
            monkeypatch.setattr(index, "scans", lambda k: False)
    assert [selector.takes_all(layer, BUDGET) for layer in layers] == [True] + [False] * (len(layers) - 1)
    assert (
        selector.report()["attends"] == f"to everything in 1 of {len(layers)} layers, which is faster there"
    )
    plain = asked(store, loaded, crossover="no").prefix.selector
    monkeypatch.setattr(plain.indexes.layer(layers[0], loaded.shape.kv_heads)[0], "scans", lambda k: True)
    assert not plain.takes_all(layers[0], BUDGET)


def test_it_is_measured_once_and_kept(store, loaded, monkeypatch):
    counted = []
    measure = crossover.measure
    monkeypatch.setattr(crossover, "measure", lambda *given: counted.append(measure(*given)) or counted[-1])
    for _ in range(2):
        asked(store, loaded, crossover="yes")
        user_cache._known.clear()  # another process
    (found,) = counted
    assert all(math.isfinite(own) and own > 0 for own in asdict(found).values())
    assert (found.tokens, found.many) == (N, N // 2)


def test_a_damaged_measurement_is_made_anew(store, loaded, monkeypatch):
    monkeypatch.setattr(crossover, "measure", lambda *_: SLOWER)
    for damaged in (replace(SLOWER, dense_s=math.nan), replace(SLOWER, many=64), {"tokens": 1}, [], None):
        own = damaged if not isinstance(damaged, Crossover) else asdict(damaged)
        with pytest.raises((TypeError, ValueError)):
            crossover._parsed(own)


def test_a_few_tokens_are_attended_to_at_once(loaded, tmp_path):
    engine = asked(token_store(tmp_path / "store", loaded, random_ids(100)), loaded, crossover="yes")
    assert engine.prefix.selector.takes_all(0, BUDGET)
    assert not torch.isnan(engine.ask("Who?")).any()
