"""The demo models' shapes and first weights.

`demo`: sliding-window rotary layers and full-attention layers that know no positions (Cohere 2, arXiv
2504.00698, section 2.1): what such a model learned in a window of a few hundred tokens holds for far longer
ones. `demo-rope`: every layer full and rotary, as in Llama, with slow turns so that content can be compared
at any distance.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Cohere2Config, LlamaConfig, PreTrainedModel

from training.muon import Muon

WINDOW = 256  # tokens a sliding layer sees: longer than a question with its answer, or a document's header
MODELS = ("demo", "demo-rope")
LONGEST = 4_194_304
STILL = 1e-5  # turns slower than this hardly tell two places of a long text apart
# Where each head of a local layer looks at first (see `look_back`): nine tokens back in two layers, and a
# few averages that tell one passage from another.
LOCAL = {
    "cohere2": {0: [1, 2, 3, -12], 1: [3, 6, -16, 0], 3: [-48, 1, 0, 0]},
    "llama": {0: [1, 2, 3, -12], 1: [3, 6, -16, 0], 2: [0, 0, 0, -48]},
}


def config(name: str, vocabulary: int, bos: int, eos: int, pad: int) -> Cohere2Config | LlamaConfig:
    """About three million parameters."""
    common: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": LONGEST,
        "initializer_range": 0.06,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    if name == "demo":
        kinds = [
            "sliding_attention",
            "sliding_attention",
            "full_attention",
            "sliding_attention",
            "full_attention",
        ]
        return Cohere2Config(
            **common, num_hidden_layers=5, layer_types=kinds, sliding_window=WINDOW, logit_scale=1.0
        )
    return LlamaConfig(
        **common | {"head_dim": 128},
        num_hidden_layers=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e9},
    )


def create(settings: Any) -> PreTrainedModel:
    """A model with random weights whose local heads start out looking a few tokens back."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(settings)
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_(0.1)  # else their noise drowns the embeddings, and copying forms late
        local = LOCAL[settings.model_type]
        for index, layer in enumerate(model.model.layers):
            offsets = local.get(index, [0] * settings.num_attention_heads)
            if settings.model_type == "llama":
                compare_anywhere(layer.self_attn, settings, offsets)
            if any(offsets):
                look_back(layer.self_attn, settings, offsets)
    return model


def compare_anywhere(attention: Any, settings: Any, offsets: list[int]) -> None:
    """Let the heads that are not local start out with the slow turns alone: content, at any distance."""
    dim = settings.head_dim
    turns = settings.rope_parameters["rope_theta"] ** (-torch.arange(0, dim, 2) / dim)
    fast = torch.arange(dim // 2)[turns > STILL]
    weights = attention.q_proj.weight.view(-1, dim, attention.q_proj.weight.shape[1])
    for head, offset in enumerate(offsets):
        if not offset:
            weights[head, fast] = 0
            weights[head, fast + dim // 2] = 0


def look_back(attention: Any, settings: Any, offsets: list[int]) -> None:
    """Let the heads of a rotary layer start out local, by the biases of queries and keys.

    A positive offset looks so many tokens back, a negative one averages about so many of the last tokens,
    and nought leaves the head as it is. Rotation by position turns a query bias `R(-d) b` and a key bias `b`
    into a score that is largest at distance d. Fast pairs of dimensions tell neighbours apart, slow ones
    what is far.
    """
    dim = settings.head_dim
    theta = settings.rope_parameters["rope_theta"]
    turns = theta ** (-torch.arange(0, dim, 2) / dim)
    paired = settings.model_type == "cohere2"
    slowest = 0.01 if paired else 1e-6  # a window keeps what is far from a sliding layer
    used = torch.arange(dim // 2)[turns > slowest]
    first, second = (2 * used, 2 * used + 1) if paired else (used, used + dim // 2)
    turns = turns[used]
    strength = 5.0 * (dim / 64) ** 0.25
    queries = attention.q_proj.bias.view(-1, dim)
    keys = attention.k_proj.bias.view(-1, dim)
    keys[:, first] = strength
    weights = attention.q_proj.weight.view(-1, dim, attention.q_proj.weight.shape[1])
    for head, offset in enumerate(offsets):
        if offset > 0:
            size = strength * (turns > (0.03 if paired else 0.003))
        else:
            size = 0.3 * strength * (turns < 1.6 / max(1, -offset))
        if offset:
            angle = max(0, offset) * turns
            queries[head, first] = size * torch.cos(angle)
            queries[head, second] = -size * torch.sin(angle)
            weights[head].mul_(0.25)


def optimizers(model: PreTrainedModel) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the embeddings, norms and biases, both at the same learning rate."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and "embed" not in name else others).append(weight)
    return (
        Muon(matrices),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
    )
