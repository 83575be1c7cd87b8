"""`Store`: what decoding reads of a store, wherever it lies; and a range of one."""

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from offload_decode.common.errors import ConfigError
from offload_decode.store.format import Array, Manifest


class Store(Protocol):
    """Implemented by `KVStore`, on disk, which says what each of these is, and `MemoryStore`, over arrays.
    Arrays are read-only; all but `window` and `states` are of full-attention layers alone. `path`: its name,
    beside which indexes lie.
    """

    @property
    def manifest(self) -> Manifest: ...
    @property
    def path(self) -> Path: ...
    @property
    def query_positions(self) -> Array: ...
    @property
    def query_heads(self) -> Array: ...
    @property
    def store_digest(self) -> str: ...
    def keys(self, layer: int, kv_head: int) -> Array: ...
    def values(self, layer: int, kv_head: int) -> Array: ...
    def key_norms(self, layer: int, kv_head: int) -> Array: ...
    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]: ...
    def queries(self, layer: int, kv_head: int) -> Array: ...
    def window(self, layer: int) -> tuple[Array, Array]: ...
    def states(self, layer: int) -> tuple[Array, ...]: ...
    def digest(self, layer: int, kv_head: int) -> str: ...
    def check_mapped(self, layer: int) -> None: ...


def ranges(n_tokens: int, parts: int, page_size: int) -> list[tuple[int, int]]:
    """Tokens `start:end` of each part: whole pages, about as many in each, and at least one."""
    pages = -(-n_tokens // page_size)
    parts = max(1, min(parts, pages))
    ends = [min(n_tokens, pages * number // parts * page_size) for number in range(parts + 1)]
    return list(pairwise(ends))


class StoreRange:
    """Implements `Store` by views of the tokens `start:end` of another, for one of several machines. `start`
    begins a page. The sampled queries, windows and states are those of the whole store, whose indexes do not
    apply.
    """

    def __init__(self, whole: Store, start: int, end: int) -> None:
        own = whole.manifest
        if not 0 <= start < end <= own.n_tokens or start % own.page_size:
            raise ConfigError(
                f"tokens {start:,} to {end:,} are no part of {whole.path}, which has {own.n_tokens:,} in "
                f"pages of {own.page_size}: begin with a page"
            )
        self.whole = whole
        self.tokens = slice(start, end)
        self.path = Path(f"{whole.path}.tokens-{start}-{end}")
        self.manifest = replace(own, n_tokens=end - start)
        self._pages = slice(start // own.page_size, -(-end // own.page_size))
        self.queries, self.window, self.states = whole.queries, whole.window, whole.states
        self.check_mapped = whole.check_mapped

    @property
    def query_positions(self) -> Array:
        return self.whole.query_positions

    @property
    def query_heads(self) -> Array:
        return self.whole.query_heads

    @property
    def store_digest(self) -> str:
        return self._named(self.whole.store_digest)

    def keys(self, layer: int, kv_head: int) -> Array:
        return self.whole.keys(layer, kv_head)[self.tokens]

    def values(self, layer: int, kv_head: int) -> Array:
        return self.whole.values(layer, kv_head)[self.tokens]

    def key_norms(self, layer: int, kv_head: int) -> Array:
        return self.whole.key_norms(layer, kv_head)[self.tokens]

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        lowest, highest = self.whole.pages(layer, kv_head)  # the last may be wider than its tokens
        return lowest[self._pages], highest[self._pages]

    def digest(self, layer: int, kv_head: int) -> str:
        return self._named(self.whole.digest(layer, kv_head))

    def _named(self, digest: str) -> str:
        return hashlib.sha256(f"{digest}:{self.tokens.start}:{self.tokens.stop}".encode()).hexdigest()
