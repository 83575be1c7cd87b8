"""Models with learned positions, or biases in their place, and their contemporaries."""

from __future__ import annotations

from tests.families.common import TOKENS, Family

FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt_bigcode": Family(
        "gpt_bigcode", {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    ),
    "gpt_neo": Family(
        "gpt_neo",
        {
            **TOKENS,
            "hidden_size": 32,
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": 7,
            "max_position_embeddings": 256,
        },
    ),
    "gptj": Family(
        "gptj", {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
    ),
    "codegen": Family(
        "codegen", {**TOKENS, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256, "rotary_dim": 4}
    ),
    "opt": Family(
        "opt",
        {
            **TOKENS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 256,
            "init_std": 0.2,
        },
    ),
    "biogpt": Family(
        "biogpt",
        {
            **TOKENS,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "max_position_embeddings": 256,
        },
    ),
    "xglm": Family(
        "xglm",
        {
            **TOKENS,
            "d_model": 32,
            "num_layers": 3,
            "attention_heads": 4,
            "ffn_dim": 48,
            "max_position_embeddings": 256,
            "init_std": 0.2,
        },
    ),
    "bloom": Family("bloom", {**TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": Family(
        "mpt", {**TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 256, "use_cache": True}
    ),
}
