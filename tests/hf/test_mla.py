"""Attention over latents with absorbed queries is attention over the heads that a module expands them to; and
latents behind a stored prefix: what is kept, what is searched, and what answers equal.
"""

import importlib
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from offload_decode.attention.queries import attend
from offload_decode.common.errors import UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import with_cache
from offload_decode.hf.mla import Latent, LatentHeads, latent_of
from offload_decode.models.loading import wrap
from offload_decode.selectors import quest
from offload_decode.store.reader import KVStore
from offload_decode.types import PageSelection
from tests.families import VOCAB
from tests.models.few_bits import int4_rounds
from tests.tiny import eager, tiny_model, token_store

FAMILIES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
FAMILIES |= {"mistral4": "Mistral4", "kimi_linear": "KimiLinear", "longcat_flash": "LongcatFlash"}
FAMILIES |= {"minicpm3": "MiniCPM3", "youtu": "Youtu"}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12}
SIZES |= {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
N, LAYER = 45, 1
CLOSE = {"atol": 1e-4, "rtol": 0}
IDS = torch.randint(3, VOCAB, (1, N + 20), generator=torch.Generator().manual_seed(1))


def attention_of(family: str, **sizes: int) -> torch.nn.Module:
    """A tiny attention module of a family, with random weights; skipped where it caches heads."""
    try:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    except ModuleNotFoundError:
        pytest.skip(f"this transformers has no {family}")
    name = FAMILIES[family]
    config = getattr(configuration, f"{name}Config")(**{**SIZES, **sizes})
    made = getattr(modeling, f"{name}MLA" if family == "longcat_flash" else f"{name}Attention")
    torch.manual_seed(0)
    module = made(config, 0).eval()
    if not hasattr(module, "expand_kv"):
        pytest.skip(f"{family} caches expanded heads in this transformers")
    return module


def case(latent: Latent, heads: int = 4, tokens: int = 3, stored: int = 20):
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(2, heads, tokens, latent.plain + latent.rotary, generator=generator)
    rows = torch.randn(2, 1, stored, latent.dim, generator=generator)
    return query, rows


def check(module: torch.nn.Module, tolerance: float = 1e-5) -> None:
    latent = latent_of(module)
    assert latent is not None
    query, rows = case(latent)
    with torch.no_grad():
        keys, values = module.expand_kv(*rows.split([latent.rank, latent.rotary], dim=-1))
        expected = attend(query, keys, values, 0.3)
        heads = LatentHeads(module, latent, query)
        state = attend(heads.absorb(query), rows, rows, 0.3)
        found = heads.expand(state)
        torch.testing.assert_close(found.out, expected.out, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.lse, expected.lse, atol=tolerance, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_absorbed_queries_attend_as_the_heads_do(family):
    module = attention_of(family)
    assert latent_of(module) == Latent(rank=10, plain=6, rotary=4, value=7)
    check(module)


class Wrapped(torch.nn.Module):
    """A layer whose weight is not at hand, as one in few bits or with an adapter."""

    def __init__(self, inner: torch.nn.Linear):
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows) * 2


def test_a_projection_that_is_no_plain_layer_is_asked_for_its_weight():
    module = attention_of("deepseek_v3")
    inner, module.kv_b_proj = module.kv_b_proj, Wrapped(module.kv_b_proj)
    for _ in range(2):
        check(module)
        with torch.no_grad():
            inner.weight.mul_(-0.5)  # as an adapter that is exchanged


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_projection_in_few_bits_is_its_own_weight(weights):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from offload_decode.models.quantization import packed

    module = attention_of("deepseek_v3", kv_lora_rank=64)
    module.kv_b_proj = packed(module.kv_b_proj, weights).to("cpu")
    # int8 rounds the latents of the tokens that the module expands, and nothing where queries are absorbed.
    check(module, 0.02 if weights == "int8" else 1e-4)


def test_latents_that_are_expanded_in_another_way_are_refused():
    module = attention_of("deepseek_v3")
    module.kv_b_proj = torch.nn.Linear(10, 52, bias=True)
    with pytest.raises(UnsupportedModel, match="kv_b_proj"):
        latent_of(module)


def test_attention_that_caches_heads_has_no_latents():
    assert latent_of(torch.nn.Linear(2, 2)) is None


@pytest.fixture(scope="module")
def plain():
    model = tiny_model("deepseek_v3")
    if latent_of(model.model.layers[0].self_attn) is None:
        pytest.skip("this transformers caches expanded heads")
    return eager(model)


def engine_over(folder: Path, model=None, kv: str = "auto", **options: object) -> Engine:
    served = wrap(model or tiny_model("deepseek_v3"))
    folder.mkdir(exist_ok=True)
    store = token_store(folder / "store", served, IDS[0, :N], 16, kv=kv)
    return Engine.open(store, served, options={"budget": "100%", **options})


def logits_of(engine: Engine, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return engine.loaded.model(ids, **with_cache(engine.loaded.model, engine.new_cache())).logits


def plain_logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids, **with_cache(model, DynamicCache(config=model.config))).logits[:, N:]


def test_the_store_keeps_what_the_model_caches_once(tmp_path, plain):
    engine = engine_over(tmp_path)
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        plain(IDS[:, :N], **with_cache(plain, cache))
    shape = engine.store.manifest.shape
    assert (shape.kv_heads, shape.head_dim, shape.latent, shape.group) == (1, 32, True, 4)
    for layer, held in enumerate(cache.layers):
        rows = torch.cat([held.keys, held.values], dim=-1)[0, 0]
        torch.testing.assert_close(torch.tensor(engine.store.keys(layer, 0)), rows, **CLOSE)
        assert engine.store.values(layer, 0) is engine.store.keys(layer, 0)
    cost = engine.store.cost()
    assert "values" not in cost
    assert cost["keys"] == len(shape.layers) * N * 32 * 4


def test_sampled_queries_are_absorbed(tmp_path, plain):
    """Their inner products with the latents make the attention of the heads that they were taken from."""
    store = engine_over(tmp_path).store
    with torch.inference_mode():
        weights = plain(IDS[:, :N], output_attentions=True).attentions[LAYER][0]
    scaling = plain.model.layers[LAYER].self_attn.scaling
    rows, queries = (torch.tensor(part) for part in (store.keys(LAYER, 0), store.queries(LAYER, 0)))
    for sample, position in enumerate(store.query_positions.tolist()):
        seen = slice(None, position + 1)
        attention = torch.softmax(scaling * rows[seen] @ queries[sample], dim=0)
        torch.testing.assert_close(attention, weights[sample % 4, position, seen], **CLOSE)


@pytest.mark.parametrize("selector", ["oracle", "topk", "quest+topk", "loki", "sparq"])
def test_selectors_that_leave_little_out_answer_nearly_alike(tmp_path, plain, selector):
    options = {"budget": str(N - 2), "dense_layers": ""}
    served = engine_over(tmp_path).loaded
    engine = Engine.open(tmp_path / "store", served, selector=selector, options=options)
    off = (logits_of(engine, IDS[:, N:]) - plain_logits(plain)).abs().max()
    assert 1e-5 < off < 0.5


@pytest.mark.parametrize("tail", ["clusters", "sample:512"])
def test_the_unselected_latents_are_estimated(tmp_path, plain, tail):
    engine = engine_over(tmp_path, budget="9", tail=tail)
    off = (logits_of(engine, IDS[:, N:]) - plain_logits(plain)).abs()
    without = logits_of(engine_over(tmp_path / "off", budget="9", tail="off"), IDS[:, N:]) - plain_logits(
        plain
    )
    assert off.max() < 1.0 or tail == "clusters"
    assert off.square().mean() < without.square().mean()


def test_a_long_conversation_is_attended_to_by_pages(tmp_path, plain, monkeypatch):
    chosen = []

    def every_page(self, layer, queries, generated):
        chosen.append(queries.vectors.shape)
        pages = torch.arange(-(-generated.length // 4)).expand(1, 1, -1)
        return PageSelection(pages, 4, torch.tensor([generated.length + 4]), shared=True)

    monkeypatch.setattr(quest, "WHOLE_GENERATED", 0)
    monkeypatch.setattr(quest.Quest, "select_generated", every_page)
    served = engine_over(tmp_path).loaded
    engine = Engine.open(tmp_path / "store", served, selector="quest", options={"budget": "100%"})
    cache = engine.new_cache()
    with torch.inference_mode():
        served.model(IDS[:, N:-1], **with_cache(served.model, cache))
        last = served.model(IDS[:, -1:], **with_cache(served.model, cache)).logits
    assert chosen[-1] == (1, 4, 32), "an absorbed query of each head"
    torch.testing.assert_close(last, plain_logits(plain)[:, -1:], **CLOSE)


def test_latents_in_bytes_say_what_that_costs(tmp_path, plain):
    engine = engine_over(tmp_path, kv="int8")
    errors = engine.store.manifest.kv_error
    assert list(errors) == ["keys"]
    assert all(0 < entry["relative_rms"] < 0.01 for entry in errors["keys"])
    assert (logits_of(engine, IDS[:, N:]) - plain_logits(plain)).abs().max() < 0.2


def test_an_interrupted_pass_leaves_nothing_to_the_next(tmp_path, plain, monkeypatch):
    engine = engine_over(tmp_path)
    model, attention = engine.loaded.model, engine.loaded.model.model.layers[0].self_attn

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(attention, "expand_kv", interrupt)  # between the cache and the attention
        with pytest.raises(KeyboardInterrupt):
            logits_of(engine, IDS[:, N:])
    with torch.inference_mode():
        alone = model(IDS[:, N:], **with_cache(model, DynamicCache(config=model.config))).logits
        torch.testing.assert_close(alone, plain(IDS[:, N:]).logits, **CLOSE)
    torch.testing.assert_close(logits_of(engine, IDS[:, N:]), plain_logits(plain), **CLOSE)


@pytest.mark.parametrize("method", ["quoka", "sample", "window"])
def test_chunks_choose_among_latents(tmp_path, plain, method):
    """A budget of everything is a dense prefill; a smaller one leaves something out."""
    rows = {}
    for budget in ("100%", "25%"):
        served, how = wrap(tiny_model("deepseek_v3")), {"method": method, "budget": budget}
        path = token_store(tmp_path / budget.strip("%"), served, IDS[0, :N], 16, **how)
        rows[budget] = torch.tensor(KVStore.open(path).keys(2, 0))
    dense = torch.tensor(engine_over(tmp_path).store.keys(2, 0))
    torch.testing.assert_close(rows["100%"], dense, **CLOSE)
    assert (rows["25%"] - dense).abs().max() > 1e-3


def test_a_model_in_few_bits_attends_as_it_does_itself(tmp_path, plain):
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from offload_decode.models.quantization import quantize_on_gpu

    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    # Without experts: where inputs are rounded, a token on the edge between two goes to either.
    given = {"hidden_size": 64, "kv_lora_rank": 64, "q_lora_rank": None, "first_k_dense_replace": 99, **heads}
    few = quantize_on_gpu(tiny_model("deepseek_v3", **given), "int4", torch.device("cpu"))
    assert sum(type(layer).__name__ == "Linear4bit" for layer in few.modules()) > 4
    expected = plain_logits(few)
    engine = engine_over(tmp_path, few)
    found = logits_of(engine, IDS[:, N:])
    if int4_rounds():  # 2 % of the logits here
        assert (found - expected).norm() < 0.05 * expected.norm()
    else:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
