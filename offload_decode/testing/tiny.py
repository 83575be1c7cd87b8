"""Tiny models with random weights, built offline."""

from typing import Any

VOCAB = 131
TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
COMMON: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
HEADS = {"head_dim": 16}  # other than hidden_size // num_attention_heads, where a family lets them differ


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """A float32 Llama with random weights; `changes` go to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return with_random_weights(LlamaForCausalLM, LlamaConfig(**{**COMMON, **HEADS, **changes}), seed)


def with_random_weights(model_class: Any, config: Any, seed: int = 0) -> Any:
    """A float32 model of a config, sinks and norms drawn too."""
    import torch

    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and sinks start as constants, which would hide mistakes with them
                weight.add_(torch.randn_like(weight) * (1.0 if "sinks" in name else 0.1))
    # No end token: random weights would stop at random places.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model
