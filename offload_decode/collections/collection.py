"""A collection: a folder of stores of one model, one for each document, and the list of them.

COLLECTION/
├── collection.json      which model made the stores and how: one for all of them, written once
├── documents.jsonl      the documents (`journal`)
├── words.sqlite         the words of the documents (`words`)
├── lock                 held by the one process that changes it
└── stores/3f/3f0c….kv   a store for each document, named after its name and its bytes
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from offload_decode.collections.journal import DOCUMENTS, Entry, Journal, Value, read
from offload_decode.collections.words import WORDS, number_of, scores
from offload_decode.common import files
from offload_decode.common.errors import (
    ConfigError,
    StoreBusy,
    StoreDamaged,
    StoreExists,
    StoreForeign,
    StoreMismatch,
    StoreNotFound,
)
from offload_decode.store.files import read_regular
from offload_decode.store.layout import COLLECTION as HEADER
from offload_decode.store.layout import ROOT
from offload_decode.store.staging import LOCK, locked

STORES = "stores"
VERSION = 1
_BEFORE_THE_HEADER = {LOCK, DOCUMENTS, WORDS, f"{WORDS}-journal", f"{HEADER}.tmp"}
GONE, PARTIAL = ".gone", ".partial"
_OF_A_STORE = re.compile(r"([0-9a-f]{32}\.kv)(\.partial|\.indexes)?(\.gone)?")


@dataclass(frozen=True)
class Header:
    """What all documents share: the model by its name and fingerprints, as in the manifest of a store, the
    `weights` it prefilled with, and the `settings` of the prefill, plain JSON values.
    """

    model_id: str
    model_config_hash: str
    weights_hash: str
    tokenizer_hash: str
    dtype: str
    weights: str
    settings: Mapping[str, Any]
    version: int = VERSION

    @classmethod
    def read(cls, path: Path) -> Header:
        """Raises `StoreNotFound`, `StoreForeign` and `StoreDamaged`."""
        try:
            data = files.parse(read_regular(path / HEADER))
        except (FileNotFoundError, NotADirectoryError) as error:
            message = f"There is no collection at {path}: make one with `offload-decode collect`."
            raise StoreNotFound(message) from error
        except ValueError as error:
            message = f"{path / HEADER} is no JSON: restore it from a copy, or collect again."
            raise StoreDamaged(message) from error
        if not isinstance(data, dict) or data.get("version") != VERSION:
            raise StoreForeign(f"{path} is a collection of another release: use that one, or collect again.")
        if set(data) != {field.name for field in fields(cls)} or not isinstance(data["settings"], dict):
            raise StoreForeign(f"{path / HEADER} does not have the fields of a collection: collect again.")
        if not all(isinstance(data[name], str) for name in data if name not in ("version", "settings")):
            raise StoreForeign(f"{path / HEADER} does not name a model: collect again.")
        return cls(**data)

    def check(self, path: Path, other: Header) -> None:
        """StoreMismatch where documents made as `other` says do not belong to the collection at `path`."""
        wanted = asdict(other) | {"model_id": self.model_id}
        others = [name for name, own in asdict(self).items() if own != wanted[name]]
        if others:
            way = "give what it was made with, or choose another --out."
            made = f"The collection {path} was made by {self.model_id}"
            raise StoreMismatch(f"{made} and differs in {' and '.join(others)}: {way}")


class Collection:
    """A collection that is read; opening it opens no store. `name`: what users call it."""

    def __init__(self, path: Path):
        self.path = path
        self.name = str(path)
        self.header = Header.read(path)
        self.entries = sorted(read(path / DOCUMENTS)[0].values())

    def store(self, entry: Entry) -> Path:
        """Where a document's store lies. StoreDamaged where a link leads out of the collection."""
        return _within(self.path, entry.store)

    def address(self, entry: Entry) -> str:
        """What users call a document's store."""
        return f"{self.name}/{entry.store}"

    def scored(self, question: str) -> list[tuple[Entry, float]]:
        """The documents that have a word of the question, with their BM25 scores, above 0, the best first.
        Raises `StoreDamaged`.
        """
        found = scores(self.path / WORDS, question)
        return [(self._numbered[one], score) for one, score in found.items() if one in self._numbered]

    @cached_property
    def _numbered(self) -> dict[int, Entry]:
        return {number_of(entry.store): entry for entry in self.entries}

    def held(self, entry: Entry) -> AbstractContextManager[Path]:
        """Where a document's store lies while it is asked."""
        return nullcontext(self.store(entry))


def is_collection(path: Path) -> bool:
    """Whether a collection, and not a store, lies at `path`. Raises `PermissionError` for a folder that may
    not be looked into, which some releases of Python take for one without the file.
    """
    try:
        return stat.S_ISREG(os.stat(path / HEADER).st_mode)
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(path)) from error
    except (OSError, ValueError):
        return False


