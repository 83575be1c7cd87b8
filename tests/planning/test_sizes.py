"""Sizes are those of docs/methods.md §7, and of stores, indexes and weights that are really there."""

from dataclasses import replace

import numpy as np
import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.common.rows.encodings import INT8, row_dtype
from offload_decode.indexes import registry
from offload_decode.models.block_layers import BlockLinear, quantize
from offload_decode.models.quantization import quantize_on_gpu
from offload_decode.models.size_estimate import estimate_of, estimate_size
from offload_decode.planning import sizes
from offload_decode.planning.plan import Machine, Medium, plan, traffic
from offload_decode.planning.workload import KV, Workload, search_bytes, staged_bytes
from offload_decode.selectors.base import SelectorOptions
from offload_decode.store.format import stored_types
from offload_decode.types import IndexShape, LayerKind, LayerShape, ModelShape, StateShape
from tests.planning.estimates import llama_8b
from tests.tiny import text_model, tiny_model

MILLION = 1 << 20


def test_the_sizes_of_an_8b_model_with_a_million_tokens():
    model = llama_8b()
    assert model.parameters == 8_030_261_248
    per_token = {kv: sizes.kv_token_bytes(model.shape, kv, "float16") for kv in KV}
    assert per_token["auto"] == 128 * 1024
    assert MILLION * per_token["auto"] == pytest.approx(137e9, rel=0.01)
    # A scale for every row makes the encoded ones 3 and 6 % larger than the round numbers of the codes alone.
    assert MILLION * per_token["int8"] == pytest.approx(69e9, rel=0.04)
    assert MILLION * per_token["int4-values"] == pytest.approx((69e9 + 34e9) / 2, rel=0.05)
    assert sizes.weights_bytes(model, "auto") == pytest.approx(16.1e9, rel=0.01)
    # docs/methods.md counts embeddings and output layer in few bits too; the library leaves them as they are.
    assert sizes.weights_bytes(model, "int8", on_gpu=True) == pytest.approx(8.5e9, rel=0.08)
    assert sizes.weights_bytes(model, "int4", on_gpu=True) == pytest.approx(5.5e9, rel=0.08)


def test_page_bounds_and_bus_traffic_of_an_8b_model_with_a_million_tokens():
    model = llama_8b()
    bounds = {
        (page, kind): sizes.page_bytes(model.shape, MILLION, page, kind, 32)
        for page in (16, 32)
        for kind in ("fp16", "int8")
    }
    assert bounds[16, "fp16"] == pytest.approx(8.6e9, rel=0.01)
    assert bounds[32, "fp16"] == pytest.approx(4.3e9, rel=0.01)
    assert bounds[16, "int8"] == pytest.approx(4.3e9, rel=0.02)
    one_percent = Workload(MILLION, selector="quest", budget="1%", dense_layers="")
    assert traffic(model, one_percent, on_gpu=True).bus == pytest.approx(1.4e9, rel=0.03)


def test_the_latents_of_deepseek_v3():
    """576 numbers a token and layer (arXiv 2412.19437), which are keys and values in one."""
    layer = LayerShape(LayerKind.FULL, 1, 576, 576, latent=True)
    shape, heads = ModelShape((layer,) * 61, 128), ModelShape.uniform((LayerKind.FULL,) * 61, 128, 128, 192)
    assert sizes.kv_token_bytes(shape, "auto", "bfloat16") == 61 * 576 * 2
    assert sizes.kv_token_bytes(shape, "int8", "bfloat16") == 61 * 580
    assert sizes.store_bytes(shape, 10**6, "auto", "bfloat16") == pytest.approx(61 * 576 * 2e6, rel=0.14)
    model = replace(llama_8b(), shape=shape)
    request = Workload(10**6, selector="quest", budget="1024", dense_layers="")
    assert traffic(model, request, on_gpu=True).bus == 61 * 1024 * 576 * 2
    assert (
        sizes.generated_bytes(shape, 1000, "bfloat16") < sizes.generated_bytes(heads, 1000, "bfloat16") / 80
    )


