"""What this machine moves a second, measured on the spot in well under a second by the very code that moves
it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from pathlib import Path

import numpy as np
import torch

from indexes.flat import FlatIndex
from indexes.rows import encodings
from offload_decode.kernels.dense import attend_dense
from offload_decode.kernels.rows import Rows, numpy_view
from offload_decode.kv.host import BLOCK_TOKENS
from offload_decode.models.loading import DTYPES
from offload_decode.planning.sizes import row_bytes
from offload_decode.types import ModelShape

_BYTES = 96 << 20  # beyond a processor's caches
_DISK_BYTES = 64 << 20
_SECONDS = 0.04  # a measurement is repeated for so long, and the best counts


@dataclass(frozen=True)
class Bandwidths:
    """Bytes a second. `weights`: a model's weights in one token's forward pass, on the device. `scan`: keys
    that are scored one after another, on all cores. `gather`: rows fetched from random places, one core.
    `attend`: keys and values attended to densely. `bus`: pinned memory to the GPU; None without one.
    """

    weights: float
    scan: float
    gather: float
    attend: float
    bus: float | None


@lru_cache(maxsize=8)
def measure(shape: ModelShape, dtype: str, kv: str, device: str) -> Bandwidths:
    """Measured with keys of the model's shape, stored as `kv` says."""
    with torch.inference_mode():
        return Bandwidths(
            weights=_weights(dtype, torch.device(device)),
            scan=_scan(shape, dtype, kv),
            gather=_gather(shape, dtype, kv),
            attend=_attend(shape, dtype),
            bus=_bus(torch.device(device)) if device.startswith("cuda") else None,
        )


def measure_disk(folder: Path) -> float | None:
    """Bytes a second read from the disk of `folder`; None where that cannot be measured."""
    if not hasattr(os, "posix_fadvise") or not os.access(folder, os.W_OK):
        return None
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(os.urandom(1 << 20) * (_DISK_BYTES >> 20))
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = time.perf_counter()
            while file.read(1 << 20):
                pass
            return _DISK_BYTES / (time.perf_counter() - began)
    except OSError:  # a full disk: its speed is not what stands in the way
        return None


def _weights(dtype: str, device: torch.device) -> float:
    width = 2048
    weight = torch.zeros(_BYTES // width // DTYPES[dtype].itemsize, width, dtype=DTYPES[dtype], device=device)
    row = torch.zeros(1, width, dtype=DTYPES[dtype], device=device)
    return _rate(weight.nbytes, lambda: torch.nn.functional.linear(row, weight), device)


def _scan(shape: ModelShape, dtype: str, kv: str) -> float:
    cores = os.cpu_count() or 1
    rows = _rows(shape, dtype, kv, 0)
    keys = np.split(rows[: len(rows) // cores * cores], cores)
    queries = np.ones((shape.group, shape.head_dim), np.float32)
    searched = [FlatIndex(own, "") for own in keys]
    with ThreadPoolExecutor(cores) as pool:
        return _rate(
            sum(own.nbytes for own in keys), lambda: list(pool.map(lambda i: i.search(queries, 64), searched))
        )


def _gather(shape: ModelShape, dtype: str, kv: str) -> float:
    rows = Rows(_rows(shape, dtype, kv, 1))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    starts = range(0, len(rows) - 4096, 4096)
    drawn = cycle([order[i : i + 4096].sort().values for i in starts])  # cold rows at every turn
    return _rate(4096 * rows.row_bytes, lambda: rows.read(next(drawn), torch.device("cpu")))


def _attend(shape: ModelShape, dtype: str) -> float:
    tokens = _BYTES // 2 // row_bytes("auto", shape.head_dim, dtype)[0] // BLOCK_TOKENS * BLOCK_TOKENS
    query = torch.ones(1, shape.group, 1, shape.head_dim)
    rows = torch.ones(2, 1, 1, tokens, shape.head_dim, dtype=DTYPES[dtype])
    starts = range(0, tokens, BLOCK_TOKENS)
    keys, values = (cycle([side[..., i : i + BLOCK_TOKENS, :] for i in starts]) for side in rows)
    size = 2 * BLOCK_TOKENS * row_bytes("auto", shape.head_dim, dtype)[0]
    return _rate(size, lambda: attend_dense(query, next(keys), next(values), 1.0))


def _bus(device: torch.device) -> float:
    host = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    return _rate(_BYTES, lambda: target.copy_(host, non_blocking=True), device)


def _rows(shape: ModelShape, dtype: str, kv: str, side: int) -> encodings.Rows:
    """Rows of one head, keys (0) or values (1), about `_BYTES` of them; ones, so that scores stay finite."""
    count = _BYTES // row_bytes(kv, shape.head_dim, dtype)[side]
    plain = numpy_view(torch.ones(1, shape.head_dim, dtype=DTYPES[dtype]))
    if kv != "auto":
        plain = encodings.encode(plain, encodings.INT4 if side and kv == "int4-values" else encodings.INT8)
    return np.repeat(plain, count, axis=0)


def _rate(size: int, move: Callable[[], object], device: torch.device | None = None) -> float:
    def timed() -> float:
        began = time.perf_counter()
        move()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    timed()
    best, until = timed(), time.perf_counter() + _SECONDS
    while time.perf_counter() < until:
        best = min(best, timed())
    return size / best
