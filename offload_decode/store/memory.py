"""Stores in memory, which answer as one on disk of the same arrays; and one of no tokens."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from offload_decode.common.errors import ConfigError
from offload_decode.common.rows.encodings import INT4, INT8, decode, dim, encoding_of, name_of
from offload_decode.store.format import DTYPES, Array, Manifest
from offload_decode.store.layout import row_norms, sample_plan
from offload_decode.store.pages import fold_pages, rounded_outward
from offload_decode.store.streams import as_bytes
from offload_decode.types import LayerKind, ModelShape

Layers = Sequence[Sequence[Array]] | Array


class MemoryStore:
    """Implements `offload_decode.store.base.Store` over arrays: its methods are those of `KVStore`; what a
    prefill derives is made at first use by the writer's functions. It has no tokens, documents and recurrent
    states, and no indexes lie beside it: `topk` searches all keys.

    keys, values: `keys[layer][head]` is `[N, D]` in float16, bfloat16 (`ml_dtypes`) or float32, or `[N]` as
    `common.rows.encodings` encode it, for every layer and KV head of `shape`: nested lists, or one array
    `[layers, Hkv, N, D]`. Values have a width of their own; those of latents are their keys. Contiguous rows
    are not copied. Sliding layers are plain, and only their last window is read. queries:
    `queries[layer][head]` is `[n, D]`, those that `sample_plan(N, G, n)` asks for. dtype: the model's, where
    the keys are encoded.

    Raises `ConfigError` where the arrays do not fit the shape.
    """

    path = Path("in-memory.kv")

    def __init__(
        self,
        shape: ModelShape,
        keys: Layers,
        values: Layers,
        *,
        queries: Layers | None = None,
        page_size: int = 16,
        dtype: str = "float32",
    ) -> None:
        first = _first("keys", keys, shape), _first("values", values, shape)
        tokens, kv = len(first[0]), dict(zip(("keys", "values"), map(name_of, first), strict=True))
        dtype = dtype if encoding_of(first[0]) else kv["keys"]
        if dtype not in DTYPES or not {*kv.values()} <= {dtype, INT8, INT4}:
            raise ConfigError(
                f"keys are {kv['keys']} and values {kv['values']}: each must be encoded rows or in the "
                f"model's dtype, one of {', '.join(DTYPES)}"
            )
        for kind, layers in (("keys", keys), ("values", values)):
            for layer, own in enumerate(shape.layers):
                stored = kv[kind] if own.kind is LayerKind.FULL else dtype
                dim = own.key_dim if kind == "keys" else own.value_dim
                _check(kind, layer, layers, [((tokens, dim), stored)] * own.kv_heads)
        samples, most = 1, tokens * shape.group
        if queries is not None:
            samples = len(_first("queries", queries, shape))
            for layer in shape.full_layers:
                _check("queries", layer, queries, [((samples, shape.head_dim), dtype)] * shape.kv_heads)
        if not tokens or page_size < 1 or not 1 <= samples <= most:
            raise ConfigError(
                f"{tokens:,} tokens in pages of {page_size:,}, with {samples:,} queries of a KV head: a "
                "store has at least one of each, and at most one query for each token and query head"
            )
        manifest = Manifest(
            model_id="in memory",
            model_config_hash="",
            weights_hash="",
            tokenizer_hash="",
            dtype=dtype,
            shape=shape,
            rope={},
            n_tokens=tokens,
            token_hash="",
            prefill={"method": "in memory"},
            kv=kv,
            page_size=page_size,
            query_samples=samples,
        )
        self._hold(manifest, keys, values, queries)

    def _hold(self, manifest: Manifest, keys: Layers, values: Layers, queries: Layers | None) -> None:
        self.manifest = manifest
        self._keys, self._values, self._queries = keys, values, queries
        self._heads = {
            (layer, head): _Head(manifest, keys[layer][head], values[layer][head])
            for layer in manifest.shape.full_layers
            for head in range(manifest.shape.kv_heads)
        }

    @cached_property
    def query_positions(self) -> Array:
        """Token positions of the sampled queries, int64 `[n]`; `ConfigError` if none were given."""
        return _read_only(self._plan[0])

    @cached_property
    def query_heads(self) -> Array:
        """Which head of its group each is of, int64 `[n]`; `ConfigError` if none were given."""
        return _read_only(self._plan[1])

    @cached_property
    def store_digest(self) -> str:
        """SHA-256 of all keys and values, as they are stored."""
        whole = hashlib.sha256()
        for rows in (rows for head in self._heads.values() for rows in (head.keys, head.values)):
            whole.update(as_bytes(rows))
        return whole.hexdigest()

    def keys(self, layer: int, kv_head: int) -> Array:
        return self._heads[layer, kv_head].keys

    def values(self, layer: int, kv_head: int) -> Array:
        head = self._heads[layer, kv_head]
        return head.keys if self.manifest.shape.latent else head.values

    def key_norms(self, layer: int, kv_head: int) -> Array:
        return self._heads[layer, kv_head].key_norms

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        return self._heads[layer, kv_head].pages

    def queries(self, layer: int, kv_head: int) -> Array:
        """The queries `[n, D]` that were given; `ConfigError` if none were."""
        _ = self._heads[layer, kv_head]
        return _read_only(self._sampled()[layer][kv_head])

    def window(self, layer: int) -> tuple[Array, Array]:
        if not (own := self.manifest.shape.layers[layer]).local:
            raise KeyError(layer)
        keys, values = (
            np.stack([rows[-self.manifest.window(own) :] for rows in layers[layer]])
            for layers in (self._keys, self._values)
        )
        return keys, values

    def states(self, layer: int) -> tuple[Array, ...]:
        return ()

    def digest(self, layer: int, kv_head: int) -> str:
        return self._heads[layer, kv_head].digest

    def check_mapped(self, layer: int) -> None:
        """Nothing to check: memory does not shrink."""

    @cached_property
    def _plan(self) -> tuple[Array, Array]:
        self._sampled()
        own = self.manifest
        return sample_plan(own.n_tokens, own.shape.group, own.n_samples)

    def _sampled(self) -> Layers:
        if self._queries is None:
            raise ConfigError("this store was made without sampled queries: make it with queries=")
        return self._queries


class EmptyStore(MemoryStore):
    """A store of 0 tokens, as `manifest` states, for a conversation with the bare model."""

    path = Path("empty.kv")

    def __init__(self, manifest: Manifest) -> None:
        assert not manifest.n_tokens, "there is nothing to read"
        layers, dtype = manifest.shape.layers, manifest.numpy_dtype
        keys = [[np.zeros((0, own.key_dim), dtype)] * own.kv_heads for own in layers]
        values = [[np.zeros((0, own.value_dim), dtype)] * own.kv_heads for own in layers]
        self._hold(manifest, keys, values, queries=keys)
        self.query_positions = self.query_heads = np.zeros(0, np.int64)


class _Head:
    """One KV head of a full-attention layer."""

    def __init__(self, manifest: Manifest, keys: Array, values: Array) -> None:
        self._manifest, self._rows = manifest, (keys, values)

    # Copied at first use: what nobody reads may be a view of any size.
    @cached_property
    def keys(self) -> Array:
        return _read_only(self._rows[0])

    @cached_property
    def values(self) -> Array:
        return _read_only(self._rows[1])

    @cached_property
    def key_norms(self) -> Array:
        return _read_only(row_norms(self._numbers)[:, 0])

    @cached_property
    def pages(self) -> tuple[Array, Array]:
        own = self._manifest
        lower, upper, _ = fold_pages(None, 0, self._numbers[None], own.page_size, own.n_tokens)
        lower, upper = rounded_outward(lower[0], upper[0], own.numpy_dtype)
        return _read_only(lower), _read_only(upper)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(as_bytes(self.keys)).hexdigest()

    @property
    def _numbers(self) -> Array:
        """What the stored keys stand for: floats `[N, D]`."""
        return decode(self.keys) if encoding_of(self.keys) else self.keys


def _read_only(array: Array) -> Array:
    """A view of it; a copy where it is not contiguous."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _first(kind: str, layers: Layers, shape: ModelShape) -> Array:
    """The first head that is stored whole; ConfigError unless `layers` are those of the shape."""
    if not shape.full_layers:
        raise ConfigError("the shape has sliding layers alone: there is nothing to search")
    if len(layers) != len(shape.layers) or not len(layers[shape.full_layers[0]]):
        raise ConfigError(f"{kind} must be given for {len(shape.layers)} layers and their KV heads")
    head: Array = layers[shape.full_layers[0]][0]
    return head


def _check(kind: str, layer: int, layers: Layers, expected: list[tuple[tuple[int, ...], str]]) -> None:
    """ConfigError unless the heads of a layer are of the expected shapes `(rows, D)` and kinds."""
    found = [
        ((*own.shape, dim(own)) if encoding_of(own) else own.shape, name_of(own)) for own in layers[layer]
    ]
    if found != expected:
        raise ConfigError(f"the {kind} of layer {layer} are {found}, where {expected} would fit the others")