def test_the_index_keys_of_deepseek_v3_2_are_planned_on_the_device():
    """128 numbers a token and layer, of which 2,048 tokens are chosen (arXiv 2512.02556)."""
    layer = LayerShape(LayerKind.FULL, 1, 704, 704, latent=True, index=IndexShape(128, 2048))
    model = replace(llama_8b(), shape=ModelShape((layer,) * 61, 128), dtype="bfloat16")
    machine = Machine(1 << 40, 1 << 40, 1 << 40, 0)
    asked = plan(model, Workload(10**6, selector="auto"), machine)
    [part] = [part for part in asked.asking if part.name == "the model's index keys"]
    assert (part.place, part.bytes) == (Medium.GPU, 61 * 128 * 2 * 10**6)
    assert not [part for part in asked.asking if part.name.startswith("indexes")]
    assert asked.traffic.gathered == 61 * 2048 * 704 * 2
    with pytest.raises(ConfigError, match="needs a model with an indexer"):
        plan(llama_8b(), Workload(10**6, selector="own"), machine)
    assert plan(llama_8b(), Workload(10**6, selector="auto"), machine).request.selector == "topk"


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("family", ["llama", "cohere2"])
def test_a_stores_size_is_that_of_a_real_one(kv, family, tmp_path):
    from offload_decode.models.loading import wrap
    from offload_decode.prefill_jobs.job import Settings, prefill_tokens
    from offload_decode.store.reader import KVStore
    from offload_decode.types import Document

    n = 3000
    loaded = wrap(tiny_model(family, head_dim=64))
    tokens = np.random.default_rng(0).integers(3, 131, n).astype(np.int32)
    prefill_tokens(loaded, tokens, [Document("all", 0, n)], tmp_path / "s.kv", Settings(kv=kv))
    store = KVStore.open(tmp_path / "s.kv")
    cost = store.cost()
    predicted = sizes.store_bytes(loaded.shape, n, kv, loaded.dtype)
    metadata = cost.pop("metadata and checksums")
    assert predicted == pytest.approx(sum(cost.values()) + metadata, rel=0.01)
    assert cost["keys"] + cost["values"] == n * sizes.kv_token_bytes(loaded.shape, kv, loaded.dtype)
    assert store.manifest.kv == stored_types(kv, loaded.dtype, loaded.shape)


@pytest.mark.parametrize("kind", registry.BUILT_IN)
@pytest.mark.parametrize(
    ("kv", "dtype", "keys"),
    [("auto", "float32", np.dtype(np.float32)), ("int8", "float16", row_dtype(INT8, 32))],
)
def test_an_indexs_size_is_what_its_kind_states_for_every_head(kind, kv, dtype, keys):
    """`IndexContract` compares that with one that was built."""
    shape = ModelShape.uniform((LayerKind.FULL,), 6, 3, 32)
    own = registry.stated(kind).costs(4000, 32, keys, 64, 2)
    costs = sizes.index_costs(kind, shape, 4000, kv, dtype, 64, 2)
    assert (costs.memory, costs.file, costs.read) == (3 * own.memory, 3 * own.file, 3 * own.read)


def test_buffers_on_the_way_to_a_gpu_are_as_large_as_those_that_were_held():
    import torch

    from offload_decode.attention.rows import Rows
    from offload_decode.kv.device_cache import DeviceRows, HotRows
    from offload_decode.types import StepStats

    # 512 tokens with 4 query heads a KV head: 64 rows want all of the 6,000 tokens, in each of two layers.
    n, model = 6000, replace(llama_8b(), shape=ModelShape.uniform((LayerKind.FULL,) * 2, 8, 2, 64))
    stored = [Rows(np.zeros((n, 64), np.float16)) for _ in range(2)]
    copied = DeviceRows(torch.device("cpu"))
    for part in range(2):
        copied.fetch(part, stored, [np.arange(n)] * 2, StepStats())
    held = sum(len(buffer._memory) for buffer in copied._staging)
    request = Workload(n, index="flat")
    assert staged_bytes(model, request) == held
    hot = HotRows(1000)
    kept = sum(part.nbytes for part in (hot._owner, hot._table, hot._older, hot._newer))
    cached = replace(request, device_cache=1000 * stored[0].row_bytes)
    assert staged_bytes(model, cached) - held == pytest.approx(kept, rel=0.01)


