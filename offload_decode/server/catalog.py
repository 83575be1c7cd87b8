"""The names that a server answers to: one for each store, and one for each model without a corpus.

A request names an entry and nothing else: no path comes from outside.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import NamedTuple, Self

from offload_decode import demo_models
from offload_decode.common.errors import ConfigError, OffloadDecodeError
from offload_decode.kv.indexes import OLD, PARTIAL, describe, kind_folder
from offload_decode.server.requests import NoSuchName
from offload_decode.store.files import SEAL
from offload_decode.store.layout import ROOT
from offload_decode.store.reader import KVStore

# What lies in the folders that are served: stores, each read once for as long as it is the same.

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


# Folders that are watched: by what the system tells of them, and now and then in any case.


POLL_S = 2.0
"""File systems of a network tell nothing, nor is it told what happens below the folders."""
_SETTLE_MS, _STEP_MS = 100, 50


def watch(folders: Iterable[Path], stop: Event, changed: Callable[[], None]) -> None:
    """Call `changed` when something came into one of `folders` or went, and every `POLL_S`, until `stop` is
    set. An error of the file system is logged, and it goes on.
    """
    for _ in _moments([*folders], stop):
        if stop.is_set():
            return
        try:
            changed()
        except OSError as error:
            log.warning("%s cannot be looked at: %s", error.filename, error.strerror)
        except Exception:  # whatever it was, the next change is noticed
            log.exception("a look at the folders failed")


def _moments(folders: list[Path], stop: Event) -> Iterator[object]:
    try:
        from watchfiles import watch as notified

        yield from notified(
            *folders,
            watch_filter=None,
            debounce=_SETTLE_MS,
            step=_STEP_MS,
            stop_event=stop,
            rust_timeout=int(POLL_S * 1000),
            yield_on_timeout=True,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
    # The package is not there, no watch is to be had, or a name in a folder is no text (a RuntimeError).
    except (ImportError, OSError, RuntimeError) as error:
        log.info("folders are looked at every %.0f s, because %s", POLL_S, error)
    while not stop.wait(POLL_S):
        yield None


SUFFIX = ".kv"
"""Stores are mostly folders that end so; their names leave it out."""

_SHOWN = 10
_LONGEST = 255


@dataclass(frozen=True)
class Entry:
    """What a name stands for: a store, or the bare model where `path` is None.

    `base` is the model as clients may see it, never a path of this machine; `model_id`, `dtype` and `weights`
    are how it is loaded. `created` is in seconds since 1970. `digest` is that of the store (`KVStore`), empty
    for a bare model; `recall` is what its indexes measured when they were built, None where there are none.
    Two entries of one name are equal as long as neither the store nor its indexes are replaced.
    """

    name: str
    path: Path | None
    base: str
    model_id: str
    dtype: str
    weights: str
    tokens: int
    documents: int
    created: int = field(compare=False)
    digest: str
    recall: float | None
    identity: object = None


class _Snapshot(NamedTuple):
    entries: tuple[Entry, ...]
    named: dict[str, Entry]


class Catalog:
    """Watches `places`, which are stores or folders of stores, from a thread of its own, until `close`.

    `model` is served without a corpus beside the models of the stores. Stores of one name in several folders:
    the first one that is found has it until it goes; others have a few letters more, which are always the
    same for a path. Thread-safe. Raises `ConfigError` for a place that is not there.
    """

    def __init__(self, places: Sequence[Path], model: str | None = None) -> None:
        self._shelf = Shelf(places)
        self._model = None if model is None else _known_as(model)
        self._began = int(time.time())
        self._lock = threading.Lock()
        self._hidden: set[Path] = set()
        self._names: dict[str, str] = {}
        self._told: list[Callable[[set[str]], None]] = []
        self._snapshot = _Snapshot((), {})
        self.refresh()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="catalog", daemon=True)
        self._thread.start()

    @property
    def folders(self) -> tuple[Path, ...]:
        """The places in which stores can be made and deleted."""
        return self._shelf.folders

    def entries(self) -> tuple[Entry, ...]:
        """All there is: stores in the order of the places, then bare models."""
        return self._snapshot.entries

    def entry(self, name: str) -> Entry:
        """What a name stands for; a model may also be called by its whole id. Raises `NoSuchName`."""
        named = self._snapshot.named
        if name in named:
            return named[name]
        names = [entry.name for entry in self._snapshot.entries]
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        there = f"there are {', '.join(names[:_SHOWN])}{more}" if names else "there is nothing to ask yet"
        raise NoSuchName(f"nothing here is called '{readable(name)}': {there}")

    def subscribe(self, callback: Callable[[set[str]], None]) -> None:
        """Have `callback` called with the names that went or now stand for something else, from any thread,
        after `entry` knows.
        """
        self._told.append(callback)

    def hide(self, path: Path, hidden: bool = True) -> None:
        """Leave out the store at `path`, as before its files are deleted, or show it again."""
        (self._hidden.add if hidden else self._hidden.discard)(path)
        self.refresh()

    def refresh(self) -> None:
        """Look into the places now."""
        with self._lock:
            found = [each for each in self._shelf.look() if each.path not in self._hidden]
            before, after = self._snapshot, self._named(found)
            self._snapshot = after
        gone = {entry.name for entry in before.entries if after.named.get(entry.name) != entry}
        if gone:
            for callback in self._told:
                callback(gone)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watch(self) -> None:
        watch(self._shelf.watched, self._stop, self.refresh)

    def _named(self, found: Sequence[Shelved]) -> _Snapshot:
        bare: dict[str, Shelved] = {}
        for each in found:
            bare.setdefault(each.model_id, each)
        models = [*dict.fromkeys([*([self._model] if self._model else []), *bare])]
        wanted = {str(each.path): readable(each.path.name.removesuffix(SUFFIX)) for each in found}
        wanted |= {f"model {model}": readable(_last(model)) for model in models}
        self._name(wanted)
        entries = [_of_store(self._names[str(each.path)], each) for each in found]
        entries += [
            _of_model(self._names[f"model {model}"], model, bare.get(model), self._began) for model in models
        ]
        called = {entry.base: entry for entry in reversed(entries) if entry.path is None}
        return _Snapshot(tuple(entries), called | {entry.name: entry for entry in entries})

    def _name(self, wanted: dict[str, str]) -> None:
        """Give each of these (by its path, or its model) a name that no other has; those that have one keep
        it.
        """
        names = {key: name for key, name in self._names.items() if key in wanted}
        taken = set(names.values())
        for key, name in wanted.items():
            if key not in names:
                names[key] = next(each for each in _spellings(name, key) if each not in taken)
                taken.add(names[key])
                if names[key] != name:
                    log.warning("%s is called '%s', because '%s' is another", key, names[key], name)
        self._names = names


def readable(name: str) -> str:
    """A name as it may stand in an answer or a log: what cannot be printed is replaced, and what is too long
    is cut.
    """
    text = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name[:_LONGEST]
    )
    return text if len(name) <= _LONGEST else f"{text}…"


def _spellings(name: str, key: str) -> Iterable[str]:
    yield name
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
    yield from (f"{name}-{digest[:length]}" for length in range(6, len(digest)))


def _known_as(model: str) -> str:
    """As stores name it, which know a folder by its whole path."""
    is_shipped = model in demo_models.NAMES
    return str(Path(model).resolve()) if not is_shipped and os.path.exists(model) else model


def _last(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model


def model_name(model: str) -> str:
    """A model as clients may see it: an id as it is, of a path its last part."""
    is_id = model.count("/") <= 1 and not model.startswith((".", "/", "~")) and not os.path.exists(model)
    return readable(model if is_id else _last(model))


def _of_store(name: str, found: Shelved) -> Entry:
    return Entry(
        name=name,
        path=found.path,
        base=model_name(found.model_id),
        model_id=found.model_id,
        dtype=found.dtype,
        weights=found.weights,
        tokens=found.tokens,
        documents=found.documents,
        created=found.created,
        digest=found.digest,
        recall=found.recall,
        identity=found.identity,
    )


def _of_model(name: str, model: str, store: Shelved | None, began: int) -> Entry:
    """The model that a store was made with, as it was loaded then; or one that is only given by name."""
    return Entry(
        name=name,
        path=None,
        base=model_name(model),
        model_id=model,
        dtype="auto" if store is None else store.dtype,
        weights="auto" if store is None else store.weights,
        tokens=0,
        documents=0,
        created=began if store is None else store.created,
        digest="",
        recall=None,
    )
