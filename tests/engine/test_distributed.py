"""A store that is attended to in parts gives what it gives in one piece."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload_decode import Engine
from offload_decode.attention.queries import attend
from offload_decode.common.errors import ConfigError
from offload_decode.engine.step import Promised, ScatteredPrefix, StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.store.base import StoreRange, ranges
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape
from tests.tiny import saved, text_model

SHAPE = ModelShape.uniform((LayerKind.FULL,) * 2, query_heads=4, kv_heads=2, head_dim=8)
CPU = torch.device("cpu")


def store_of(tokens: int) -> MemoryStore:
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((2, 2, tokens, 8), np.float32) for _ in range(2))
    return MemoryStore(SHAPE, keys, values)


def scattered(store: Any, parts: int, selector: str, options: dict[str, Any], **on: Any) -> ScatteredPrefix:
    """In parts that lie in this process."""
    prefixes = [
        StoredPrefix.over(HostKV(StoreRange(store, *part), CPU), SHAPE, selector, options)
        for part in ranges(store.manifest.n_tokens, parts, store.manifest.page_size)
    ]

    def ask(layer: int, query: Tensor, scaling: float, softcap: float | None) -> Promised:
        asked = layer, query, scaling, softcap
        return lambda: [(prefix.attend(*asked), prefix.take_stats()) for prefix in prefixes]

    return ScatteredPrefix(StoredPrefix.over(HostKV(store, CPU), SHAPE, selector, options), ask)


@pytest.mark.parametrize(("tokens", "parts", "page"), [(100, 3, 16), (96, 2, 16), (5, 4, 16), (1000, 7, 1)])
def test_ranges_are_whole_pages_that_cover_every_token_once(tokens: int, parts: int, page: int) -> None:
    found = ranges(tokens, parts, page)
    assert (found[0][0], found[-1][1]) == (0, tokens)
    assert all(end == start for (_, end), (start, _) in pairwise(found))
    assert all(start % page == 0 and start < end for start, end in found)
    assert len(found) == min(parts, -(-tokens // page))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_all_tokens_in_parts_are_exact_attention(parts: int, softcap: float | None) -> None:
    store, query = store_of(100), torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    state = scattered(store, parts, "dense", {}).attend(1, query, 0.3, softcap)
    keys, values = (
        torch.from_numpy(np.stack([kind(1, head) for head in range(2)]))[None].expand(2, -1, -1, -1)
        for kind in (store.keys, store.values)
    )
    exact = attend(query, keys, values, 0.3, softcap=softcap)
    torch.testing.assert_close(state.out, exact.out)
    torch.testing.assert_close(state.lse, exact.lse)


@pytest.mark.parametrize("selector", ["topk", pytest.param("quest", marks=pytest.mark.slow)])
def test_a_budget_holds_for_every_part_and_all_of_them_is_everything(selector: str) -> None:
    """Of 96 tokens in two parts, 32 each."""
    store, query = store_of(96), torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(0))
    prefix = scattered(store, 2, selector, {"budget": "32", "dense_layers": ""})
    prefix.attend(0, query, 0.3, None)
    cost = prefix.take_stats()
    assert (cost.rows, cost.selected) == (4, 4 * 2 * 32)
    everything = scattered(store, 2, selector, {"budget": "100%"}).attend(0, query, 0.3, None)
    exact = scattered(store, 1, "dense", {}).attend(0, query, 0.3, None)
    torch.testing.assert_close(everything.out, exact.out)


def test_the_best_of_the_whole_store_are_among_the_best_of_its_parts() -> None:
    """So no row attends to less than with the same budget in one process."""
    store, query = store_of(96), torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(1))
    apart = scattered(store, 3, "topk", {"budget": "16"}).attend(0, query, 1.0, None)
    whole = scattered(store, 1, "topk", {"budget": "16"}).attend(0, query, 1.0, None)
    assert (apart.lse >= whole.lse - 1e-5).all()


def test_a_selector_that_remembers_is_refused() -> None:
    with pytest.raises(ConfigError, match="remembers a conversation"):
        scattered(store_of(96), 2, "h2o", {})


def test_a_part_begins_with_a_page_of_the_store() -> None:
    store = store_of(96)
    for start, end in ((8, 96), (0, 97), (16, 16), (-16, 16)):
        with pytest.raises(ConfigError, match="are no part of"):
            StoreRange(store, start, end)


def test_parts_of_a_store_have_names_and_indexes_of_their_own() -> None:
    store = store_of(96)
    first, second = (StoreRange(store, *part) for part in ranges(96, 2, 16))
    assert len({own.path for own in (store, first, second)}) == 3
    assert len({own.digest(0, 0) for own in (store, first, second)}) == 3
    assert len({own.store_digest for own in (store, first, second)}) == 3
    lowest, highest = second.pages(0, 0)
    keys = second.keys(0, 0).reshape(3, 16, 8)
    assert (lowest <= keys.min(1)).all()
    assert (highest >= keys.max(1)).all()


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from offload_decode.prefill_jobs.job import Settings, prefill

    folder = tmp_path_factory.mktemp("scattered")
    kinds = ["sliding_attention", "full_attention"] * 2
    saved(text_model(family="gemma2", num_hidden_layers=4, layer_types=kinds), folder / "model")
    (folder / "corpus.txt").write_text("one two three four five six seven. " * 9)
    prefill(str(folder / "corpus.txt"), model=str(folder / "model"), out=folder / "a.kv", settings=Settings())
    return folder / "a.kv"


def test_an_answer_from_parts_is_that_of_the_whole_store(prefilled: Path, monkeypatch: Any) -> None:
    engine = Engine.open(prefilled, selector="dense")
    shape = engine.store.manifest.shape
    monkeypatch.setitem(globals(), "SHAPE", shape)
    apart = Engine(engine.loaded, engine.store, scattered(engine.store, 2, "dense", {}))
    for question in ("Why?", "What is three?"):
        torch.testing.assert_close(apart.fork().ask(question), engine.fork().ask(question))
        assert apart.answer(question, 8).tokens == engine.answer(question, 8).tokens
    with pytest.raises(ConfigError, match="leave citations out"):
        apart.answer("Why?", 2, cites=True)