def test_page_bounds_are_as_large_as_quests():
    import torch

    from offload_decode.kv.page_bounds import GrowingBounds

    keys = torch.randn(2, 1000, 16)
    shape = ModelShape.uniform((LayerKind.FULL,), 2, 2, 16)
    for kind in ("fp16", "int8"):
        bounds = GrowingBounds(10, kind)
        bounds.append(keys)
        held = bounds.bounds
        tensors = [held.lower, held.upper, *([] if held.scale is None else [held.scale])]
        predicted = sizes.page_bytes(shape, 1000, 10, kind, 1)
        assert predicted == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "cohere2"])
def test_parameters_are_counted_without_weights(family):
    model = tiny_model(family, hidden_size=64, intermediate_size=128, head_dim=32)
    found = estimate_of(model, family, ModelShape.uniform((LayerKind.FULL,), 4, 2, 32))
    assert found.parameters == sum(weight.numel() for weight in model.parameters())
    assert sizes.weights_bytes(found, "auto") == sum(weight.nbytes for weight in model.parameters())
    read = sizes.active_weights_bytes(found, "auto")
    table = model.get_input_embeddings().weight
    idle = table.nbytes if model.get_output_embeddings().weight is not table else 0
    idle += sum(
        weight.nbytes // 2 for weight in model.parameters() if weight.ndim == 3
    )  # two experts of four
    assert read == sizes.weights_bytes(found, "auto") - idle


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_are_as_large_as_the_librarys(weights):
    pytest.importorskip("bitsandbytes")
    from offload_decode.models.loading import load

    held, model = 0, load("demo", "cpu").model
    for weight in quantize_on_gpu(model, weights, model.device).parameters():
        held += weight.nbytes
        if (state := getattr(weight, "quant_state", None)) is not None:
            held += state.absmax.nbytes + (state.state2.absmax.nbytes if state.nested else 0)
        if getattr(weight, "SCB", None) is not None:
            held += weight.SCB.nbytes
    assert sizes.weights_bytes(estimate_size("demo"), weights, on_gpu=True) == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_blocks_are_counted(tmp_path, weights, tied):
    sizes_of = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": tied}
    model = text_model(**sizes_of)
    model.config.save_pretrained(tmp_path)
    found, table = estimate_size(str(tmp_path)), model.get_input_embeddings().weight.nbytes
    model = quantize(model, weights)
    blocks = [layer.blocks.nbytes for layer in model.modules() if isinstance(layer, BlockLinear)]
    held = sum(blocks) + sum(weight.nbytes for weight in model.parameters())
    assert sizes.weights_bytes(found, weights) == held < sizes.weights_bytes(found, "auto")
    assert sizes.active_weights_bytes(found, weights) == held - (0 if tied else table)


def test_an_outline_reads_only_the_config(tmp_path):
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    found = estimate_size(str(tmp_path))
    assert found.shape.head_dim == 16
    assert found.parameters > 0


def test_recurrent_states_are_counted_by_sequence():
    states = (StateShape("conv0", (6, 4), "float16"), StateShape("recurrent0", (2, 3, 5), "float32"))
    layers = (LayerShape(LayerKind.NONE, states=states), LayerShape(LayerKind.FULL, 1, 8, 8))
    shape = ModelShape((layers[0], layers[1], layers[0]), 1)
    assert sizes.states_bytes(shape, 1) == 4 * 2 * (6 * 4 * 2 + 2 * 3 * 5 * 4)
    assert sizes.states_bytes(shape, 8) == 25 * 2 * (6 * 4 * 2 + 2 * 3 * 5 * 4)
    assert sizes.states_bytes(llama_8b().shape, 8) == 0


def test_the_default_budget_is_that_of_the_selectors():
    assert Workload(1).budget == SelectorOptions().budget


def test_what_an_error_bound_draws_is_copied():
    """Of 12,000 tokens 1,024 rows of each head, and 4,096 where these do not suffice."""
    model, request = llama_8b(), Workload(12_000, budget="4096")
    bounded = replace(request, error="0.05@0.95")
    more = search_bytes(model, bounded, 2) - search_bytes(model, request, 2)
    assert more == (1024 + 4096) * 32 * 8 * 2 * 2 * 128
