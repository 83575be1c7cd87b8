"""How long a dense prefill takes: arithmetic on a model's outline and on rates, measured or assumed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from offload_decode.attention.dense import attend_dense
from offload_decode.attention.rows import numpy_view
from offload_decode.common.errors import StoreError
from offload_decode.hf.compat import DTYPES
from offload_decode.models.size_estimate import Outline
from offload_decode.planning import sizes
from offload_decode.planning.plan import Plan, card_room
from offload_decode.planning.sizes import Workload, pair_bytes
from offload_decode.planning.speed import COPIED, bus_rate, seconds
from offload_decode.store.format import Manifest, stored_types, token_hash
from offload_decode.store.layout import array_specs
from offload_decode.store.streams import Encoder, RowStream, allocate, kind_of, no_errors
from offload_decode.types import LayerKind, LayerShape, ModelShape


@dataclass(frozen=True)
class Rates:
    """What a machine does a second in a prefill. `matmul`, `attention`: floating-point operations, of a
    model's linear layers and of attention to keys in the model's dtype. `write`: stored bytes of keys and
    values, from what a layer has of them to the disk. On a card also `fill`: bytes from the store to pinned
    memory, and `bus`: from there to the card.
    """

    matmul: float
    attention: float
    write: float
    fill: float | None = None
    bus: float | None = None


@dataclass(frozen=True)
class PrefillTime:
    """A prefill in seconds: in all, and by what is done, which on a card is done beside each other, so that
    each chunk takes as long as what takes longest. `operations`: floating-point, in all. `kept`: tokens that
    stay on the card; `bus`: bytes that go there.
    """

    seconds: float
    parts: dict[str, float]
    operations: float
    kept: int = 0
    bus: int = 0

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def expected_prefill(planned: Plan, rates: Rates) -> PrefillTime:
    """Of a plan's request, where every chunk attends to everything before it."""
    outline, request, gpu = planned.outline, planned.request, planned.machine.gpu
    kept = 0
    if gpu is not None:
        room = card_room(outline, request, gpu)
        kept = sizes.kept_tokens(outline, request.chunk, request.tokens, room, request.kv)
    return prefill_time(outline, request, rates, kept, on_card=gpu is not None)


def prefill_time(outline: Outline, request: Workload, rates: Rates, kept: int, on_card: bool) -> PrefillTime:
    """`kept` tokens stay on the card."""
    token = sizes.kv_token_bytes(outline.shape, request.kv, outline.dtype)
    linear = 2 * _read_by_a_token(outline)
    # Streamed weights come for every chunk, from pinned memory.
    weights = outline.layered * sizes.itemsize(outline.dtype) if request.streamed else 0
    bus = rates.bus or float("inf")
    both = min(bus, rates.fill or float("inf"))
    parts = dict.fromkeys(("matrix products", "attention", "writing", *(("bus",) if on_card else ())), 0.0)
    seconds, operations, moved = 0.0, 0.0, 0
    for start in range(0, request.tokens, request.chunk):
        rows = min(request.chunk, request.tokens - start)
        attended = _attention(outline, rows, start)
        coming = token * max(0, start - kept)
        own = {
            "matrix products": rows * linear / rates.matmul,
            "attention": attended / rates.attention,
            "writing": rows * token / rates.write,
        }
        if on_card:
            own["bus"] = coming / both + weights / bus
            moved += coming + weights
            computed = own["matrix products"] + own["attention"]
            seconds += max(computed, own["writing"], own["bus"])
        else:
            seconds += sum(own.values())
        for name, took in own.items():
            parts[name] += took
        operations += rows * linear + attended
    return PrefillTime(seconds, parts, operations, kept, moved)


def _read_by_a_token(outline: Outline) -> float:
    """The weights that a token is multiplied with: no table of embeddings, no output layer (a prefill makes
    no logits), and of the experts those that it is sent to.
    """
    table = outline.vocabulary * outline.hidden
    return outline.parameters - table - outline.output - outline.experts * (1 - outline.active)


def _attention(outline: Outline, rows: int, start: int) -> float:
    """Floating-point operations of a chunk's attention to itself and to what came before it."""
    total = 0.0
    for own in outline.shape.layers:
        most = start + rows if own.window is None else own.window
        fewer = max(0, min(rows, most - start))  # rows that see all up to themselves
        seen = fewer * start + fewer * (fewer + 1) / 2 + (rows - fewer) * most
        total += 2 * seen * outline.shape.query_heads * (own.key_dim + own.value_dim)
    return total


# What this machine does a second in a prefill, measured on the spot by the functions that run.

_WRITTEN = 8 << 20  # of keys and values
# Rows and widths that are measured on a CPU in some tens of milliseconds, and that keep a card busy.
_ROWS, _WIDTH, _KEYS = 256, 2048, 2048
_CARD_ROWS, _CARD_KEYS = 4096, 8192


