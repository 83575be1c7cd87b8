"""Mixtures of experts, and latent attention (MLA) with and without an indexer of its own."""

from tests.families.common import (
    ALTERNATING,
    EXPERTS,
    FULL,
    GROUPED,
    HEADS,
    INDEXED,
    LATENT,
    PLAIN_ROPE,
    ROUTED,
    SLIDING,
    SPARSE,
    VOCAB,
    YARN,
    Family,
    renamed,
    usual,
)

TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
FAMILIES: dict[str, Family] = {
    "mixtral": usual("mixtral", HEADS, EXPERTS),
    "gpt-oss": usual("gpt_oss", HEADS, ALTERNATING, EXPERTS),
    "qwen2_moe": usual(
        "qwen2_moe", ROUTED, ALTERNATING, shared_expert_intermediate_size=24, use_sliding_window=True
    ),
    "qwen3-moe": usual("qwen3_moe", HEADS, ROUTED),
    "llama4": usual(
        "llama4_text",
        HEADS | EXPERTS,
        {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1], "attention_chunk_size": 8},
        {"attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5, "use_qk_norm": True},
        {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
        wrapper="llama4",
    ),
    "gemma4-moe": usual(
        "gemma4_text",
        HEADS | {"sliding_window": 7, "layer_types": [SLIDING, SLIDING, FULL], "global_head_dim": 24},
        {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        {"vocab_size_per_layer_input": VOCAB, "enable_moe_block": True, "num_experts": 4},
        {"top_k_experts": 2, "moe_intermediate_size": 24, "final_logit_softcapping": 5.0},
        wrapper="gemma4",
    ),
    "glm4_moe": usual("glm4_moe", HEADS, GROUPED, use_qk_norm=True),
    "minimax_m2": usual("minimax_m2", HEADS, EXPERTS),
    "minimax_m3": usual(
        "minimax_m3_vl_text",
        HEADS | EXPERTS | SPARSE,
        {"dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 8},
        wrapper="minimax_m3_vl",
    ),
    "olmoe": usual("olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=0.8),
    "flex_olmo": usual("flex_olmo", num_experts=4, num_experts_per_tok=2),
    "ernie4_5_moe": usual(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 24},
        {"moe_layer_start_index": 1, "moe_layer_end_index": 2},
    ),
    "hunyuan_v1_moe": usual("hunyuan_v1_moe", HEADS, num_experts=4, moe_topk=2),
    "cohere2_moe": usual(
        "cohere2_moe",
        HEADS | ALTERNATING,
        {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
        {"prefix_dense_intermediate_size": 48, "logit_scale": 1.0},
    ),
    "phimoe": usual("phimoe", EXPERTS, sliding_window=7),
    "solar_open": usual("solar_open", HEADS, GROUPED),
    "dots1": usual("dots1", HEADS, GROUPED, ALTERNATING),
    "mimo_v2_flash": usual(
        "mimo_v2_flash",
        ALTERNATING | GROUPED | SPARSE | {"head_dim": 12, "v_head_dim": 8, "attention_value_scale": 0.7},
        rope_parameters=dict.fromkeys((SLIDING, FULL), PLAIN_ROPE | {"partial_rotary_factor": 0.334}),
    ),
    "dbrx": renamed(
        "dbrx",
        {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 4096},
        {"attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0}},
        {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 32, "hidden_size": 32}},
    ),
    "afmoe": usual(
        "afmoe", HEADS, ALTERNATING, ROUTED, num_dense_layers=1, num_shared_experts=1, mup_enabled=True
    ),
    "exaone_moe": usual("exaone_moe", ALTERNATING, ROUTED, num_shared_experts=1, n_group=2, topk_group=1),
    "granitemoe": usual("granitemoe", EXPERTS, attention_multiplier=0.2, residual_multiplier=0.7),
    "granitemoeshared": usual(
        "granitemoeshared", EXPERTS, attention_multiplier=0.2, shared_intermediate_size=24
    ),
    "granitemoe_swa": usual(
        "granitemoe_swa", ALTERNATING, EXPERTS, attention_multiplier=0.2, shared_intermediate_size=24
    ),
    "jetmoe": usual("jetmoe", EXPERTS, without=("num_attention_heads",), kv_channels=16),
    "aria_text": usual("aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1),
    "flint": usual(
        "flint", HEADS, ALTERNATING, ROUTED, shared_expert_intermediate_size=24, mlp_only_layers=[0]
    ),
    "kolibri1": usual(
        "kolibri1", HEADS, ALTERNATING, EXPERTS, moe_intermediate_size=24, shared_expert_intermediate_size=24
    ),
    "laguna": usual(
        "laguna",
        HEADS | ALTERNATING | ROUTED,
        {"shared_expert_intermediate_size": 24, "num_attention_heads_per_layer": [4, 4, 4]},
    ),
    "mellum": usual("mellum", HEADS, ALTERNATING, EXPERTS, moe_intermediate_size=24),
    "beam": usual(
        "beam",
        HEADS | ALTERNATING | ROUTED | SPARSE,
        {"n_group": 2, "topk_group": 1, "final_logit_softcapping": 5.0},
    ),
    "hy_v3": usual("hy_v3", HEADS, ROUTED, num_shared_experts=1),
    "sarvam_moe": usual("sarvam_moe", HEADS, GROUPED),
    "deepseek_v2": usual("deepseek_v2", LATENT, GROUPED),
    "deepseek_v3": usual("deepseek_v3", LATENT, GROUPED, rope_parameters=YARN),
    "mistral4": usual(
        "mistral4", LATENT, GROUPED, wrapper="mistral3", rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
    ),
    "glm4_moe_lite": usual("glm4_moe_lite", LATENT, GROUPED, SPARSE),
    "minicpm3": usual("minicpm3", LATENT, scale_emb=2, scale_depth=1.4, dim_model_base=16),
    "youtu": usual("youtu", LATENT),
    "axk1": usual("axk1", LATENT, GROUPED),
    "longcat_flash": usual(
        "longcat_flash",
        LATENT,
        {"head_dim": 8, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": 2, "n_routed_experts": 4},
        {"zero_expert_num": 2, "expert_ffn_hidden_size": 24},
        without=("num_hidden_layers", "intermediate_size"),
    ),
    "deepseek_v32": usual("deepseek_v32", INDEXED, GROUPED),
    "glm_moe_dsa": usual("glm_moe_dsa", INDEXED, GROUPED),
    "axk2": usual("axk2", INDEXED, GROUPED, gated_norm_rank=4),
    "hy_v4": usual("hy_v4", INDEXED, GROUPED, SPARSE, indexer_types=["full", "shared", "full"], hc_mult=2),
    "dots3_note": usual(
        "dots3_note_text",
        INDEXED | GROUPED | SPARSE | {"head_dim": 20, "shared_experts_intermediate_size": 24},
        {"sliding_window": 7, "layer_types": ["indexed_attention", SLIDING, SLIDING]},
        per_layer_config={"01": TWO_HEADS, "02": TWO_HEADS},
    ),
    "deepseek_v4": usual(
        "deepseek_v4",
        {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 20, "num_experts_per_tok": 2},
        {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24},
        {"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", SLIDING]},
        {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
        {"mlp_layer_types": ["hash_moe", "moe", "moe"], "hc_mult": 2, "sliding_window": 7, "o_groups": 2},
        {"o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    ),
    "sarvam_mla": usual("sarvam_mla", LATENT, GROUPED, rope_parameters=PLAIN_ROPE),
}
