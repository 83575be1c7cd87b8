"""The names that a server answers to: one for each store, one for each collection, and one for each model
without a corpus.

A request names an entry and nothing else: no path comes from outside. Folders of stores are watched, so that
new stores are picked up automatically.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any
from unicodedata import normalize

from offload_decode import demo_models
from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import DOCUMENTS
from offload_decode.common.errors import ConfigError, OffloadDecodeError
from offload_decode.hf.rope_scaling import Trained
from offload_decode.kv.indexes import OLD, PARTIAL, describe, kind_folder
from offload_decode.server.requests import NoSuchName
from offload_decode.store.files import SEAL
from offload_decode.store.format import Manifest
from offload_decode.store.layout import COLLECTION as HEADER
from offload_decode.store.layout import ROOT
from offload_decode.store.reader import KVStore

LOG = logging.getLogger("offload_decode.server")

SUFFIX = ".kv"
"""Stores are mostly folders that end so; their names leave it out."""
POLL_S = 2.0
"""Network file systems report no changes, nor are changes below the watched folders reported."""
_NO_STORES = (PARTIAL, OLD, ".indexes")
_SEARCHED = "clusters"
_MOST_NAMES = 10  # in an error
_LONGEST = 255


@dataclass(frozen=True)
class Entry:
    """A store under its name, a `collection` of them, or the bare model where `path` is None.

    `model_id`, `dtype`, `weights`, `scaled` and `adapter` are how the model is loaded. `created` is when the
    store was published, in seconds since 1970. `digest` is that of the store (`KVStore`), empty for a bare
    model; `recall` is what the clusters beside it measured when they were built, mean over heads, None where
    there are none that are whole. `note`: a sentence where the text is longer than the model was trained for.
    `identity` changes when the store or its clusters are replaced, and with it the
    equality of two entries of one name.
    """

    name: str
    path: Path | None
    model_id: str
    dtype: str
    weights: str
    scaled: str = ""
    adapter: str = ""
    tokens: int = 0
    documents: int = 0
    note: str = ""
    created: int = field(default=0, compare=False)
    digest: str = ""
    recall: float | None = None
    identity: object = None
    collection: bool = False

    @property
    def is_store(self) -> bool:
        return self.path is not None and not self.collection

    @classmethod
    def of(cls, manifest: Manifest, path: Path, **more: Any) -> Entry:
        """A store under the name of its folder."""
        name, model = readable(normalize("NFC", path.name.removesuffix(SUFFIX))), manifest.model_id
        how = manifest.dtype, manifest.weights, manifest.scaled, manifest.adapter
        note = Trained(**manifest.trained or {}).note(manifest.n_tokens)
        return cls(name, path, model, *how, manifest.n_tokens, note=note, **more)

    @cached_property
    def base(self) -> str:
        """The model as clients may see it: its id as it is, of a path its last part."""
        model = self.model_id
        is_id = model.count("/") <= 1 and not model.startswith((".", "/", "~")) and not os.path.exists(model)
        return readable(_with(model if is_id else _last(model), self.adapter))


def _is_served(path: Path) -> bool:
    """A store, or a collection of them."""
    return os.path.lexists(path / ROOT) or os.path.lexists(path / HEADER)


def _read(path: Path, identity: object) -> Entry:
    if os.path.lexists(path / HEADER):
        return _collection(path, identity)
    store = KVStore.open(path)
    manifest, recall = store.manifest, None
    if kind_folder(path, _SEARCHED).is_dir():
        found = describe(store, _SEARCHED)
        recall = found.recall if found.heads == found.heads_in_all else None
    return Entry.of(
        manifest,
        path,
        documents=len(store.documents),
        created=int(os.stat(path / SEAL).st_mtime),
        digest=store.store_digest,
        recall=recall,
        identity=identity,
    )


def _collection(path: Path, identity: object) -> Entry:
    opened = Collection(path)
    header = opened.header
    return Entry(
        readable(normalize("NFC", path.name)),
        path,
        header.model_id,
        header.dtype,
        header.weights,
        scaled=str(header.settings.get("rope") or ""),
        documents=len(opened.entries),
        tokens=sum(entry.tokens for entry in opened.entries),
        created=int(os.stat(path / DOCUMENTS).st_mtime),
        identity=identity,
        collection=True,
    )


def document_entry(name: str, path: Path) -> Entry:
    """A store that has no name in the catalog, such as that of a collection's document. Raises as
    `KVStore.open`.
    """
    opened = KVStore.open(path)
    return replace(Entry.of(opened.manifest, path, digest=opened.store_digest), name=name)


def _stat(path: Path) -> tuple[int, int, int, int] | None:
    """Of a folder or file that changes when its store, or the clusters beside it, are replaced."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _changes(folders: list[Path], stop: Event) -> Iterator[object]:
    try:
        from watchfiles import watch

        yield from watch(
            *folders,
            watch_filter=None,
            debounce=100,
            step=50,
            stop_event=stop,
            rust_timeout=int(POLL_S * 1000),
            yield_on_timeout=True,
            raise_interrupt=False,
            recursive=False,
            ignore_permission_denied=True,
        )
    # The package is not there, no watch is to be had, or a name in a folder is no text (a RuntimeError).
    except (ImportError, OSError, RuntimeError) as error:
        LOG.info("folders are looked at every %.0f s, because %s", POLL_S, error)
    while not stop.wait(POLL_S):
        yield None


