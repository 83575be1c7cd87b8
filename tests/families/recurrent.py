"""Recurrent layers (linear attention, state spaces, short convolutions), most between attention layers."""

from tests.families.common import (
    CALM,
    DELTA,
    EXPERTS,
    FULL,
    HEADS,
    LATENT,
    LINEAR,
    MAMBA2,
    ROUTED,
    SLIDING,
    SPARSE,
    Family,
    renamed,
    usual,
)

KIMI = (
    CALM
    | LATENT
    | SPARSE
    | {"q_lora_rank": None, "num_shared_experts": 1, "moe_intermediate_size": 24, "topk_group": 1}
    | {"num_experts": 4, "num_experts_per_token": 2, "layer_types": [LINEAR, FULL, LINEAR]}
    | {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
)
INKLING = (
    HEADS
    | {"sliding_window_size": 7, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 4}
    | {"rel_extent": 4096, "conv_kernel_size": 4}
    | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
)
FAMILIES: dict[str, Family] = {
    "qwen3_next": usual("qwen3_next", HEADS, DELTA, ROUTED, shared_expert_intermediate_size=24),
    "qwen3_5": usual("qwen3_5_text", HEADS, DELTA, wrapper="qwen3_5"),
    "qwen3_5_moe": usual(
        "qwen3_5_moe_text", HEADS, DELTA, ROUTED, wrapper="qwen3_5_moe", shared_expert_intermediate_size=24
    ),
    "qwen4_exp": usual(
        "qwen4_exp_text",
        HEADS | {**DELTA, "layer_types": [LINEAR, FULL, LINEAR]} | ROUTED,
        {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4096},
        {"indexer_compress_ratio": 4, "shared_expert_intermediate_size": 24, "hc_count": 2, "hc_lowrank": 8},
        {"ple_layer_ids": [], "ngram_vocab_size_base": 97},
    ),
    "olmo_hybrid": usual("olmo_hybrid", {**DELTA, "linear_num_key_heads": 4}),
    "kimi_linear": usual("kimi_linear", KIMI, num_expert_group=1),
    "bailing_hybrid": usual("bailing_hybrid", KIMI, num_expert_group=2, num_nextn_predict_layers=0),
    "granitemoehybrid": usual(
        "granitemoehybrid",
        EXPERTS | MAMBA2 | {"shared_intermediate_size": 24, "attention_multiplier": 0.2},
        {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "rope"},
    ),
    "bamba": usual("bamba", MAMBA2, attn_layer_indices=[1]),
    "falcon_h1": usual("falcon_h1", HEADS, MAMBA2, mamba_d_ssm=64, key_multiplier=0.7, num_hidden_layers=2),
    "nemotron_h": usual(
        "nemotron_h",
        CALM | HEADS | {"layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 8},
        {"mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 6, "conv_kernel": 4, "chunk_size": 16},
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        {"moe_shared_expert_intermediate_size": 24, "n_group": 2, "topk_group": 1, "moe_latent_size": 20},
        without=("num_hidden_layers",),
    ),
    "jamba": usual(
        "jamba",
        CALM,
        {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
        {"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 6},
        {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "zamba": usual(
        "zamba",
        CALM | {"num_key_value_heads": 4, "attention_head_dim": 16, "attention_hidden_size": 64},
        {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
        {"attn_layer_period": 2, "attn_layer_offset": 1, "n_mamba_heads": 2, "mamba_d_state": 6},
        {"mamba_dt_rank": 4, "use_mamba_kernels": False},
    ),
    "zamba2": usual(
        "zamba2",
        {"initializer_range": 0.05, "num_hidden_layers": 4},
        {"layers_block_type": ["mamba", "mamba", "hybrid", "hybrid"], "n_mamba_heads": 8},
        {"mamba_ngroups": 2, "mamba_d_state": 6, "chunk_size": 16, "num_mem_blocks": 2},
        {"use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4},
        without=("num_key_value_heads",),
    ),
    "mamba": renamed("mamba", hidden_size=32, num_hidden_layers=2, state_size=6),
    "mamba2": renamed(
        "mamba2",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 6},
        {"n_groups": 2, "chunk_size": 16},
    ),
    "lfm2": usual("lfm2", layer_types=["conv", FULL, "conv"], conv_L_cache=3, block_auto_adjust_ff_dim=False),
    "lfm2_moe": usual(
        "lfm2_moe", ROUTED, layer_types=["conv", FULL, "conv"], conv_L_cache=3, num_dense_layers=1
    ),
    "lfm3": usual(
        "lfm3",
        HEADS | {"num_hidden_layers": 4, "sliding_window": 7},
        {"layer_types": ["conv", SLIDING, "conv", FULL], "conv_L_cache": 4},
    ),
    "minimax": usual(
        "minimax",
        EXPERTS | {"layer_types": [LINEAR, FULL, LINEAR], "block_size": 16, "full_attn_alpha_factor": 1.5},
        {"linear_attn_beta_factor": 0.7},
    ),
    "recurrent_gemma": usual(
        "recurrent_gemma",
        {"head_dim": 8, "lru_width": 32, "attention_window_size": 7},
        {"block_types": ["recurrent", "recurrent", "attention"], "num_key_value_heads": 1},
    ),
    "zaya": usual(
        "zaya", HEADS, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=24, router_hidden_size=16
    ),
    "inkling": usual("inkling_text", INKLING | SPARSE, n_shared_experts=1, logits_mup_width_multiplier=1.0),
    "inkling2": usual("inkling2_text", INKLING, unpadded_vocab_size=131, log_scaling_n_floor=16),
    "lara_mini": usual(
        "lara_mini",
        HEADS | {**DELTA, "num_hidden_layers": 4, "layer_types": [LINEAR, SLIDING, LINEAR, FULL]} | ROUTED,
        {"shared_expert_intermediate_size": 24, "sliding_window": 7},
    ),
}
