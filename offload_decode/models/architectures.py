"""Which architectures are served exactly, and their shape. Anything else is refused by name."""

from __future__ import annotations

from typing import Any

import torch

from offload_decode.errors import UnsupportedModel
from offload_decode.models import observed
from offload_decode.models.positions import rope_parameters, rotations
from offload_decode.types import ModelShape

# Each is in the exactness suite (tests/models/test_exactness.py): equal to transformers' own generate.
EXACT = frozenset(
    {
        "afmoe",
        "apertus",
        "arcee",
        "aria_text",
        "axk1",
        "axk2",
        "bailing_hybrid",
        "bamba",
        "beam",
        "biogpt",
        "bitnet",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cwm",
        "dbrx",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots1",
        "dots3_note_text",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "falcon_h1",
        "flex_olmo",
        "flint",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "granite",
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "helium",
        "hrm_text",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "hy_v3",
        "hy_v4",
        "hyperclovax",
        "internlm3",
        "iquestcoder",
        "jais2",
        "jamba",
        "kimi_linear",
        "kolibri1",
        "laguna",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "llama",
        "llama4_text",
        "longcat_flash",
        "mellum",
        "mimo_v2_flash",
        "minicpm3",
        "minimax",
        "minimax_m2",
        "minimax_m3_vl_text",
        "ministral",
        "ministral3",
        "mistral",
        "mistral4",
        "mixtral",
        "modernbert-decoder",
        "nanochat",
        "nemotron",
        "nemotron_h",
        "olmo",
        "olmo2",
        "olmo3",
        "olmo_hybrid",
        "olmoe",
        "persimmon",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "vaultgemma",
        "youtu",
        "zamba",
        "zamba2",
        "zaya",
    }
)


def check_served(name: str) -> None:
    """`UnsupportedModel` for an architecture that is none of `EXACT`."""
    if name not in EXACT:
        raise UnsupportedModel(
            f"the architecture '{name}' is not served, because it has not been shown to equal plain "
            f"generation; served are: {', '.join(sorted(EXACT))}"
        )


def shape_of(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a text model in `dtype` (None: the checkpoint's) from its transformers config; raises
    `UnsupportedModel` with the reason.
    """
    name = config.model_type
    check_served(name)
    for rope in rotations(rope_parameters(config)):
        for field in ("rope_theta", "factor"):
            if not rope.get(field, 1.0) > 0:
                raise UnsupportedModel(
                    f"this '{name}' model has a {field} of {rope[field]}, and only positive ones make "
                    "positions: mend its config.json"
                )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # "vision": images alone
        raise UnsupportedModel(f"this '{name}' model attends to later tokens too; use a causal model")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 2:
        raise UnsupportedModel(
            f"this '{name}' model has a sliding window of {window}, in which no token sees an earlier one: "
            "mend its config.json, or use another model"
        )
    return observed.shape_of(config, dtype)
