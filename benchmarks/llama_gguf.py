"""A Llama of transformers as a GGUF file, for llama.cpp: `write_llama`. Needs the package `gguf`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gguf_demo import renamed

KINDS = ("BF16", "F16", "Q8_0")


def write_llama(path: Path, model: Any, kind: str = "BF16") -> Path:
    """Writes the file, matrices in one of KINDS, norms in float32, and no tokenizer; returns `path`."""
    gguf: Any = importlib.import_module("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    chosen = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if tensor.ndim == 1:
            writer.add_tensor(renamed(name), tensor.float().numpy())
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                tensor = paired(tensor.unflatten(0, (heads, -1)).mT).mT.flatten(0, 1)
        writer.add_tensor(renamed(name), numbers(tensor, kind, gguf), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def paired(rows: torch.Tensor) -> torch.Tensor:
    """Heads' channels `[…, D]` in llama.cpp's order: it rotates neighbours, transformers i and i + D/2."""
    return rows.unflatten(-1, (2, -1)).mT.flatten(-2)


def numbers(tensor: torch.Tensor, kind: str, gguf: Any) -> np.ndarray:
    """A matrix as `add_tensor` takes it: numbers, or the bytes of them."""
    if kind == "F16":
        return tensor.half().numpy()
    if kind == "BF16":
        return tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    return gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])
