"""Layers whose weights are GGUF's blocks, as a file has them or as whole weights are quantized on a CPU.

A few rows are multiplied as they come, rounded to 8 bits (`common.rows.ggml_products`). For a long pass the
weights of a layer are unpacked, a tile at a time, into what the processor multiplies fastest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from offload_decode.common.rows import threads
from offload_decode.common.rows.compiled import features
from offload_decode.common.rows.ggml_blocks import FORMATS, Blocks, unpack
from offload_decode.common.rows.ggml_products import Matrices
from offload_decode.common.slow_work import SlowWork
from offload_decode.models.few_rows import FEW_ROWS, PROJECTIONS, FewRows
from offload_decode.models.quantization import replaceable

_TILE = 8 << 20  # bytes of an unpacked tile: what stays in the cache of a processor, or nearly
# Whether products of bfloat16 are the fastest: asked for once, as LLVM lists all that a processor has.
_IN_BF16 = not features().isdisjoint(("avx512bf16", "amx-bf16", "bf16"))
# Of models whose layers `FewRows` knows: whether their norms multiply by their weight and one.
_COMPILED = {"llama": False, "qwen2": False, "qwen3": False, "gemma2": True, "gemma3_text": True}
_AT_ONCE = 1 << 20  # weights that a thread quantizes at a time


class BlockLinear(nn.Module):
    """A linear layer whose weights are blocks, uint8 `[rows, bytes of a row]`, of ggml's type `kind`.

    The products of `wide` ones are float32, whatever the input is: to round the logits of a vocabulary takes
    as long as a layer.
    """

    wide = False
    dtype = torch.float32  # of `weight`

    def __init__(self, blocks: Blocks, kind: int, bias: nn.Parameter | None):
        super().__init__()
        self.blocks, self.kind = blocks, kind
        self.matrices = Matrices([(blocks, kind)])
        self.in_features, self.out_features = self.matrices.width, len(blocks)
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        if len(rows) <= FEW_ROWS:
            out = torch.from_numpy(self.matrices.multiply(rows.float().contiguous().numpy())[0])
        else:
            out = self._by_tiles(rows)
        if self.bias is not None:
            out = out + self.bias
        dtype = torch.float32 if self.wide else input.dtype
        return out.to(dtype).reshape(*input.shape[:-1], self.out_features)

    @property
    def weight(self) -> Tensor:
        """Unpacked anew: some models look into a layer, such as Jamba and the routers of HunYuan."""
        return unpacked(self.blocks, self.kind, self.in_features, self.dtype)

    def _by_tiles(self, rows: Tensor) -> Tensor:
        in_bf16 = _IN_BF16 and rows.dtype is torch.bfloat16 and not self.wide
        dtype = torch.bfloat16 if in_bf16 else torch.float32
        rows = rows.to(dtype)
        step = max(1, _TILE // (self.in_features * dtype.itemsize))
        tile = torch.empty(min(step, self.out_features), self.in_features, dtype=dtype)
        out = torch.empty(len(rows), self.out_features, dtype=dtype)
        for start in range(0, self.out_features, step):
            own = self.blocks[start : start + step]
            unpack(own, self.kind, _numbers(tile[: len(own)]))
            torch.mm(rows, tile[: len(own)].T, out=out[:, start : start + len(own)])
        return out


class BlockEmbedding(nn.Embedding):
    """A table of embeddings whose rows are blocks, unpacked as they are looked up."""

    blocks: Blocks
    kind: int

    def forward(self, input: Tensor) -> Tensor:
        ids = input.reshape(-1).numpy()
        if ids.size and ids.min() < 0:
            raise IndexError("token ids are not negative")
        found = np.ascontiguousarray(self.blocks[ids])
        rows = unpacked(found, self.kind, self.embedding_dim, self.weight.dtype)
        return rows.reshape(*input.shape, self.embedding_dim)


def unpacked(blocks: Blocks, kind: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of so many weights."""
    wide = torch.empty(len(blocks), width, dtype=torch.float32 if dtype is torch.float16 else dtype)
    unpack(blocks, kind, _numbers(wide))
    return wide.to(dtype)


def _numbers(out: Tensor) -> npt.NDArray[Any]:
    """A view for `unpack`."""
    return out.view(torch.uint16).numpy() if out.dtype is torch.bfloat16 else out.numpy()


def compile_layers(model: Any) -> None:
    """Let decoder layers whose matrices are all in blocks run few rows in compiled calls (`few_rows`)."""
    ones = _COMPILED.get(model.config.model_type)
    if ones is None:
        return
    for layer in model.base_model.layers:
        projections = [layer.get_submodule(name) for name in PROJECTIONS]
        few = None
        if all(isinstance(own, BlockLinear) for own in projections):
            few = FewRows.of(layer, ones)
        if few is not None:
            layer.forward = few.forward


def look_up_in_blocks(table: Any, blocks: Blocks, kind: int, dtype: torch.dtype) -> None:
    """Let a table of embeddings look its rows up in blocks."""
    table.blocks, table.kind = blocks, kind
    del table.weight
    own = type(table)
    bases = (BlockEmbedding,) if own is nn.Embedding else (own, BlockEmbedding)
    table.__class__ = type(own.__name__, bases, {})
    # Some ask for its dtype; transformers leaves it alone as it sets up what else the module has.
    table.weight = torch.empty(0, table.embedding_dim, dtype=dtype, device="cpu")
    table.weight._is_hf_initialized = True


def quantize(model: Any, weights: str) -> Any:
    """Quantize a model's linear layers on a CPU: to Q8_0 (`int8`) or Q4_1 (`int4`), the output layer to Q8_0,
    and with it the table of embeddings where the two are one.

    Layer by layer, each of which goes as its blocks come.
    """
    from gguf import GGMLQuantizationType as Kind

    inner = Kind.Q4_1 if weights == "int4" else Kind.Q8_0
    layers, output, table = (
        list(replaceable(model)),
        model.get_output_embeddings(),
        model.get_input_embeddings(),
    )
    outer = type(output) is nn.Linear and output.in_features % FORMATS[Kind.Q8_0].weights == 0
    shared = outer and table is not None and output.weight is table.weight
    if shared and type(table) is not nn.Embedding and model.config.model_type not in _COMPILED:
        outer = False  # a table of another kind may read its weight
    size = sum(layer.weight.nbytes for _, _, layer in layers) + (output.weight.nbytes if outer else 0)
    work = SlowWork(f"quantizing the weights to {weights}", size)
    while layers:
        parent, name, layer = layers.pop()
        setattr(parent, name, _quantized(layer, inner))
        work.add(layer.weight.nbytes)
    if outer:
        made = _quantized(output, Kind.Q8_0)
        made.wide = True
        model.set_output_embeddings(made)
        if shared:
            look_up_in_blocks(table, made.blocks, made.kind, output.weight.dtype)
        work.add(output.weight.nbytes)
    compile_layers(model)
    return model.requires_grad_(False)


def _quantized(layer: nn.Linear, kind: Any) -> BlockLinear:
    from gguf import quantize

    form, (rows, width) = FORMATS[kind], layer.weight.shape
    blocks = np.empty((rows, width // form.weights * form.bytes), np.uint8)
    step = max(1, _AT_ONCE // width)

    def some(start: int) -> None:
        own = slice(start, start + step)
        blocks[own] = quantize(layer.weight[own].detach().float().numpy(), kind)

    if rows:
        threads.run(some, range(0, rows, step))
    made = BlockLinear(blocks, int(kind), layer.bias)
    made.dtype = layer.weight.dtype
    return made
