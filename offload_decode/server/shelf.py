"""What lies in the folders that are served: stores, each read once for as long as it is the same."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_decode.errors import ConfigError, OffloadDecodeError
from offload_decode.kv.head_indexes import OLD, PARTIAL, kind_folder
from offload_decode.kv.saved_indexes import describe
from offload_decode.store.checksums import SEAL
from offload_decode.store.metadata import ROOT
from offload_decode.store.reader import KVStore

log = logging.getLogger("offload_decode.server")

_NO_STORES = (PARTIAL, OLD, ".indexes")
_SEARCHED = "clusters"

Identity = tuple[tuple[int, int, int, int] | None, ...]


@dataclass(frozen=True)
class Shelved:
    """A store that can be served. `model_id`, `dtype` and `weights` are how its model is loaded; `created` is
    when it was published, in seconds since 1970; `digest` names all its bytes; `recall` is what the clusters
    beside it measured when they were built, mean over heads, None where there are none that are whole.
    `identity` is another where the store or its clusters were replaced.
    """

    path: Path
    model_id: str
    dtype: str
    weights: str
    tokens: int
    documents: int
    created: int
    digest: str
    recall: float | None
    identity: Identity


class Shelf:
    """Looks into `places`, stores or folders of stores. Raises `ConfigError` for one that is not there."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = [Path(os.path.abspath(place)) for place in places]
        for place in self._places:
            if not place.is_dir():
                raise ConfigError(f"there is no store and no folder at {place}: give one, or make it first")
        self.folders = tuple(place for place in self._places if not _is_store(place))
        self._known: dict[Path, Shelved] = {}
        self._problems: dict[Path, str] = {}

    @property
    def watched(self) -> set[Path]:
        """The folders in which stores come and go."""
        return {place if place in self.folders else place.parent for place in self._places}

    def look(self) -> list[Shelved]:
        """The stores, in the order of the places and of their names. One that cannot be served is left out,
        and the log says why, once.
        """
        before, self._known = self._known, {}
        problems: dict[Path, str] = {}
        for path in dict.fromkeys(self._paths(problems)):
            try:
                identity = _identity(path)
                known = before.get(path)
                self._known[path] = known if known and known.identity == identity else _read(path, identity)
            except (OffloadDecodeError, OSError) as error:
                problems[path] = str(error)
        for path, problem in problems.items():
            if self._problems.get(path) != problem:
                log.warning("%s is left out: %s", path, problem)
        self._problems = problems
        return list(self._known.values())

    def _paths(self, problems: dict[Path, str]) -> Iterator[Path]:
        for place in self._places:
            if place not in self.folders:
                if _is_store(place):
                    yield place
                continue
            try:
                with os.scandir(place) as entries:
                    names = sorted(entry.name for entry in entries)
            except OSError as error:
                problems[place] = error.strerror or str(error)
                continue
            for name in names:
                if not name.startswith(".") and not name.endswith(_NO_STORES) and _is_store(place / name):
                    yield place / name


def _is_store(path: Path) -> bool:
    return os.path.lexists(path / ROOT)


def _read(path: Path, identity: Identity) -> Shelved:
    store = KVStore.open(path)
    manifest = store.manifest
    return Shelved(
        path=path,
        model_id=manifest.model_id,
        dtype=manifest.dtype,
        weights=manifest.weights,
        tokens=manifest.n_tokens,
        documents=len(store.documents),
        created=int(os.stat(path / SEAL).st_mtime),
        digest=store.store_digest,
        recall=_recall(store),
        identity=identity,
    )


def _recall(store: KVStore) -> float | None:
    if not kind_folder(store.path, _SEARCHED).is_dir():
        return None
    found = describe(store, _SEARCHED)
    return found.recall if found.heads == found.heads_in_all else None


def _identity(path: Path) -> Identity:
    """Of the store's folder and the files that are written last; of its clusters the folder, which is renamed
    when they are whole.
    """
    return tuple(map(_stat, (path, path / ROOT, path / SEAL, kind_folder(path, _SEARCHED))))


def _stat(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
