"""The passages that a question attends to, in one store, in several, or in a collection."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from offload_decode.collections.collection import Collection, is_collection
from offload_decode.common.errors import ConfigError
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.indexes.verified import identity
from offload_decode.planning.caps import Caps
from offload_decode.planning.opening import Opener
from offload_decode.store.files import SEAL
from offload_decode.store.reader import KVStore
from offload_decode.types import Passage

OPEN = 16
"""Stores that are held open."""
PASSAGES = 4
DOCUMENTS = 3
"""Documents of a collection that are searched: as many as `ask` asks."""


class Source(NamedTuple):
    """A passage, and the store that it is from."""

    store: str
    passage: Passage

    @property
    def metadata(self) -> dict[str, Any]:
        """Where it is from, and its score: what frameworks keep beside a text."""
        one = self.passage
        where = {"store": self.store, "document": one.document, "start": one.start, "end": one.end}
        return {**where, "score": one.score}


class PassageSearch:
    """Finds up to `k` passages in stores and collections of one model, which is loaded with the first
    question. Of a collection, the `documents` whose words speak most for a question are searched. `settings`
    are those of `EngineConfig`. Several threads may search; they take turns.

    Raises `ConfigError` where there is no store, where the stores have several models, and for a number or a
    setting that cannot be; and what opening a store raises.
    """

    def __init__(
        self,
        stores: str | Path | Sequence[str | Path],
        k: int = PASSAGES,
        documents: int = DOCUMENTS,
        settings: Mapping[str, Any] | None = None,
    ):
        if k < 1 or documents < 1:
            raise ConfigError("k, and how many documents of a collection are searched, must be at least 1")
        given = [stores] if isinstance(stores, str | Path) else stores
        self._paths = list(dict.fromkeys(map(Path, given)))
        self._k, self._documents = k, documents
        opener = Opener(EngineConfig(crossover=True).changed(settings or {}), Caps())
        self._open = lru_cache(OPEN)(lambda path, seal: opener.open(path))
        self._lock = Lock()
        models = {_model_of(path) for path in self._paths}
        if len(models) != 1:
            several = "scores of several models cannot be compared: search the stores of each on their own"
            raise ConfigError(several if models else "name a store or a collection to search")

    def search(self, question: str) -> list[Source]:
        """The passages, best first. Raises what opening and asking a store raises."""
        with self._lock:
            found = [
                Source(store, passage)
                for store in self._stores(question)
                for passage in self._engine(store).passages(question, self._k)
            ]
        return sorted(found, key=lambda one: -one.passage.score)[: self._k]

    def _engine(self, store: str) -> Engine:
        """Held open until the store is replaced, as `append` does."""
        return self._open(store, tuple(identity(Path(store, SEAL)) or ()))

    def _stores(self, question: str) -> Iterator[str]:
        for path in self._paths:
            if is_collection(path):
                collection = Collection(path)  # as it is now
                chosen = [entry for entry, _ in collection.scored(question)[: self._documents]]
                yield from (str(collection.store(one)) for one in chosen)
            else:
                yield str(path)


def _model_of(path: Path) -> tuple[str, ...]:
    made = Collection(path).header if is_collection(path) else KVStore.open(path).manifest
    return made.model_id, made.weights_hash, made.dtype, made.weights
