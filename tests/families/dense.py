"""Models of dense layers, whose positions are rotary, learned or none, and their contemporaries."""

from tests.families.common import (
    ALTERNATING,
    FULL,
    HEADS,
    PLAIN_ROPE,
    SLIDING,
    VOCAB,
    YARN,
    Family,
    renamed,
    rope,
    usual,
)

PLAIN_NAMES = ["llama", "qwen2", "qwen3", "gemma", "phi3", "olmo2", "ernie4_5", "hunyuan_v1_dense", "arcee"]
PLAIN_NAMES += ["nemotron", "iquestcoder", "jais2", "diffllama", "exaone"]
GPT = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
SHARED_KEYS = {
    "num_hidden_layers": 5,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "sliding_window": 7,
} | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
FAMILIES: dict[str, Family] = {
    **{name: usual(name, HEADS) for name in PLAIN_NAMES},
    "llama-mha": usual("llama", HEADS, num_key_value_heads=4),
    "llama-yarn": usual("llama", HEADS, rope("yarn", 1024, factor=4.0)),
    "mistral": usual("mistral", HEADS, sliding_window=None),
    "mistral-sliding": usual("mistral", HEADS, sliding_window=7),
    "smollm3": usual("smollm3", HEADS, no_rope_layers=[1, 0, 1]),
    **{
        name: usual(name, HEADS, ALTERNATING, query_pre_attn_scalar=10, attn_logit_softcapping=3.0)
        for name in ("gemma2", "vaultgemma")
    },
    "gemma3": usual("gemma3_text", HEADS, ALTERNATING, query_pre_attn_scalar=10),
    "gemma3-wrapper": usual(
        "gemma3_text",
        HEADS | ALTERNATING | {"query_pre_attn_scalar": 10},
        rope_parameters={
            SLIDING: PLAIN_ROPE,
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
        wrapper="gemma3",
    ),
    "gemma3n": usual(
        "gemma3n_text",
        HEADS | SHARED_KEYS | {"laurel_rank": 4, "altup_num_inputs": 2},
        {"intermediate_size": [48] * 5, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0]},
        wrapper="gemma3n",
    ),
    "gemma4": usual(
        "gemma4_text",
        HEADS | SHARED_KEYS | {"global_head_dim": 24, "use_double_wide_mlp": True},
        wrapper="gemma4",
    ),
    "gemma4_unified": usual(
        "gemma4_unified_text",
        HEADS | {"sliding_window": 7, "layer_types": [SLIDING, SLIDING, FULL], "global_head_dim": 24},
        wrapper="gemma4_unified",
    ),
    "phi3-longrope": usual(
        "phi3",
        {"original_max_position_embeddings": 32, "max_position_embeddings": 4096},
        rope(
            "longrope",
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 4.0, 8.0],
            partial_rotary_factor=1.0,
        ),
    ),
    "phi": usual("phi", qk_layernorm=True),
    "olmo": usual("olmo", clip_qkv=0.8),
    "olmo3": usual("olmo3", ALTERNATING),
    "granite": usual("granite", HEADS, attention_multiplier=0.2, residual_multiplier=0.7, logits_scaling=2.0),
    "granite_swa": usual("granite_swa", ALTERNATING, attention_multiplier=0.2, residual_multiplier=0.7),
    "cohere": usual("cohere", use_qk_norm=True, logit_scale=1.0),
    "cohere2": usual("cohere2", HEADS, {**ALTERNATING, "sliding_window": 5}, logit_scale=1.0),
    "glm": usual("glm", HEADS, attention_bias=True),
    "glm4": usual("glm4", HEADS, partial_rotary_factor=0.5),
    "ministral": usual("ministral", HEADS, ALTERNATING),
    "ministral3": usual(
        "ministral3", HEADS, wrapper="mistral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
    ),
    "exaone4": usual("exaone4", ALTERNATING),
    "seed_oss": usual("seed_oss", HEADS, attention_bias=True),
    "apertus": usual("apertus", rope("llama3", 16, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)),
    "starcoder2": usual("starcoder2", sliding_window=7),
    "stablelm": usual("stablelm", qk_layernorm=True, use_qkv_bias=True, use_parallel_residual=True),
    "helium": usual("helium", head_dim=8),
    "internlm3": usual("internlm3", HEADS, qkv_bias=True, bias=True),
    "nanochat": usual("nanochat"),
    "bitnet": usual("bitnet"),
    "cwm": usual("cwm", HEADS, ALTERNATING),
    "hyperclovax": usual("hyperclovax", HEADS, attention_multiplier=0.2, use_post_norm=True),
    "doge": usual("doge"),
    **{name: usual(name, without=("num_key_value_heads",)) for name in ("persimmon", "gpt_neox")},
    "gpt_neox_japanese": usual(
        "gpt_neox_japanese",
        {"intermediate_multiple_size": 2},
        without=("num_key_value_heads", "intermediate_size"),
    ),
    "modernbert-decoder": usual(
        "modernbert-decoder",
        {"layer_types": ALTERNATING["layer_types"], "local_attention": 14},
        without=("num_key_value_heads",),
    ),
    "hrm_text": usual(
        "hrm_text",
        HEADS,
        {"num_layers_per_stack": 2, "H_cycles": 2, "L_cycles": 2, "L_bp_cycles": [1], "prefix_lm": False},
        without=("num_key_value_heads", "num_hidden_layers"),
    ),
    "falcon": renamed(
        "falcon",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_kv_heads": 2},
        {"new_decoder_architecture": True, "ffn_hidden_size": 48, "max_position_embeddings": 4096},
    ),
    "falcon-alibi": renamed(
        "falcon",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True},
        {"alibi": True, "ffn_hidden_size": 48},
    ),
    "dory": usual(
        # Its middle layers run twice, each time with keys of their own.
        "dory",
        HEADS | {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "sliding_window": 7},
        {"layer_types": [SLIDING, FULL, SLIDING, FULL]},
    ),
    "apertus1p5": usual("apertus1p5_text", HEADS, rope_parameters=PLAIN_ROPE, output_vocab_size=90),
    **{name: renamed(name, GPT) for name in ("gpt2", "gpt_bigcode")},
    "gpt_neo": renamed(
        "gpt_neo",
        {"hidden_size": 32, "num_layers": 3, "num_heads": 4},
        {"attention_types": [[["global", "local", "global"], 1]], "window_size": 7},
        {"max_position_embeddings": 256},
    ),
    **{name: renamed(name, GPT, rotary_dim=4) for name in ("gptj", "codegen")},
    "opt": renamed(
        "opt",
        {"hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
        {"ffn_dim": 48, "max_position_embeddings": 256, "init_std": 0.2},
    ),
    "biogpt": renamed(
        "biogpt",
        {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48},
        {"max_position_embeddings": 256},
    ),
    "xglm": renamed(
        "xglm",
        {"d_model": 32, "num_layers": 3, "attention_heads": 4, "ffn_dim": 48},
        {"max_position_embeddings": 256, "init_std": 0.2},
    ),
    "bloom": renamed("bloom", hidden_size=32, n_layer=3, n_head=4),
    "mpt": renamed("mpt", d_model=32, n_heads=4, n_layers=3, max_seq_len=256, use_cache=True),
}
