"""How many bytes the weights of a checkpoint in few bits take, counted from its config."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import torch

_LONGEST = 256  # characters of a pattern
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


def packed_bytes(model: Any, quantization: dict[str, Any], item: int) -> tuple[int, int]:
    """Bytes of all weights, and of the fused expert weights alone. `model` is that of whole weights, on any
    device; a number of those that are not packed takes `item` bytes. 0 where none stay packed anywhere.
    """
    if quantization.get("linear_class") == "autobitlinear":  # BitNet, unpacked as it is read
        return 0, 0
    total = experts = 0.0
    packed = {id(weight) for weight in _packed(model, quantization)}
    for weight in model.parameters():
        size = weight.numel() * (
            _bits(quantization, *weight.shape[-2:]) / 8 if id(weight) in packed else item
        )
        total += size
        experts += size if weight.ndim == 3 else 0
    return round(total), round(experts)


def _packed(model: Any, quantization: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The weights that a format takes: of linear layers but the output layer, and of fused experts; of MXFP4
    the experts alone.
    """
    method, output = quantization["quant_method"], model.get_output_embeddings()
    patterns = [name for field in _SKIPPED for name in quantization.get(field) or () if isinstance(name, str)]
    for name, module in model.named_modules():
        if module is output or any(_names(pattern, name) for pattern in patterns):
            continue
        if type(module) is torch.nn.Linear and method != "mxfp4":
            yield module.weight
        if method in ("mxfp4", "fp8"):
            yield from (weight for weight in module.parameters(recurse=False) if weight.ndim == 3)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a module, as the formats' libraries read it: a name, the end or the beginning
    of one, or an expression.
    """
    if name == pattern or name.endswith(f".{pattern}") or name.startswith(f"{pattern}."):
        return True
    try:
        return len(pattern) <= _LONGEST and bool(re.match(pattern.removeprefix("re:"), name))
    except re.error:
        return False


def _bits(quantization: dict[str, Any], rows: int, columns: int) -> float:
    """Bits of a weight of a matrix, with its part of the scales."""
    method = quantization["quant_method"]
    if method == "mxfp4":
        return 4 + 8 / 32
    if method == "bitnet":
        return 2.0
    if method == "fp8":
        block = quantization.get("weight_block_size") or (rows, columns)
        return 8 + 32 / (min(block[0], rows) * min(block[1], columns))
    if method == "bitsandbytes":
        if quantization.get("load_in_8bit"):
            return 8 + 32 / columns
        twice = quantization.get("bnb_4bit_use_double_quant")
        return 4 + (8 + 32 / 256 if twice else 32) / 64
    if method == "compressed-tensors":
        groups = [one["weights"] for one in quantization["config_groups"].values() if one.get("weights")]
        return max(
            (one["num_bits"] + 16 / (one.get("group_size") or columns) for one in groups), default=16.0
        )
    if method == "torchao":
        four = re.search("int4|fp4|float4", json.dumps(quantization.get("quant_type")), re.IGNORECASE)
        return 4 + 32 / 128 if four else 8 + 32 / columns
    bits, group = int(quantization.get("bits", 4)), int(quantization.get("group_size", 128))
    return bits + (16 + bits) / (group if group > 0 else columns)
