"""An engine over a store in memory goes on as over the store on disk that holds the same arrays."""

import numpy as np
import pytest
import torch

from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import wrap
from offload_decode.store import KVStore, MemoryStore
from tests.tiny import tiny_model, token_store

N = 60


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def stores(request, tmp_path_factory):
    """A model with its store on disk and in memory; of a sliding layer only the window's rows are known."""
    served = wrap(tiny_model(request.param))
    path = token_store(tmp_path_factory.mktemp("stores") / "s", served, range(3, 3 + N))
    disk, shape = KVStore.open(path), served.shape
    heads = range(shape.kv_heads)
    arrays = []
    for which, read in enumerate((disk.keys, disk.values)):
        rows = np.zeros((len(shape.layers), shape.kv_heads, N, shape.head_dim), np.float32)
        for layer in range(len(shape.layers)):
            if layer in shape.full_layers:
                rows[layer] = [read(layer, head) for head in heads]
            else:
                window = disk.window(layer)[which]
                rows[layer, :, -window.shape[1] :] = window
        arrays.append(rows)
    queries = [
        [disk.queries(layer, head) for head in heads] if layer in shape.full_layers else []
        for layer in range(len(shape.layers))
    ]
    return served, disk, MemoryStore(shape, *arrays, queries=queries)


@pytest.mark.parametrize("selector", ["topk", "quest", "quoka", "h2o"])
def test_answers_are_the_same_bits(stores, selector):
    served, disk, memory = stores
    logits = []
    for store in (disk, memory):
        prefix = StoredPrefix.over(HostKV(store, served.device), served.shape, selector, {"budget": "9"})
        engine = Engine(served, store, prefix)
        logits.append(torch.stack([engine.extend([5, 9, 7]), engine.extend([11])]))
    assert torch.equal(*logits)
