"""Latent attention (MLA), with and without an indexer of its own."""

from __future__ import annotations

from tests.families.common import GROUPED, INDEXED, LATENT, PLAIN_ROPE, SLIDING, YARN, Family, usual

FAMILIES: dict[str, Family] = {
    "deepseek_v2": usual("deepseek_v2", **LATENT, **GROUPED),
    "deepseek_v3": usual("deepseek_v3", **LATENT, **GROUPED, rope_parameters=YARN),
    "mistral4": usual(
        "mistral4", "mistral3", **LATENT, **GROUPED, rope_parameters={**YARN, "llama_4_scaling_beta": 0.1}
    ),
    "glm4_moe_lite": usual(
        "glm4_moe_lite", **LATENT, **GROUPED, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "minicpm3": usual("minicpm3", **LATENT, scale_emb=2, scale_depth=1.4, dim_model_base=16),
    "youtu": usual("youtu", **LATENT),
    "axk1": usual("axk1", **LATENT, **GROUPED),
    "longcat_flash": usual(
        "longcat_flash",
        **LATENT,
        head_dim=8,
        without=("num_hidden_layers", "intermediate_size"),
        num_layers=2,
        ffn_hidden_size=48,
        moe_topk=2,
        n_routed_experts=4,
        zero_expert_num=2,
        expert_ffn_hidden_size=24,
    ),
    "deepseek_v32": usual("deepseek_v32", **INDEXED, **GROUPED),
    "glm_moe_dsa": usual("glm_moe_dsa", **INDEXED, **GROUPED),
    "axk2": usual("axk2", **INDEXED, **GROUPED, gated_norm_rank=4),
    "hy_v4": usual(
        "hy_v4",
        **INDEXED,
        **GROUPED,
        mlp_layer_types=["dense", "sparse", "sparse"],
        indexer_types=["full", "shared", "full"],
        hc_mult=2,
    ),
    "dots3_note": usual(
        "dots3_note_text",
        head_dim=20,
        **INDEXED,
        **GROUPED,
        sliding_window=7,
        layer_types=["indexed_attention", SLIDING, SLIDING],
        mlp_layer_types=["dense", "sparse", "sparse"],
        shared_experts_intermediate_size=24,
        per_layer_config={
            "01": {"num_attention_heads": 2, "num_key_value_heads": 2},
            "02": {"num_attention_heads": 2, "num_key_value_heads": 2},
        },
    ),
    "deepseek_v4": usual(
        "deepseek_v4",
        num_key_value_heads=1,
        head_dim=16,
        q_lora_rank=20,
        num_experts_per_tok=2,
        n_routed_experts=4,
        n_shared_experts=1,
        moe_intermediate_size=24,
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", SLIDING],
        compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        mlp_layer_types=["hash_moe", "moe", "moe"],
        hc_mult=2,
        sliding_window=7,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=8,
    ),
    "sarvam_mla": usual("sarvam_mla", **LATENT, **GROUPED, rope_parameters=PLAIN_ROPE),
}
