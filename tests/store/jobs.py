"""Small prefill jobs with random keys and values, and what their stores must hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.store.format import Manifest, stored_types, token_hash
from offload_decode.store.staging import partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, LayerShape, ModelShape

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Job:
    """What a prefill hands to the writer: `keys [L, Hkv, N, D]`, `values [L, Hkv, N, Dv]` and
    `queries [L, H, N, D]`.
    """

    manifest: Manifest
    tokens: Array
    documents: tuple[Document, ...]
    keys: Array
    values: Array
    queries: Array

    def open(self, path: Path) -> KVStoreWriter:
        return KVStoreWriter.open(path, self.manifest, self.tokens, self.documents)

    def feed(self, writer: KVStoreWriter, sizes: Iterable[int] = (), until: int | None = None) -> None:
        """Append and commit chunks of `sizes`, then of 100 tokens, from where the writer stands."""
        total = self.manifest.n_tokens if until is None else until
        for size in chain(sizes, repeat(100)):
            start, stop = writer.done, min(writer.done + size, total)
            if start == total:
                return
            for layer in range(len(self.manifest.shape.layers)):
                self.append(writer, layer, start, stop)
            writer.commit(stop)

    def append(self, writer: KVStoreWriter, layer: int, start: int, stop: int) -> None:
        shape = self.manifest.shape
        writer.append(layer, self.keys[layer, :, start:stop], self.values[layer, :, start:stop])
        if shape.layers[layer].kind is FULL:
            slots, positions, heads = writer.samples(start, stop)
            grouped = self.queries[layer].reshape(shape.kv_heads, shape.group, -1, shape.head_dim)
            writer.put_queries(layer, slots, grouped[:, heads, positions])

    def write(self, path: Path, sizes: Iterable[int] = ()) -> Path:
        with self.open(path) as writer:
            self.feed(writer, sizes)
            writer.publish()
        return path


def make_job(
    n_tokens: int = 1300,
    dtype: str = "float16",
    layers: tuple[LayerKind, ...] = (FULL, SLIDING, FULL),
    window: int = 33,
    query_samples: int = 24,
    seed: int = 0,
    kv: str = "auto",
    shape: ModelShape | None = None,
    **fields: Any,
) -> Job:
    rng = np.random.default_rng(seed)
    if shape is None:
        shape = ModelShape(
            tuple(LayerShape(kind, 2, 64, 32, window if kind is SLIDING else None) for kind in layers), 4
        )
    tokens = rng.integers(0, 50_000, n_tokens, dtype=np.int32)
    manifest = Manifest(
        model_id="test/model",
        model_config_hash="c0ffee",
        weights_hash="beef",
        tokenizer_hash="decade",
        dtype=dtype,
        shape=shape,
        rope={"rope_theta": 10_000.0, "rope_type": "default"},
        n_tokens=n_tokens,
        token_hash=token_hash(tokens),
        prefill={"method": "dense", "chunk": 512},
        query_samples=query_samples,
        kv=stored_types(kv, dtype, shape),
        **fields,
    )
    half, widths = n_tokens // 2, (shape.head_dim, shape.value_dim)
    documents = (Document("a.txt", 0, half), Document("b/ü.md", half, n_tokens))
    keys, values = (
        rng.standard_normal((len(layers), 2, n_tokens, dim)).astype(manifest.numpy_dtype) for dim in widths
    )
    queries = rng.standard_normal((len(layers), 4, n_tokens, 64)).astype(manifest.numpy_dtype)
    return Job(manifest, tokens, documents, keys, values, queries)


@contextmanager
def flipped(file: Path, bit: int) -> Iterator[None]:
    """Inside, one bit of the file is another."""
    data = file.read_bytes()
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    yield
    file.write_bytes(data)


def begun(job: Job, path: Path, tokens: int = 333) -> Path:
    """The staging folder of a store that was written up to so many tokens."""
    with job.open(path) as writer:
        job.feed(writer, until=tokens)
    return partial_path(path)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` with its bytes."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
