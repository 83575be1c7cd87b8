"""Attention over latents with absorbed queries is attention over the heads that a module expands them to."""

from __future__ import annotations

import importlib

import pytest
import torch

from offload_decode.attention.queries import attend
from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.mla import Latent, LatentHeads, latent_of

FAMILIES = {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite"}
FAMILIES |= {"mistral4": "Mistral4", "kimi_linear": "KimiLinear", "longcat_flash": "LongcatFlash"}
FAMILIES |= {"minicpm3": "MiniCPM3", "youtu": "Youtu"}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 12}
SIZES |= {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}


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
