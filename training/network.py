"""The demo model's shape, and a fast attention for training it on windows without padding.

Sliding-window rotary layers alternate with full-attention layers that know no positions (Cohere 2, arXiv
2504.00698, section 2.1): what such a model learned in a window of a few thousand tokens holds for 131,072.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cohere2Config,
    PreTrainedModel,
)

WINDOW = 128  # tokens a sliding layer sees: longer than a question with its answer, or a document's header
TRAINING_ATTENTION = "demo_model_training"


def config(vocabulary: int, bos: int, eos: int, pad: int) -> Cohere2Config:
    """About 3.4 million parameters."""
    return Cohere2Config(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=4_194_304,
        initializer_range=0.06,
        logit_scale=1.0,
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
    )


def create(settings: Cohere2Config) -> PreTrainedModel:
    """A model with random weights that trains with `training_attention`."""
    AttentionInterface.register(TRAINING_ATTENTION, training_attention)
    AttentionMaskInterface.register(TRAINING_ATTENTION, no_mask)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        settings, attn_implementation=TRAINING_ATTENTION
    )
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_(0.1)  # else their noise drowns the embeddings, and copying forms late
            if layer.self_attn.sliding_window is not None:
                look_back(layer.self_attn)
    return model


def look_back(attention: Any, strength: float = 5.0, pairs: int = 12) -> None:
    """Let head h of a sliding layer start out looking h + 1 tokens back, by the biases of queries and keys.

    Rotation by position turns a query bias `R(-d) b` and a key bias `b` into a score that is largest at
    distance d. Only the fast `pairs` of dimensions tell neighbours apart. Copying then forms in minutes.
    """
    dim = attention.head_dim
    turns = 10_000.0 ** (-torch.arange(0, dim, 2) / dim)[:pairs]
    queries = attention.q_proj.bias.view(-1, dim)
    keys = attention.k_proj.bias.view(-1, dim)
    keys[:, 0 : 2 * pairs : 2] = strength
    for head in range(len(queries)):
        angle = (head + 1) * turns
        queries[head, 0 : 2 * pairs : 2] = strength * torch.cos(angle)
        queries[head, 1 : 2 * pairs : 2] = -strength * torch.sin(angle)
    attention.q_proj.weight.mul_(0.25)
    attention.k_proj.weight.mul_(0.25)


def optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embeddings, norms and biases, both at the same learning rate."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    return (
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
    )


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Training windows are full and causal, so no mask is made."""


def training_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softening: float = 1.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention without a cache: query (B, Hq, T, D), key and value (B, Hkv, T, D) to (B, T, Hq, D).

    softening below 1 makes the scores of full layers smaller than they will be in use. What is still found
    then has a margin that outweighs the many more tokens of a longer text.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    if sliding_window is None or query.shape[2] <= sliding_window:
        scale = scaling if sliding_window is not None else softening * query.shape[-1] ** -0.5
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    else:
        out = _banded(query, key, value, sliding_window, scaling)
    return out.transpose(1, 2).contiguous(), None


def _banded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float | None
) -> torch.Tensor:
    """Sliding-window attention: each block of queries sees its own block of keys and the one before."""
    batch, heads, length, dim = query.shape
    blocks = length // window

    def with_previous(x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(batch, heads, blocks, window, dim)
        previous = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        return torch.cat([previous, x], 3).reshape(-1, blocks, 2 * window, dim)

    row = torch.arange(window)[:, None] + window
    column = torch.arange(2 * window)[None]
    band = (column <= row) & (column > row - window)
    seen = band.repeat(blocks, 1, 1)
    seen[0] &= column >= window
    scores = query.reshape(-1, blocks, window, dim) @ with_previous(key).transpose(-1, -2)
    scores = scores.float() * (dim**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    out = weights.to(value.dtype) @ with_previous(value)
    return out.reshape(batch, heads, length, dim)
