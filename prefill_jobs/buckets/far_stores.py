"""The stores of a collection in a bucket, as whichever machine asks them keeps them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from offload_decode.prefill_jobs.buckets.bucket import Bucket
from offload_decode.prefill_jobs.buckets.cache import Cache, name_of, user_cache
from offload_decode.prefill_jobs.buckets.pull import pull
from offload_decode.prefill_jobs.buckets.transfer import Progress


def cache_of(limit: int, patience: float = 0.0) -> Cache:
    """What was fetched to this machine; see `Cache`."""
    return Cache(user_cache() / "fetched", limit, patience)


@dataclass(frozen=True)
class FarStores:
    """`url`: that of the collection. `header`: what its collection.json says. `limit`: most bytes of what a
    machine keeps.
    """

    url: str
    header: str
    limit: int

    def check(self) -> None:
        """Raise `BucketError` or `ConfigError` where this machine cannot fetch any."""
        Bucket(self.url)

    def name(self, store: str) -> str:
        """What a store, by its URL, is called in the cache."""
        return name_of(self._key(store))

    @property
    def folder(self) -> Path:
        """Where this machine keeps them."""
        return cache_of(self.limit).folder

    def here(self) -> frozenset[str]:
        """The names of what this machine has of any collection."""
        return cache_of(self.limit).names()

    def held(
        self, store: str, fetching: Callable[[], AbstractContextManager[Progress]], patience: float = 0.0
    ) -> AbstractContextManager[Path]:
        """Where a store, by its URL, lies while it is asked: fetched first, inside `fetching`, if it is not
        here. Raises `DoesNotFit`, and what `pull` does.
        """

        def fill(path: Path, admit: Callable[[int], None]) -> None:
            with fetching() as progress:
                pull(store, path, progress=progress, admit=admit)

        return cache_of(self.limit, patience).holding(self._key(store), fill)

    def _key(self, store: str) -> str:
        # The URL stands for the document's bytes, and the rest for what a prefill makes of them.
        return f"{store} {self.header}"
