"""A range of a store's tokens, as a store: what one of several machines attends to."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from offload_decode.errors import ConfigError
from offload_decode.store.base import Store
from offload_decode.store.format import Array


def ranges(n_tokens: int, parts: int, page_size: int) -> list[tuple[int, int]]:
    """Tokens `start:end` of each of so many parts, whole pages and about as many in each; of fewer parts
    where there are not so many pages.
    """
    pages = -(-n_tokens // page_size)
    parts = max(1, min(parts, pages))
    ends = [min(n_tokens, pages * number // parts * page_size) for number in range(parts + 1)]
    return list(pairwise(ends))


class PartOfStore:
    """Implements `offload_decode.store.base.Store` over the tokens `start:end` of another: views, of which
    nothing else is read. `start` begins a page. The sampled queries, windows and states are those of the
    whole store, and the indexes beside that are none of the part's.
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

    @property
    def query_positions(self) -> Array:
        """As of the whole store."""
        return self.whole.query_positions

    @property
    def query_heads(self) -> Array:
        """As of the whole store."""
        return self.whole.query_heads

    @property
    def store_digest(self) -> str:
        """Of the whole store and the range."""
        return self._named(self.whole.store_digest)

    def keys(self, layer: int, kv_head: int) -> Array:
        """Keys `[n, D]` of the part's tokens."""
        return self.whole.keys(layer, kv_head)[self.tokens]

    def values(self, layer: int, kv_head: int) -> Array:
        """Values `[n, Dv]` of the part's tokens."""
        return self.whole.values(layer, kv_head)[self.tokens]

    def key_norms(self, layer: int, kv_head: int) -> Array:
        """Lengths of the part's keys, float32 `[n]`."""
        return self.whole.key_norms(layer, kv_head)[self.tokens]

    def pages(self, layer: int, kv_head: int) -> tuple[Array, Array]:
        """Bounds of the part's pages. The last one's may be wider than its tokens, never narrower."""
        lowest, highest = self.whole.pages(layer, kv_head)
        return lowest[self._pages], highest[self._pages]

    def queries(self, layer: int, kv_head: int) -> Array:
        """As of the whole store."""
        return self.whole.queries(layer, kv_head)

    def window(self, layer: int) -> tuple[Array, Array]:
        """As of the whole store."""
        return self.whole.window(layer)

    def states(self, layer: int) -> tuple[Array, ...]:
        """As of the whole store."""
        return self.whole.states(layer)

    def digest(self, layer: int, kv_head: int) -> str:
        """Of the whole store's keys and the range."""
        return self._named(self.whole.digest(layer, kv_head))

    def check_mapped(self, layer: int) -> None:
        """StoreDamaged where a layer cannot be read any more."""
        self.whole.check_mapped(layer)

    def _named(self, digest: str) -> str:
        return hashlib.sha256(f"{digest}:{self.tokens.start}:{self.tokens.stop}".encode()).hexdigest()
