"""The model of a GGUF file: its weights stay in mapped blocks (`block_layers`), or are unpacked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload_decode.common.errors import ModelError
from offload_decode.common.rows.ggml_blocks import FORMATS, Blocks
from offload_decode.common.slow_work import SlowWork
from offload_decode.hf.compat import class_of
from offload_decode.hf.meta_device import Unfilled
from offload_decode.models.block_layers import BlockLinear, compile_layers, look_up_in_blocks, unpacked
from offload_decode.models.gguf import StoredTensor
from offload_decode.models.gguf_cache import NORMS_WITH_ONE, PERMUTED, TABLE, Converted
from offload_decode.models.quantization import hushed


def gguf_model(path: Path, converted: Converted, config: Any, dtype: torch.dtype, in_blocks: bool) -> Any:
    """The model of a text config on the CPU, with the weights of a file whose architecture is one of
    `ARCHITECTURES`: matrices as they lie in the file, or all of them in `dtype`.

    Raises `ModelError` where the file lacks weights, or holds those of another shape.
    """
    file = _File(path, converted)
    if in_blocks:
        return _block_model(file, converted, config, dtype)
    return _read(class_of(config), file, config, file.unpacked(dtype), dtype)


def _block_model(file: _File, converted: Converted, config: Any, dtype: torch.dtype) -> Any:
    kind = class_of(config)

    def with_blocks(self: Any, *given: Any, **named: Any) -> None:
        with Unfilled(), torch.device("meta"):
            kind.__init__(self, *given, **named)
        _put_blocks(self, file, dtype)

    made: Any = type(kind.__name__, (kind,), {"__init__": with_blocks, "__module__": kind.__module__})
    tied = config.tie_word_embeddings
    table = converted.tensors.get(TABLE)
    if table is not None and table.kind in FORMATS:
        config.tie_word_embeddings = False  # the output layer multiplies by the same blocks
    model = _read(made, file, config, file.whole(dtype), dtype)
    model.__class__ = kind
    model.config.tie_word_embeddings = tied
    compile_layers(model)
    return model.requires_grad_(False)


def _read(kind: Any, file: _File, config: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> Any:
    with hushed(), Unfilled():
        model, report = kind.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"])):
        raise ModelError(
            f"the weights of {file.path} lack {len(missing)} of those that it tells of, {missing[0]} among "
            "them: fetch it again"
        )
    return model


class _File:
    """The tensors of a file by transformers' names."""

    def __init__(self, path: Path, converted: Converted) -> None:
        self.path, self.architecture = path, converted.architecture
        self.bytes: Blocks = np.memmap(path, np.uint8, "r")
        self.tensors = {own: converted.tensors[name] for own, name in converted.names.items()}
        self.heads = converted.config.num_attention_heads, converted.config.num_key_value_heads

    def in_blocks(self, name: str, shape: tuple[int, ...]) -> tuple[Blocks, int] | None:
        """The blocks of a weight and their type; None where it is not there, or is not in blocks."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.kind not in FORMATS:
            return None
        form = FORMATS[tensor.kind]
        if tensor.shape != shape or shape[1] % form.weights:
            raise ModelError(
                f"{name} of {self.path} has the shape {tensor.shape}, not {shape}: fetch it again"
            )
        width = shape[1] // form.weights * form.bytes
        blocks = self._bytes(tensor, shape[0] * width).reshape(shape[0], width)
        return self._in_order(name, blocks), tensor.kind

    def whole(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights that are not in blocks, or are no matrices."""
        tensors = self.tensors.items()
        others = {name: own for name, own in tensors if own.kind not in FORMATS or len(own.shape) != 2}
        return self._read("reading", others, dtype)

    def unpacked(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """All weights."""
        return self._read("unpacking", self.tensors, dtype)

    def _read(self, doing: str, tensors: dict[str, StoredTensor], dtype: torch.dtype) -> dict[str, Tensor]:
        numbers = sum(math.prod(tensor.shape) for tensor in tensors.values())
        work, found = SlowWork(f"{doing} the weights", numbers * dtype.itemsize), {}
        for name, tensor in tensors.items():
            blocks = self.in_blocks(name, tensor.shape) if len(tensor.shape) == 2 else None
            if blocks is None:
                found[name] = self._widened(name, tensor).to(dtype)
            else:
                found[name] = unpacked(*blocks, tensor.shape[1], dtype)
            work.add(found[name].nbytes)
        return found

    def _widened(self, name: str, tensor: StoredTensor) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        kind = GGMLQuantizationType(tensor.kind)
        weights, size = GGML_QUANT_SIZES[kind]
        *rows, width = tensor.shape or (1,)
        held = self._bytes(tensor, int(np.prod(rows, dtype=np.int64)) * width // weights * size)
        wide = dequantize(held.reshape(*rows, -1), kind)
        if self.architecture in NORMS_WITH_ONE and name.endswith("norm.weight"):
            wide = wide - 1
        return torch.from_numpy(np.array(self._in_order(name, wide), np.float32))

    def _in_order(self, name: str, rows: Any) -> Any:
        """Rows as transformers has them: llama.cpp puts two that are rotated together side by side."""
        queries = ".q_proj." in name
        if self.architecture not in PERMUTED or not (queries or ".k_proj." in name):
            return rows
        heads = self.heads[0] if queries else self.heads[1]
        pairs = rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _bytes(self, tensor: StoredTensor, size: int) -> Blocks:
        if tensor.start + size > len(self.bytes):
            raise ModelError(f"{self.path} is cut off: fetch it again")
        return self.bytes[tensor.start : tensor.start + size]


def _put_blocks(model: Any, file: _File, dtype: torch.dtype) -> None:
    """Replace the linear layers and the table of embeddings whose weights are in blocks."""
    table, output = model.get_input_embeddings(), model.get_output_embeddings()
    for path, module in list(model.named_modules()):
        name = f"{path}.weight"
        if module is output and name not in file.tensors:  # which is the table
            name = next(f"{own}.weight" for own, other in model.named_modules() if other is table)
        if type(module) is nn.Linear:
            if found := file.in_blocks(name, (module.out_features, module.in_features)):
                parent, _, own = path.rpartition(".")
                made = BlockLinear(*found, module.bias)
                made.wide = module is output
                setattr(model.get_submodule(parent), own, made)
        elif module is table and (
            found := file.in_blocks(name, (module.num_embeddings, module.embedding_dim))
        ):
            look_up_in_blocks(module, *found, dtype)
