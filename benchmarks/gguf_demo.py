"""The demo model as a GGUF file, for llama.cpp: `write_demo`. Needs the package `gguf`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from offload_decode.models.checkpoint import source_of

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_demo(path: Path) -> Path:
    """Writes the file, weights in float32, as the engine computes with them; returns `path`."""
    gguf: Any = importlib.import_module("gguf")
    folder = Path(source_of("demo"))
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "cohere2")
    _sizes(writer, gguf, config)
    _vocabulary(writer, gguf, json.loads((folder / "tokenizer.json").read_text()), config)
    writer.add_chat_template((folder / "chat_template.jinja").read_text())
    for name, tensor in load_file(folder / "model.safetensors").items():
        writer.add_tensor(renamed(name), tensor.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sizes(writer: Any, gguf: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_logit_scale(config["logit_scale"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def _vocabulary(writer: Any, gguf: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Byte-level BPE with numbers in groups of three digits, as in Llama 3's pre-tokenizer.

    That cuts some runs of punctuation and new lines otherwise: near enough to time answers, not to compare.
    """
    tokens = dict(tokenizer["model"]["vocab"])
    special = {added["content"]: added["id"] for added in tokenizer["added_tokens"]}
    names = {number: text for text, number in (tokens | special).items()}
    count = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([names.get(number, f"<unused-{number}>") for number in range(count)])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if n in special.values() else kinds.NORMAL for n in range(count)])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)  # the template has it


def renamed(name: str) -> str:
    """llama.cpp's name of a tensor that transformers names `name`."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{_TENSORS[rest]}.{kind}"
    return f"{_TENSORS[stem]}.{kind}"
