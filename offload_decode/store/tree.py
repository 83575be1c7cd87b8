"""Which stores begin as which (`Manifest.base`): told, and not needed, as each holds all of its files."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from offload_decode.common.errors import StoreError, StoreNotFound
from offload_decode.store.layout import read_header
from offload_decode.store.reader import KVStore

AS_IT_WAS, CHANGED, GONE, UNREADABLE = "as it was", "changed since", "gone", "cannot be read"


class Base(NamedTuple):
    """A store that another one begins as, the `tokens` that both have, and whether it is still there."""

    path: str
    tokens: int
    now: str


def bases_of(store: KVStore) -> Iterator[Base]:
    """The store that this one begins as, the one which that begins as, and so on while they are unchanged."""
    found: KVStore | None = store
    both = store.manifest.n_tokens  # a renewal may leave a store less of its base than that has of its own
    while found and (base := found.manifest.base):
        path = os.path.normpath(Path(os.path.realpath(found.path)).parent / base["store"])
        found, now = None, AS_IT_WAS
        try:
            found = KVStore.open(path)
            if found.store_digest != base["digest"]:
                found, now = None, CHANGED
        except StoreNotFound:
            now = GONE
        except (StoreError, OSError):  # of another user, or a name that no file has
            now = UNREADABLE
        both = min(both, base["tokens"])
        yield Base(path, both, now)


def begun_as(store: KVStore) -> list[str]:
    """The names of the stores in the folder of this one that begin as it."""
    found = []
    for name in sorted(os.listdir(store.path.parent)):
        try:
            base = (read_header(store.path.parent / name) or {}).get("base")
        except (StoreError, OSError):  # it is no store of ours to tell of
            continue
        if isinstance(base, dict) and base.get("digest") == store.store_digest:
            found.append(name)
    return found
