"""A token of a model in blocks takes compiled calls alone, with the numbers that torch gives."""

from typing import Any

import numpy as np
import pytest
import torch

from offload_decode.engine.citations import Watch
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import with_cache
from offload_decode.models import few_rows
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.indexing import build_indexes
from tests.tiny import random_ids, saved, text_model, token_store

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
WAYS = [("dense", {}), ("topk", {"budget": "24"}), ("topk", {"budget": "24", "tail": "off"}), ("quest", {})]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2"])
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose layers are compiled, and an indexed store of it."""
    folder = tmp_path_factory.mktemp(request.param)
    saved(text_model(family=request.param, **SIZES), folder / "model")
    loaded = load(str(folder / "model"), "cpu", "float32", "int8")
    store = token_store(folder / "s.kv", loaded, random_ids(300, 5))
    build_indexes(store, "clusters")
    return loaded, store


@pytest.mark.parametrize(("selector", "options"), WAYS)
def test_it_is_the_long_way(
    opened: Any, selector: str, options: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, store = opened
    engine = Engine.open(store, loaded, selector=selector, options=options)
    short, taken = few_rows.attend_token, []

    def counted(*given: Any) -> Any:
        out = short(*given)
        taken.append(out is not None)
        return out

    found = []
    for way in (counted, lambda *_: None):
        monkeypatch.setattr(few_rows, "attend_token", way)
        other = engine.fork()
        other.extend([3, 4, 5])
        other.prefix.take_stats()
        watch = Watch(other.prefix.host, least=0.0)
        other.prefix.watches = (watch,)
        with torch.inference_mode():
            logits = torch.cat([other.extend([token]) for token in (6, 7, 8)])
        found.append((logits, watch.mass, other.prefix.take_stats()))
    once, long = found
    full = len(loaded.shape.full_layers)
    assert sum(taken) == 3 * full, "layers of a window take the long way"
    torch.testing.assert_close(once[0], long[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(once[1], long[1], rtol=1e-4, atol=1e-5)
    assert once[1].any()
    for name in ("selected", "rows", "bytes_moved", "by_layer", "attended"):
        assert getattr(once[2], name) == getattr(long[2], name), name
    assert once[2].rows == 3 * full * loaded.shape.query_heads


def test_what_is_padded_takes_the_long_way(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, store = opened
    engine = Engine.open(store, loaded, selector="dense")
    taken, short = [], few_rows.attend_token
    monkeypatch.setattr(few_rows, "attend_token", lambda *given: taken.append(short(*given)))
    cache = engine.new_cache()
    stored = engine.prefix.length
    mask = torch.ones(1, stored + 3, dtype=torch.int64)
    mask[0, stored] = 0
    with torch.inference_mode():
        for tokens, places, end in (([3, 4], [stored, stored], -1), ([5], [stored + 1], None)):
            loaded.model(
                torch.tensor([tokens]),
                attention_mask=mask[:, :end],
                position_ids=torch.tensor([places]),
                **with_cache(loaded.model, cache),
            )
    assert len(taken) == len(loaded.shape.layers)
    assert all(out is None for out in taken)
