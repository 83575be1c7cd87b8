"""What estimates of unselected tokens hold in memory is planned: beside tails over a store that is there."""

import mmap

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.engine.step import StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import wrap
from offload_decode.models.size_estimate import estimate_of
from offload_decode.planning.plan import Machine, Medium, plan
from offload_decode.planning.workload import Workload, unselected_bytes
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_tokens
from offload_decode.selectors import unselected
from offload_decode.store.reader import KVStore
from offload_decode.types import Document, LayerKind, ModelShape
from tests.tiny import tiny_model

N = 3000
FEW = 2048  # bytes of what does not grow with the keys
CPU = torch.device("cpu")
MACHINE = Machine(None, 1 << 40, 1 << 50, 0)


@pytest.fixture(scope="module")
def model():
    return wrap(tiny_model("llama", head_dim=64))


@pytest.fixture(scope="module")
def stores(model, tmp_path_factory):
    """The same tokens twice: with clusters, and without any index."""
    made, tokens = {}, np.random.default_rng(0).integers(3, 131, N).astype(np.int32)
    for built in (False, True):
        path = tmp_path_factory.mktemp("stores") / "s.kv"
        prefill_tokens(model, tokens, [Document("all", 0, N)], path)
        if built:
            build_indexes(path, "clusters")
        made[built] = path
    return made


def held(parts, seen):
    """Bytes of all arrays and tensors that `parts` lead to, each once, but for what is mapped from files."""
    total = 0
    for part in parts:
        if id(part) in seen:
            continue
        seen[id(part)] = part  # which keeps another object from getting its id
        if isinstance(part, np.ndarray):
            if isinstance(part.base, np.ndarray):
                total += held([part.base], seen)
            elif not _mapped(part):
                total += part.nbytes
        elif isinstance(part, torch.Tensor):
            total += part.untyped_storage().nbytes()
        elif isinstance(part, dict):
            total += held(part.values(), seen)
        elif isinstance(part, list | tuple):
            total += held(part, seen)
        elif hasattr(part, "__dict__"):
            total += held(vars(part).values(), seen)
    return total


def _mapped(array):
    base = array.base
    return isinstance(base.obj if isinstance(base, memoryview) else base, mmap.mmap)


def tail_at_work(model, path, selector, **options):
    """What a tail holds once it has answered a query in every layer, beside the store and its own indexes."""
    host, shape = HostKV(KVStore.open(path), CPU), model.shape
    prefix = StoredPrefix.over(host, shape, selector, {"budget": "64", "dense_layers": "", **options})
    for layer in shape.full_layers:
        query = torch.randn(1, shape.query_heads, 1, shape.head_dim)
        prefix.attend(layer, query, 0.1, None)
    tail = prefix.tail
    return 0 if tail is None else held([tail], {id(other): other for other in (host, tail.indexes)})


def planned(layers, model, selector, **options):
    """Of a model with so many searched layers that is otherwise as this one."""
    shape = ModelShape.uniform(
        (LayerKind.FULL,) * layers, model.shape.query_heads, model.shape.kv_heads, model.shape.head_dim
    )
    request = Workload(N, selector=selector, budget="64", dense_layers="", **options)
    return unselected_bytes(estimate_of(model.model, "tiny", shape), request)


@pytest.mark.parametrize("tail", ["off", "auto", "clusters", "sample", "sample:32"])
@pytest.mark.parametrize(
    ("selector", "index", "built"),
    [
        ("topk", "clusters", True),
        ("topk", "flat", True),
        ("topk", "flat", False),
        ("quest", "flat", True),
        ("quest", "flat", False),
    ],
)
def test_what_a_tail_holds_is_planned(model, stores, selector, index, built, tail):
    given = {"index": index} if selector == "topk" else {}
    measured = tail_at_work(model, stores[built], selector, tail=tail, **given)
    layers = len(model.shape.full_layers)
    kept = [
        planned(count, model, selector, tail=tail, index=index, clusters=built)
        for count in (layers, 2 * layers)
    ]
    assert kept[1] - kept[0] == pytest.approx(measured, rel=0.03, abs=FEW)
    assert (measured > FEW) == (tail.startswith("sample") or (tail == "clusters" and not built))


def test_a_sample_takes_more_while_it_is_made(model):
    """Beside what it keeps: keys and values of every draw, of all queries that are estimated together."""
    few, many = (planned(2, model, "topk", tail=f"sample:{draws}") for draws in (32, 64))
    rows = unselected.rows_at_once(N // 8, 64 * model.shape.head_dim, 64)
    assert 1 < rows < Workload(N, budget="64").searched(model.shape)
    assert many - few >= 32 * rows * 2 * model.shape.head_dim * 4


def test_the_plan_lists_it(model):
    estimate = estimate_of(model.model, "tiny", model.shape)
    request = Workload(N, budget="64", tail="sample")
    parts = {part.name: part for part in plan(estimate, request, MACHINE).asking}
    assert parts["unselected tokens"].place is Medium.RAM
    assert parts["unselected tokens"].bytes == unselected_bytes(estimate, request)
    assert "unselected tokens" not in {part.name for part in plan(estimate, Workload(N), MACHINE).asking}


def test_nothing_is_unselected_where_every_layer_is_dense(model):
    estimate = estimate_of(model.model, "tiny", model.shape)
    assert unselected_bytes(estimate, Workload(N, selector="dense", tail="sample")) == 0
    assert unselected_bytes(estimate, Workload(N, budget="100%", tail="sample")) == 0


def test_an_unknown_tail_is_no_plan():
    with pytest.raises(ConfigError, match=r"tail 'some' is unknown: choose off, auto, clusters or sample"):
        Workload(N, tail="some")
