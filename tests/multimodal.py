"""Tiny multimodal models with random weights, all built offline."""

from copy import deepcopy
from typing import Any

import torch

VOCAB = 259  # of tests.tiny.tiny_tokenizer
_TEXT: dict[str, Any] = (
    {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
)
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
} | {"image_size": 28, "patch_size": 14}
_LINEAR = {"num_key_heads": 2, "num_value_heads": 2, "key_head_dim": 8, "value_head_dim": 8}
_BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
_AUDIO = {"num_mel_bins": 8, "max_source_positions": 20}


def _rope(*sections: int, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections), **more}
    return {"rope_parameters": rope}


def _of(text: str, changes: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
    return {"text_config": _TEXT | {"model_type": text} | (changes or {}), **parts}


def _vision(model_type: str, **changes: Any) -> dict[str, Any]:
    return _VISION | {"model_type": model_type} | changes


# By the wrapper's model type.
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": _of(
        "gemma3_text",
        {"sliding_window": 7},
        vision_config=_vision("siglip_vision_model"),
        mm_tokens_per_image=4,
    ),
    "gemma4": _of(
        "gemma4_text",
        {"sliding_window": 7, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
        vision_config=None,
        audio_config=None,
    ),
    "mistral3": _of("mistral", vision_config=_vision("pixtral", head_dim=16)),
    "llama4": _of(
        "llama4_text",
        {"num_local_experts": 2, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
        vision_config=_VISION
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    ),
    "llava": _of("llama", vision_config=_vision("clip_vision_model")),
    "internvl": _of(
        "qwen2", vision_config=_vision("internvl_vision", image_size=[28, 28], patch_size=[14, 14])
    ),
    "idefics3": _of("llama", vision_config=_VISION, pad_token_id=0),
    "lfm2_vl": _of(
        "lfm2", {"layer_types": ["conv", "full_attention"]}, vision_config=_vision("siglip2_vision_model")
    ),
    "qwen2_vl": _of("qwen2_vl_text", _rope(2, 1, 1), vision_config=_BLOCKS | {"embed_dim": 32}),
    "qwen2_5_vl": _of(
        "qwen2_5_vl_text", _rope(2, 1, 1), vision_config=_BLOCKS | {"fullatt_block_indexes": [0]}
    ),
    "qwen3_vl": _of(
        "qwen3_vl_text",
        _rope(2, 1, 1, mrope_interleaved=True),
        vision_config=_BLOCKS | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": _of(
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            **{f"linear_{name}": size for name, size in _LINEAR.items()},
            **_rope(1, 1, 0, partial_rotary_factor=0.5),
        },
        vision_config=_BLOCKS,
    ),
    "glm4v": _of("glm4v_text", _rope(1, 1, 0, partial_rotary_factor=0.5), vision_config=_BLOCKS),
    "qwen2_audio": _of(
        "qwen2",
        audio_config=_AUDIO
        | {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48},
    ),
    "voxtral": _of(
        "llama",
        audio_config=_AUDIO
        | {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
}


def tiny_wrapper(name: str, **changes: Any) -> Any:
    """A float32 multimodal model; `changes` go to its config."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    config = CONFIG_MAPPING[name](**deepcopy({**WRAPPERS[name], **changes}))
    torch.manual_seed(0)
    for known in (auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(config) in known:
            return known[type(config)](config).float().eval()
    raise LookupError(name)
