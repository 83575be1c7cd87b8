"""How many bytes weights, stores, generated KV and prefills take: arithmetic, nothing measured."""

from dataclasses import replace
from functools import lru_cache
from math import prod

import numpy as np

from offload_decode.attention import dense
from offload_decode.attention.transfers import power_of_two
from offload_decode.common.rows import encodings
from offload_decode.indexes import registry
from offload_decode.indexes.base import Costs
from offload_decode.kv import placement
from offload_decode.kv.generated import room_for
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.kv.page_bounds import bounds_bytes
from offload_decode.models.quantization import BLOCK, FEW_BITS, GGUF
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.store.format import Manifest, numpy_dtype, stored_types
from offload_decode.store.layout import array_specs
from offload_decode.store.marks import marks_for
from offload_decode.types import LayerKind, LayerShape, ModelShape

# Bytes of a weight in the blocks that a CPU quantizes to: Q8_0, also of the output layer, and Q4_1.
_IN_BLOCKS = {"int8": 34 / 32, "int4": 20 / 32}
# Of bitsandbytes' NF4 with quantized scales: a byte for each block, four for each 256 blocks.
_INT4_BYTES = 1 / 2 + (1 + 4 / 256) / BLOCK
_ZARR_JSON, _SUM_LINE = 700, 110  # bytes of an array's metadata, and of a file's checksum


def itemsize(dtype: str) -> int:
    return numpy_dtype(dtype).itemsize


def weights_bytes(estimate: SizeEstimate, weights: str, on_gpu: bool = False) -> int:
    """A model's weights; int8 and int4 apply to the linear layers, the others stay in the model's dtype. On a
    CPU the output layer is quantized too, and with it the table of embeddings that is the same.
    """
    if estimate.runs_packed(on_gpu) and (weights == "auto" or not estimate.linear):
        return estimate.packed
    item = itemsize(estimate.dtype)
    rest = (estimate.parameters - estimate.linear) * item
    if weights in FEW_BITS and not on_gpu:
        output = estimate.vocabulary * estimate.hidden
        blocks = estimate.linear * _IN_BLOCKS[weights] + output * _IN_BLOCKS["int8"]
        return rest - output * item + round(blocks)
    if weights == "int8":
        return rest + estimate.linear + 4 * estimate.linear_rows
    if weights == "int4":
        return rest + round(estimate.linear * _INT4_BYTES)
    return estimate.parameters * item


def held_weights_bytes(estimate: SizeEstimate, weights: str, on_gpu: bool = False) -> int:
    """Those that are in memory: of a mapped table of embeddings only the rows that are looked up."""
    held = weights_bytes(estimate, weights, on_gpu)
    if estimate.format == GGUF and held == estimate.packed and not on_gpu:
        return held - round(held / estimate.parameters * estimate.embeddings)
    return held


def streamed_bytes(estimate: SizeEstimate) -> int:
    """On a card with streamed weights: two layers, and what is in none but an output layer of its own."""
    stays = estimate.parameters - estimate.layered - estimate.output
    return (stays + 2 * estimate.layer) * itemsize(estimate.dtype)


def waiting_bytes(estimate: SizeEstimate) -> int:
    """In memory, where weights are streamed: all layers', pinned, and an output layer of its own."""
    return (estimate.pinned + estimate.output) * itemsize(estimate.dtype)


def active_weights_bytes(estimate: SizeEstimate, weights: str, on_gpu: bool = False) -> int:
    """The weights that one token reads: of the embeddings one row, of the experts those it is sent to."""
    item, held = float(itemsize(estimate.dtype)), weights_bytes(estimate, weights, on_gpu)
    experts = estimate.packed_experts if estimate.runs_packed(on_gpu) else estimate.experts * item
    if estimate.format == GGUF and held == estimate.packed:  # the table is in blocks too
        item = held / estimate.parameters
    return held - round(estimate.embeddings * item + experts * (1 - estimate.active))


