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
        "cohere2",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
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
    if getattr(config, "attention_chunk_size", None) is not None:
        raise UnsupportedModel(
            f"this '{name}' model attends in chunks, which is not served; use a full-attention model"
        )
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"this '{name}' model attends to later tokens too; use a causal model")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 2:
        raise UnsupportedModel(
            f"this '{name}' model has a sliding window of {window}, in which no token sees an earlier one: "
            "mend its config.json, or use another model"
        )
    return observed.shape_of(config, dtype)