def store_name(name: str, sha256: str) -> str:
    """Where a document's store lies; of its name too, because a store says what its document is called."""
    digest = hashlib.sha256(f"{sha256} {name}".encode()).hexdigest()[:32]
    return f"{STORES}/{digest[:2]}/{digest}.kv"


class Changing:
    """A collection that is changed, under its lock. header: None until there is one."""

    def __init__(self, path: Path):
        self.path = path
        self.header = Header.read(path) if (path / HEADER).exists() else None
        documents = path / DOCUMENTS
        if not documents.exists() and self.header is None:
            documents.touch()
        self.journal = Journal(documents)

    @classmethod
    @contextmanager
    def at(cls, path: Path) -> Iterator[Changing]:
        """The collection at `path`, made if need be; `StoreBusy` where another process changes it."""
        if is_collection(path):
            (path / LOCK).touch()  # of a copy it may have been left out
        elif path.exists() and set(_names(path)) - _BEFORE_THE_HEADER:
            raise StoreExists(f"{path} is there already and is no collection: choose another --out.")
        try:
            with locked(path):
                yield cls(path)
        except StoreBusy as error:
            way = "wait for it to end, or stop it first."
            raise StoreBusy(f"Another process is changing the collection {path}: {way}") from error

    def state(self, header: Header) -> None:
        """Say by which model and how its documents are made; `StoreMismatch` where it is another."""
        if self.header is None:
            self.header = header
            data = json.dumps(asdict(header), indent=2, ensure_ascii=False).encode()
            files.write(self.path / HEADER, data)
        self.header.check(self.path, header)

    def store(self, name: str) -> Path:
        """Where the store of that name lies, its folder made."""
        path = _within(self.path, name)
        files.make_folders(path.parent)
        return path

    def sweep(self, wanted: set[str]) -> None:
        """Remove stores and their parts that are not `wanted`, and what a kill left beside whole ones."""
        for folder in sorted(self.path.glob(f"{STORES}/[0-9a-f][0-9a-f]")):
            for found in _names(_within(self.path, f"{STORES}/{folder.name}")):
                own = _OF_A_STORE.fullmatch(found)
                if own is None:
                    continue
                whole = (folder / own[1] / ROOT).exists()
                kept = f"{STORES}/{folder.name}/{own[1]}" in wanted and not (own[2] == PARTIAL and whole)
                if kept and not own[3]:
                    continue
                gone = folder / (found.removesuffix(GONE) + GONE)
                if gone.name != found:
                    files.remove(gone)  # of an earlier sweep that was killed
                    os.rename(folder / found, gone)  # half a store must not look like one
                files.remove(gone)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except NotADirectoryError as error:
        raise StoreExists(f"{folder} is a file: choose another --out.") from error


def _within(collection: Path, name: str) -> Path:
    path = collection
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise StoreDamaged(f"{path} is a link, and what a collection holds lies in it: collect again.")
    return path


# Which documents of a collection are meant: conditions on their names and metadata.

NAME = "name"
_CONDITION = re.compile(r"([^=!<>]+)(!=|<=|>=|=|<|>)(.*)", re.DOTALL)
_ORDERED = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


@dataclass(frozen=True)
class Condition:
    """`field`, which is `name` or one of the metadata, compared with a text as users write it.

    `=` and `!=` take a text with `*`, `?` and `[…]` as a shell does; `<`, `<=`, `>`, `>=` order texts by
    their characters (dates such as 2024-05-31 too) and numbers by size. A document without the field, or
    whose field is of another kind than what it is compared with, does not meet it.
    """

    field: str
    comparison: str
    wanted: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """`ConfigError` for what is no condition."""
        if found := _CONDITION.fullmatch(text.strip()):
            return cls(found[1].strip(), found[2], found[3].strip())
        example = "write one like name=2024/*, author!=Ada or year>=2020"
        raise ConfigError(f"'{text}' is no condition: {example}")

    def holds(self, entry: Entry) -> bool:
        """Whether a document meets it."""
        fields = {**entry.metadata, NAME: entry.name}
        return self.field in fields and self._compares(fields[self.field])

    def _compares(self, value: Value) -> bool:
        if self.comparison in _ORDERED:
            wanted = self.wanted if isinstance(value, str) else _number(self.wanted)
            if wanted is None or value is None or isinstance(value, bool):
                return False
            return bool(_ORDERED[self.comparison](value, wanted))
        if isinstance(value, str):
            equal = fnmatchcase(value, self.wanted)
        elif isinstance(value, bool | None):
            equal = self.wanted == json.dumps(value)
        else:
            equal = value == _number(self.wanted)
        return equal == (self.comparison == "=")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
