"""Small prefill jobs with random keys and values, and what their stores must hold."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.store import KVStore, files
from offload_decode.store.format import Manifest, stored_types, token_hash
from offload_decode.store.growth import Growth
from offload_decode.store.staging import partial_path
from offload_decode.store.writer import KVStoreWriter
from offload_decode.types import Document, LayerKind, LayerShape, ModelShape

FULL, SLIDING = LayerKind.FULL, LayerKind.SLIDING
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Job:
    """What a prefill hands to the writer: `keys [L, Hkv, N, D]`, `values [L, Hkv, N, Dv]` (lists where the
    layers differ) and `queries [L, H, N, D]`.
    """

    manifest: Manifest
    tokens: Array
    documents: tuple[Document, ...]
    keys: Any
    values: Any
    queries: Array
    chunk: int = 100

    def open(self, path: Path, growth: Growth | None = None) -> KVStoreWriter:
        return KVStoreWriter.open(path, self.manifest, self.tokens, self.documents, growth)

    def feed(self, writer: KVStoreWriter, sizes: Iterable[int] = (), until: int | None = None) -> None:
        """Append and commit chunks of `sizes`, then of `chunk` tokens, from where the writer stands."""
        total = self.manifest.n_tokens if until is None else until
        for size in chain(sizes, repeat(self.chunk)):
            start, stop = writer.done, min(writer.done + size, total)
            if start == total:
                return
            for layer in range(len(self.manifest.shape.layers)):
                self.append(writer, layer, start, stop)
            writer.commit(stop)

    def append(self, writer: KVStoreWriter, layer: int, start: int, stop: int) -> None:
        shape, own = self.manifest.shape, self.manifest.shape.layers[layer]
        if own.kind is not LayerKind.NONE:
            writer.append(layer, self.keys[layer][:, start:stop], self.values[layer][:, start:stop])
        if own.states:
            writer.put_states(layer, self.states(layer, stop))
        if own.kind is FULL:
            slots, positions, heads = writer.samples(start, stop)
            grouped = self.queries[layer].reshape(shape.kv_heads, shape.group, -1, shape.head_dim)
            writer.put_queries(layer, slots, grouped[:, heads, positions])

    def states(self, layer: int, tokens: int) -> list[Array]:
        """Those of a recurrent layer after so many tokens."""
        rng = np.random.default_rng(1000 * layer + tokens)
        shapes = self.manifest.shape.layers[layer].states
        return [rng.standard_normal(own.shape).astype(own.dtype) for own in shapes]

    def write(self, path: Path, sizes: Iterable[int] = (), growth: Growth | None = None) -> Path:
        with self.open(path, growth) as writer:
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
    half = n_tokens // 2
    documents = (Document("a.txt", 0, half), Document("b/ü.md", half, n_tokens))

    def drawn(*sizes: int) -> Array:
        return rng.standard_normal(sizes).astype(manifest.numpy_dtype)

    keys = [drawn(own.kv_heads, n_tokens, own.key_dim) for own in shape.layers]
    values = [
        rows if own.latent else drawn(own.kv_heads, n_tokens, own.value_dim)
        for own, rows in zip(shape.layers, keys, strict=True)
    ]
    keys, values = (
        np.stack(rows) if len({own.shape for own in rows}) == 1 else rows for rows in (keys, values)
    )
    queries = drawn(len(shape.layers), shape.query_heads, n_tokens, shape.head_dim)
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


def seal(store: Path, sums: bytes) -> None:
    """Make this the store's list of checksums, with a seal that fits."""
    (store / files.SUMS).write_bytes(sums)
    (store / files.SEAL).write_bytes(files.seal_of(sums))


def read_all(path: Path) -> None:
    """Everything that the store at `path` gives without a model."""
    store = KVStore.open(path)
    _ = store.tokens, store.documents, store.query_positions, store.query_heads
    _ = store.cost(), store.manifest.to_json()
    for layer, own in enumerate(store.manifest.shape.layers):
        if own.local:
            store.window(layer)
        store.states(layer), store.kept_at(layer, store.manifest.seam or 0)
        for head in range(own.kv_heads if own.kind is FULL else 0):
            rows = store.keys(layer, head), store.values(layer, head), store.queries(layer, head)
            for part in (*rows, store.key_norms(layer, head), *store.pages(layer, head)):
                np.array(part[-1:])
            store.digest(layer, head)
        store.check_mapped(layer)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under `root` with its bytes."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}