def row_bytes(shape: ModelShape, kv: str, dtype: str) -> tuple[int, int]:
    """Bytes of a key and of a value of one head, which of a latent are the same bytes."""
    stored = stored_types(kv, dtype, shape)
    key, value = (
        dim * itemsize(kind) if kind == dtype else encodings.row_bytes(kind, dim)
        for kind, dim in ((stored["keys"], shape.head_dim), (stored["values"], shape.value_dim))
    )
    return key, value


def pair_bytes(shape: ModelShape, kv: str, dtype: str) -> int:
    """Bytes of what one head keeps of a token."""
    key, value = row_bytes(shape, kv, dtype)
    return key if shape.latent else key + value


def pair_dim(shape: ModelShape) -> int:
    """Numbers of what one head keeps of a token."""
    return shape.head_dim if shape.latent else shape.head_dim + shape.value_dim


def kv_token_bytes(shape: ModelShape, kv: str, dtype: str) -> int:
    """Bytes of the keys and values of a stored token, in all layers with full attention."""
    return len(shape.full_layers) * shape.kv_heads * pair_bytes(shape, kv, dtype)


@lru_cache(maxsize=256)
def store_bytes(shape: ModelShape, tokens: int, kv: str, dtype: str, chunk: int = 512) -> int:
    """A store on disk, prefilled in such chunks: the arrays of its layout, and their metadata."""
    manifest = Manifest(
        model_id="", model_config_hash="", weights_hash="", tokenizer_hash="", token_hash="", rope={},
        dtype=dtype, shape=shape, n_tokens=tokens, prefill={"method": "dense", "chunk": chunk},
        query_samples=1024, kv=stored_types(kv, dtype, shape), seam=tokens // chunk * chunk,
    )  # fmt: skip
    total = 0
    for spec in array_specs(replace(manifest, marks=marks_for(manifest)), 1, 64):
        files = prod(-(-size // step) for size, step in zip(spec.shape, spec.chunk, strict=True))
        total += spec.chunk_bytes * files + _ZARR_JSON + _SUM_LINE * (files + 1)
    return total


def index_key_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Of one layer, the keys that a model's own index is searched by, which are held on the device."""
    return 0 if shape.index is None else tokens * shape.index.dim * itemsize(dtype)


def page_bytes(shape: ModelShape, tokens: int, page_size: int, metadata: str, layers: int) -> int:
    """Bounds of the whole pages of so many layers, on the device."""
    return layers * bounds_bytes(shape.kv_heads, tokens // page_size, shape.head_dim, metadata)


def index_costs(
    kind: str, shape: ModelShape, tokens: int, kv: str, dtype: str, k: int = 1, rows: int = 1
) -> Costs:
    """What the indexes of one layer take, and what a search of them for the `k` tokens of each of `rows`
    queries of a KV head reads, as the kind itself states it.
    """
    stored = stored_types(kv, dtype, shape)["keys"]
    keys = numpy_dtype(dtype) if stored == dtype else encodings.row_dtype(stored, shape.head_dim)
    one = registry.stated(kind).costs(tokens, shape.head_dim, keys, k, rows)
    return Costs(*(shape.kv_heads * size for size in (one.memory, one.file, one.read)))


@lru_cache(maxsize=1)
def least_index() -> str:
    """The built-in kind that takes least beside the store."""

    def size(kind: str) -> int:
        costs = registry.stated(kind).costs(1 << 20, 128, np.dtype(np.float16), 1)
        return costs.memory + costs.file

    return min(registry.BUILT_IN, key=size)


def generated_bytes(shape: ModelShape, tokens: int, dtype: str) -> int:
    """Keys and values of what follows the stored tokens, on the device, with the room they grow into."""
    item, room = itemsize(dtype), room_for(tokens)
    rows = [(item * _row_numbers(own), own.window or 0) for own in shape.layers]
    held = sum(row * (room + window) for row, window in rows)
    # A window layer joins its window and its generated KV anew at every step, one layer at a time.
    return held + max((row * (tokens + window) for row, window in rows if window), default=0)


def _row_numbers(layer: LayerShape) -> int:
    return layer.kv_heads * (layer.key_dim if layer.latent else layer.key_dim + layer.value_dim)


def states_bytes(shape: ModelShape, sequences: int) -> int:
    """Recurrent states: the stored ones, and three of each sequence (now, before the pass, at the turn)."""
    one = sum(prod(own.shape) * itemsize(own.dtype) for layer in shape.layers for own in layer.states)
    return (1 + 3 * sequences) * one


def layer_bytes(estimate: SizeEstimate, rows: int) -> int:
    """Activations of the layer that is being run for `rows` tokens, and the logits of one."""
    shape, item = estimate.shape, 4  # attention and its merge are float32
    hidden = rows * (6 * estimate.hidden + 3 * estimate.intermediate) * itemsize(estimate.dtype)
    attention = rows * 4 * shape.query_heads * (shape.head_dim + shape.value_dim) * item
    return hidden + attention + 2 * estimate.vocabulary * item


def mask_bytes(rows: int, keys: int) -> int:
    """The mask of a pass: as bits in bytes, two of them while it is made, and what attention widens."""
    return 3 * rows * keys + 2 * 4 * min(rows * keys, max(dense.SCORES, keys))


TOKENIZING_BYTES = 180
"""Memory that a tokenizer takes for a character of a document: measured on five million of them."""
CHARACTERS = 4
"""Of a token, in English text and most vocabularies."""
CPU_CHUNK = 512
"""Tokens of a forward chunk on a CPU."""
CARD_CHUNKS = tuple(CPU_CHUNK << more for more in range(6, -1, -1))
"""Tokens of a forward chunk on a card: the first of these that fits."""


def largest_chunk(estimate: SizeEstimate, room: int, tokens: int, kv: str = "auto") -> int:
    """The largest of `CARD_CHUNKS` that `room` bytes of a card hold beside the weights; else the smallest."""
    fitting = (c for c in CARD_CHUNKS if prefill_bytes(estimate, c, tokens, True, kv) <= room)
    return next(fitting, CARD_CHUNKS[-1])


def prefill_bytes(estimate: SizeEstimate, chunk: int, tokens: int, on_gpu: bool, kv: str = "auto") -> int:
    """Beyond the weights, on the device: a forward chunk with its keys and values, and of those before it a
    block, or on a card the blocks that come while others are attended to.
    """
    shape, item = estimate.shape, itemsize(estimate.dtype)
    block = min(placement.BLOCK_TOKENS if on_gpu else BLOCK_TOKENS, tokens)
    numbers = block * shape.kv_heads * pair_dim(shape)
    read = numbers * (item + 4)
    if on_gpu:
        stored = block * shape.kv_heads * pair_bytes(shape, kv, estimate.dtype)
        plain = stored_types(kv, estimate.dtype, shape) == stored_types("auto", estimate.dtype, shape)
        read = placement.AHEAD * stored + (0 if plain else read)
    # Fused kernels keep no scores; the reference, which runs where a card has none, has four such tensors.
    keys = shape.query_heads * max(block, chunk)
    scores = 4 * 4 * min(chunk * keys, max(dense.DEVICE_SCORES, keys)) if on_gpu else 0
    masked = any(own.kind is LayerKind.CHUNKED for own in shape.layers)
    scores += mask_bytes(chunk if masked else min(chunk, dense.PLACED_ROWS), chunk)
    return layer_bytes(estimate, chunk) + generated_bytes(shape, chunk, estimate.dtype) + read + scores


def staging_bytes(estimate: SizeEstimate, chunk: int, tokens: int, on_gpu: bool, kv: str = "auto") -> int:
    """In memory, a chunk's keys and values on their way to the disk: the copies that the host makes of all of
    it, or of a layer with those that wait behind a card; and there what is on its way to the card.
    """
    shape, item = estimate.shape, itemsize(estimate.dtype)
    numbers = [_row_numbers(own) for own in shape.layers]
    if not on_gpu:
        return 3 * chunk * sum(numbers) * item
    leaving = (placement.QUEUED + 3) * chunk * max(numbers) * item
    block = min(placement.BLOCK_TOKENS, tokens) * shape.kv_heads * max(row_bytes(shape, kv, estimate.dtype))
    return leaving + 2 * placement.AHEAD * power_of_two(block)
