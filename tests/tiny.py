"""Tiny models with random weights, one for each architecture, and a byte-level tokenizer: all built
offline.
"""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 131
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
ALTERNATING = {
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# Class name and what its config needs beyond COMMON.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha": ("Llama", {"num_key_value_heads": 4}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 1024,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "gemma2": ("Gemma2", {**ALTERNATING, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", {**ALTERNATING, "query_pre_attn_scalar": 10}),
    "phi3": ("Phi3", {}),
    "gpt-oss": ("GptOss", {**ALTERNATING, **EXPERTS}),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None}),
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "cohere2": ("Cohere2", {**ALTERNATING, "sliding_window": 5, "logit_scale": 1.0}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5}),
}

_CLASSES = {"Gemma3Text": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A float32 model of a family with random weights, sinks and norms included; `changes` go to its
    config.
    """
    import transformers

    base, special = FAMILIES[family]
    config_name, model_name = _CLASSES.get(base, (f"{base}Config", f"{base}ForCausalLM"))
    config = getattr(transformers, config_name)(**{**COMMON, **special, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and sinks start as constants, which would hide mistakes with them
                weight.add_(torch.randn_like(weight) * (1.0 if "sinks" in name else 0.1))
    # No end token: random weights would stop at random places.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def tiny_tokenizer() -> Any:
    """Byte-level BPE without merges: every byte is one of 256 tokens, after three special ones. A text begins
    with `<s>`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def text_model(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    """A tiny model whose vocabulary is that of `tiny_tokenizer`."""
    return tiny_model(family, seed, vocab_size=259, **changes)