@lru_cache(maxsize=8)
def measure_prefill(outline: Outline, request: Workload, device: str, folder: Path) -> Rates:
    """Rates for a model of that outline on `device`, written to `folder`'s disk. Raises `StoreError` where
    that cannot be written.
    """
    place = torch.device(device)
    with torch.inference_mode():
        given = outline, place
        rates = _matmul(*given), _attention_rate(*given, request.kv), _write(outline, request, folder)
        if place.type != "cuda":
            return Rates(*rates)
        return Rates(*rates, _fill(), bus_rate(place))


def _matmul(outline: Outline, device: torch.device) -> float:
    """Operations a second of a linear layer."""
    on_card = device.type == "cuda"
    rows = _CARD_ROWS if on_card else _ROWS
    into, out = (width if on_card else min(width, _WIDTH) for width in (outline.hidden, outline.intermediate))
    x = torch.ones(rows, into, dtype=DTYPES[outline.dtype], device=device)
    weight = torch.ones(out, into, dtype=x.dtype, device=device)
    return 2 * rows * into * out / seconds(lambda: torch.nn.functional.linear(x, weight), device)


def _attention_rate(outline: Outline, device: torch.device, kv: str) -> float:
    """Operations a second of attention to earlier keys: of one KV head on a CPU, of all on a card. What is
    stored in another dtype than the model's is attended to in float32 on a CPU.
    """
    shape, on_card = outline.shape, device.type == "cuda"
    heads = shape.kv_heads if on_card else 1
    rows, keys = (_CARD_ROWS, _CARD_KEYS) if on_card else (_ROWS, _KEYS)
    sizes = (
        (heads * shape.group, rows, shape.head_dim),
        (heads, keys, shape.head_dim),
        (heads, keys, shape.value_dim),
    )
    plain = set(stored_types(kv, outline.dtype, shape).values()) == {outline.dtype}
    dtype = DTYPES[outline.dtype] if on_card or plain else torch.float32
    query, key, value = (
        torch.randn(1, *size, generator=torch.Generator().manual_seed(0)).to(device, dtype) for size in sizes
    )
    took = seconds(lambda: attend_dense(query, key, value, shape.head_dim**-0.5), device)
    return 2 * len(query[0]) * rows * keys * (shape.head_dim + shape.value_dim) / took


def _write(outline: Outline, request: Workload, folder: Path) -> float:
    """Bytes a second of a layer's keys and values that a store is given, as it keeps them.

    Into the files of its rows alone: to describe them, a whole store would import zarr for half a second.
    """
    full, dtype = outline.shape, outline.dtype
    layer = LayerShape(LayerKind.FULL, full.kv_heads, full.head_dim, full.value_dim, latent=full.latent)
    shape = ModelShape((layer,), full.query_heads)
    stored = full.kv_heads * pair_bytes(full, request.kv, dtype)
    rows = max(1, min(request.tokens, request.chunk, _WRITTEN // stored))
    tokens = np.zeros(2 * rows, np.int32)
    manifest = Manifest(
        model_id="", model_config_hash="", weights_hash="", tokenizer_hash="", rope={}, dtype=dtype,
        shape=shape,
        n_tokens=len(tokens), token_hash=token_hash(tokens), prefill={"method": "dense"}, query_samples=1,
        kv=stored_types(request.kv, dtype, shape),
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    keys, values = (
        numpy_view(torch.randn(full.kv_heads, rows, dim, generator=drawn).to(DTYPES[dtype]))
        for dim in (full.head_dim, full.value_dim)
    )
    given = {"keys": keys} | ({} if full.latent else {"values": values})
    encoder = Encoder(manifest, no_errors(manifest))
    try:
        with TemporaryDirectory(dir=folder) as inside:
            specs = {kind_of(spec): spec for spec in array_specs(manifest, 0, 0)}
            for kind in given:
                allocate(Path(inside), specs[kind])
            streams = {kind: RowStream(Path(inside), specs[kind]) for kind in given}
            for _ in range(2):  # what is compiled is compiled at first
                began = perf_counter()
                for kind, block in given.items():
                    written = encoder.block(0, kind, block).written
                    streams[kind].write(written)
                    streams[kind].advance(written)
            return rows * stored / (perf_counter() - began)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written ({os.strerror(error.errno or 0)})") from error


def _fill() -> float:
    """Bytes a second from memory to pinned memory."""
    source = torch.ones(COPIED, dtype=torch.uint8)
    pinned = torch.empty(COPIED, dtype=torch.uint8, pin_memory=True)
    return COPIED / seconds(lambda: pinned.copy_(source))
