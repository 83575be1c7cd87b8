"""A tiny config of every family: each kind of layer it has, windows and chunks shorter than the prefix of the
exactness suite, and its switches on.
"""

from collections.abc import Collection, Iterable
from copy import deepcopy
from typing import Any

import pytest

from offload_decode.hf.compat import generate_name
from tests.families import dense, experts, recurrent
from tests.families.common import VOCAB, Family

__all__ = ["FAMILIES", "KINDS", "LISTED", "PLAIN", "SERVED", "VOCAB", "config_of", "model_class", "slow_but"]

LISTED: dict[str, Family] = {
    name: family for module in (dense, experts, recurrent) for name, family in module.FAMILIES.items()
}


def config_of(name: str, **changes: Any) -> Any:
    """The text config of a family with `changes`, taken from its multimodal wrapper's where it has one."""
    from transformers import CONFIG_MAPPING

    model_type, arguments, wrapper = LISTED[name]
    config = CONFIG_MAPPING[model_type](**deepcopy({**arguments, **changes}))
    if wrapper is None:
        return config
    return CONFIG_MAPPING[wrapper](text_config=config.to_dict()).get_text_config()


def model_class(config: Any) -> Any:
    """The causal language model of a text config."""
    import transformers

    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in known:
        return known[type(config)]
    base = type(config).__name__.removesuffix("Config").removesuffix("Text")
    return getattr(transformers, f"{base}ForCausalLM")


def _installed() -> dict[str, Family]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {
        name: family
        for name, family in LISTED.items()
        if {family.model_type, family.wrapper or family.model_type} <= set(CONFIG_MAPPING_NAMES)
    }


FAMILIES = _installed()
"""The families that the installed transformers has."""

# Served by no release, each for its own reason: attention in code of their own (falcon to mpt), keys or
# values made anew of what the cache returned (diffllama, jetmoe), scores of more than queries and keys (doge,
# inkling), caches or states of their own (deepseek_v4, qwen4_exp, recurrent_gemma), or no keys (mamba).
REFUSED = {
    *("falcon", "falcon-alibi", "gpt_neo", "gpt_neox_japanese", "xglm", "bloom", "mpt"),
    *("opt", "diffllama", "jetmoe", "doge", "inkling", "inkling2"),
    *("deepseek_v4", "recurrent_gemma", "mamba", "mamba2"),
    "qwen4_exp",
}
# transformers 5.5 has Nemotron with attention in code of its own, OLMo Hybrid with a cache of its own, scans
# of blocks whose first tokens depend on how many follow (Nemotron-H, Zamba2), and an indexer that keeps its
# keys outside the cache.
_REFUSED_IN_5_5 = {"nemotron", "olmo_hybrid", "nemotron_h", "zamba2", "glm_moe_dsa"}
# They attend in code of their own before 5.24.
_REFUSED_IN_5_23 = {"gptj", "codegen"}


def _served() -> list[str]:
    from transformers.cache_utils import Cache

    refused = set(REFUSED)
    if not hasattr(Cache, "get_recurrent_state"):
        refused |= _REFUSED_IN_5_5
    if generate_name() != "cache":
        refused |= _REFUSED_IN_5_23
    return [name for name in FAMILIES if name not in refused]


def slow_but(few: Collection[str], names: Iterable[str]) -> list[Any]:
    """Parameters of a test that is slow for all names but a few."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.slow) for name in names]


SERVED = _served()
"""The families that the installed transformers runs exactly behind a store."""

PLAIN = [
    *("llama", "llama-mha", "llama-yarn", "mistral", "mistral-sliding", "qwen2", "qwen3", "smollm3"),
    *("gemma2", "gemma3", "phi3", "gpt-oss", "mixtral", "qwen3-moe", "olmo2", "granite", "cohere2", "glm4"),
]
"""Families of full and sliding attention alone: for tests that are about something else."""

KINDS = [
    *("llama", "gemma2", "mistral-sliding", "gpt-oss", "phi3-longrope", "gemma4", "llama4", "mimo_v2_flash"),
    *("deepseek_v3", "qwen3_next", "kimi_linear", "granitemoehybrid", "falcon_h1", "jamba", "lfm2", "gpt2"),
    *("minimax", "zaya"),
]
"""A family of each kind of layer."""
