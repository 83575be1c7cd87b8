"""What the tiny configs have in common."""

from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from offload_decode.testing.tiny import COMMON, HEADS, TOKENS, VOCAB

__all__ = ["COMMON", "HEADS", "TOKENS", "VOCAB"]

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
ALTERNATING = {"sliding_window": 7, "layer_types": [SLIDING, FULL, SLIDING]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
} | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24} | {
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
INDEXED = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4096}
# Smaller weights: a recurrence multiplies its rounding.
CALM = {"initializer_range": 0.1}
DELTA = (
    CALM
    | {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "linear_conv_kernel_dim": 4}
    | {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
)
MAMBA2 = (
    CALM
    | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6}
    | {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16}
)


class Family(NamedTuple):
    """A model type of transformers with its config, text alone, and the multimodal wrapper that it is read
    from, where the checkpoints have one.
    """

    model_type: str
    config: dict[str, Any]
    wrapper: str | None = None


def usual(
    model_type: str, *parts: dict[str, Any], wrapper: str | None = None, without: Any = (), **more: Any
) -> Family:
    """A family whose config has the usual names, `without` some of them, and the fields of `parts`."""
    config = {name: value for name, value in COMMON.items() if name not in without}
    return Family(model_type, reduce(or_, parts, config) | more, wrapper)


def renamed(model_type: str, *parts: dict[str, Any], **more: Any) -> Family:
    """A family whose config has other names for the usual fields."""
    return Family(model_type, reduce(or_, parts, TOKENS) | more)


def rope(kind: str, original: int | None = None, **more: Any) -> dict[str, Any]:
    """Rotary frequencies of a kind, scaled from an original length where one is given."""
    if original is not None:
        more["original_max_position_embeddings"] = original
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}
