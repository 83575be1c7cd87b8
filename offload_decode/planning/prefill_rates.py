"""What this machine does a second in a prefill, measured on the spot by the functions that run."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np
import torch

from offload_decode.errors import StoreError
from offload_decode.kernels.dense import attend_dense
from offload_decode.kernels.rows import numpy_view
from offload_decode.models.devices import DTYPES
from offload_decode.models.outline import Outline
from offload_decode.planning.bandwidth import COPIED, bus_rate, seconds
from offload_decode.planning.prefill_time import Rates
from offload_decode.planning.request import Workload
from offload_decode.planning.sizes import pair_bytes
from offload_decode.store.encoded import Encoder, no_errors
from offload_decode.store.format import Manifest, stored_types, token_hash
from offload_decode.store.layout import array_specs
from offload_decode.store.streams import RowStream, allocate, kind_of
from offload_decode.types import LayerKind, LayerShape, ModelShape

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
        rates = _matmul(*given), _attention(*given, request.kv), _write(outline, request, folder)
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


def _attention(outline: Outline, device: torch.device, kv: str) -> float:
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