class Catalog:
    """Watches `places`, which are stores, collections or folders of these, from a thread of its own, until
    `close`.

    `model` is served without a corpus beside the models of the stores. Of stores with one name in several
    folders, the first one that is found has it until it goes; others have a few letters more, which are
    always the same for a path. Stores can be made and deleted in `folders`, the places that are no stores
    themselves. Thread-safe. Raises `ConfigError` for a place that is not there.
    """

    def __init__(self, places: Sequence[Path], model: str | None = None, adapter: str | None = None) -> None:
        self._places = [Path(os.path.abspath(place)) for place in places]
        for place in self._places:
            if not place.is_dir():
                raise ConfigError(f"there is no store and no folder at {place}: give one, or make it first")
        self.folders = tuple(place for place in self._places if not _is_served(place))
        self._known: dict[Path, Entry] = {}
        self._problems: dict[Path, str] = {}
        # A folder by its whole path, as the manifests of stores have it.
        is_folder = model is not None and model not in demo_models.NAMES and os.path.exists(model)
        self._model = str(Path(model).resolve()) if is_folder and model else model
        self._adapter = str(Path(adapter).resolve()) if adapter else ""
        self._began = int(time.time())
        self._lock = threading.Lock()
        self._hidden: set[Path] = set()
        self._names: dict[str, str] = {}
        self._subscribers: list[Callable[[set[str]], object]] = []
        self._entries: tuple[Entry, ...] = ()
        self._named: dict[str, Entry] = {}
        self.refresh()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="catalog", daemon=True)
        self._thread.start()

    def entries(self) -> tuple[Entry, ...]:
        """All there is: stores and collections in the order of the places, then bare models."""
        return self._entries

    def entry(self, name: str) -> Entry:
        """The entry of a name; a model may also be called by its whole id. Raises `NoSuchName`."""
        if found := self._named.get(normalize("NFC", name)):
            return found
        names = [entry.name for entry in self._entries]
        more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
        there = f"are {', '.join(names[:_MOST_NAMES])}{more}" if names else "is nothing to ask yet"
        raise NoSuchName(f"nothing here is called '{readable(name)}': there {there}")

    def subscribe(self, callback: Callable[[set[str]], object]) -> None:
        """Call `callback` with names that went or now stand for something else, once `entry` knows, from any
        thread.
        """
        self._subscribers.append(callback)

    def hide(self, path: Path, hidden: bool = True) -> None:
        """Leave out the store at `path`, as before its files are deleted, or show it again."""
        (self._hidden.add if hidden else self._hidden.discard)(path)
        self.refresh()

    def refresh(self) -> None:
        """Look into the places now."""
        with self._lock:
            found = {path: each for path, each in self._stores().items() if path not in self._hidden}
            before, self._entries = self._entries, self._under_names(found)
            by_model = {entry.base: entry for entry in reversed(self._entries) if entry.path is None}
            self._named = named = by_model | {entry.name: entry for entry in self._entries}
        gone = {entry.name for entry in before if named.get(entry.name) != entry}
        if gone:
            for callback in self._subscribers:
                callback(gone)

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        """Refresh when something came into one of the folders or went, and every `POLL_S`, until `close`."""
        folders = {place if place in self.folders else place.parent for place in self._places}
        for _ in _changes([*folders], self._stop):
            if self._stop.is_set():
                return
            try:
                self.refresh()
            except OSError as error:
                LOG.warning("%s cannot be looked at: %s", error.filename, error.strerror)
            except Exception:  # whatever it was, the next change is noticed
                LOG.exception("a look at the folders failed")

    def _stores(self) -> dict[Path, Entry]:
        """The stores by path, each read while it changes; what cannot be served is logged once."""
        before, self._known = self._known, {}
        problems: dict[Path, str] = {}
        for path in dict.fromkeys(self._paths(problems)):
            try:
                parts = (
                    path / ROOT,
                    path / SEAL,
                    kind_folder(path, _SEARCHED),
                    path / HEADER,
                    path / DOCUMENTS,
                )
                identity = tuple(map(_stat, (path, *parts)))
                known = before.get(path)
                if known is None or known.identity != identity:
                    known = _read(path, identity)
                    if known.note:
                        LOG.warning("%s: %s", path, known.note)
                self._known[path] = known
            except (OffloadDecodeError, OSError) as error:
                problems[path] = str(error)
        for path, problem in problems.items():
            if self._problems.get(path) != problem:
                LOG.warning("%s is left out: %s", path, problem)
        self._problems = problems
        return self._known

    def _paths(self, problems: dict[Path, str]) -> Iterator[Path]:
        for place in self._places:
            if place not in self.folders:
                if _is_served(place):
                    yield place
                continue
            try:
                names = sorted(os.listdir(place))
            except OSError as error:
                problems[place] = error.strerror or str(error)
                continue
            for name in names:
                if not name.startswith(".") and not name.endswith(_NO_STORES) and _is_served(place / name):
                    yield place / name

    def _under_names(self, stores: dict[Path, Entry]) -> tuple[Entry, ...]:
        """The stores and the bare models, each under a name of its own; those that have one keep it."""
        found = {str(path): entry for path, entry in stores.items()}
        first: dict[tuple[str, str], Entry] = {}
        for entry in stores.values():
            first.setdefault((entry.model_id, entry.adapter), entry)
        given = [(self._model, self._adapter)] if self._model else []
        for model, adapter in dict.fromkeys([*given, *first]):
            # The model is loaded as for this one; None where it is only given by name.
            store = first.get((model, adapter))
            found[f"model {_with(model, adapter)}"] = Entry(
                name=readable(_with(_last(model), adapter)),
                path=None,
                model_id=model,
                dtype="auto" if store is None else store.dtype,
                weights="auto" if store is None else store.weights,
                scaled="" if store is None else store.scaled,
                adapter=adapter,
                created=self._began if store is None else store.created,
            )
        names = {key: name for key, name in self._names.items() if key in found}
        taken = set(names.values())
        for key, entry in found.items():
            if key not in names:
                digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
                others = (f"{entry.name}-{digest[:length]}" for length in range(6, len(digest)))
                names[key] = next(name for name in (entry.name, *others) if name not in taken)
                taken.add(names[key])
                if names[key] != entry.name:
                    LOG.warning("%s is called '%s', because '%s' is another", key, names[key], entry.name)
        self._names = names
        return tuple(replace(entry, name=names[key]) for key, entry in found.items())


def readable(name: str) -> str:
    """A name for answers and logs: unprintable letters are replaced, and a long name is cut."""
    text = "".join(letter if letter.isprintable() else "\ufffd" for letter in name[:_LONGEST])
    return text if len(name) <= _LONGEST else f"{text}…"


def _with(model: str, adapter: str) -> str:
    return f"{model}+{_last(adapter)}" if adapter else model


def _last(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model
