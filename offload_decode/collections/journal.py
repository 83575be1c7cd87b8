"""The documents of a collection, a JSON line each: the last line of a name counts.

Lines are only ever appended, each flushed to the disk, until those that no longer count are the most; then
the file is written anew beside and renamed. A kill may leave the last line torn: it does not count.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

from offload_decode.common import files
from offload_decode.common.errors import ConfigError, DoesNotFit, StoreDamaged, StoreForeign
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.store.format import check_names

Value = str | int | float | bool | None

DOCUMENTS = "documents.jsonl"
LARGEST = 1 << 30
"""Bytes of all lines: some three million documents, whose names are held in memory."""
LONGEST = 1 << 16  # bytes of a line

_STORE = re.compile(r"stores/([0-9a-f]{2})/\1[0-9a-f]{30}\.kv")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = 4096  # characters of a document's name
_FIELDS = 100  # of metadata
_SPARE = 100  # lines that do not count, for which nobody writes all others anew


class Entry(NamedTuple):
    """A document: its name below the folder of texts, with `/`; the SHA-256 of its bytes; the path of its
    store below the collection; its tokens; and what is said of it.
    """

    name: str
    sha256: str
    store: str
    tokens: int
    metadata: Mapping[str, Value]


def read(path: Path) -> tuple[dict[str, Entry], int]:
    """The documents of the file at `path` by name, and how many whole lines it has.

    Raises `StoreDamaged` for a line that is not one of a collection's, and where it is no plain file.
    """
    entries: dict[str, Entry] = {}
    count = 0
    with _opened(path) as file:
        for count, line in enumerate(_lines(file, path), start=1):
            try:
                name, entry = _parsed(line)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                way = "restore it from a copy, or collect again to another --out."
                raise StoreDamaged(
                    f"Line {count} of {path} is not that of a document ({error}): {way}"
                ) from error
            if entry is None:
                entries.pop(name, None)
            else:
                entries[name] = entry
    return entries, count


class Journal:
    """The documents of a collection, by name, while they change; the caller holds the collection's lock."""

    def __init__(self, path: Path):
        self.path = path
        self.entries, self._count = read(path)
        _cut_torn_line(path)

    def put(self, entry: Entry) -> None:
        """Add a document, or what is known of it now. Raises `ConfigError` where that is too much."""
        line = _line(entry._asdict())
        if len(line) > LONGEST:
            taken = f"take {len(line):,} bytes, and {LONGEST:,} are the most: say less of it"
            raise ConfigError(f"the name and metadata of {entry.name[:100]} {taken}")
        self._append([line])
        self.entries[entry.name] = entry

    def drop(self, names: Iterable[str]) -> None:
        """Take documents out."""
        gone = list(names)
        lines = [_line({"name": name, "gone": True}) for name in gone]
        fits = self.path.stat().st_size + sum(map(len, lines)) <= LARGEST
        if fits:
            self._append(lines)
        for name in gone:
            del self.entries[name]
        if not fits:
            self._rewrite()

    def compact(self) -> None:
        """Write the file anew where most of its lines no longer count."""
        if self._count > 2 * len(self.entries) + _SPARE:
            self._rewrite()

    def make_room(self) -> None:
        """Raise `DoesNotFit` unless any line may still be added to a file that can be read again."""
        if self.path.stat().st_size + LONGEST > LARGEST and self._count > len(self.entries):
            self._rewrite()
        if self.path.stat().st_size + LONGEST > LARGEST:
            held = f"{len(self.entries):,} documents: split the texts into several collections"
            raise DoesNotFit(f"{self.path} is full, with {held}")

    def _rewrite(self) -> None:
        lines = [_line(one._asdict()) for one in self.entries.values()]
        files.write(self.path, b"".join(lines))
        self._count = len(lines)

    def _append(self, lines: list[bytes]) -> None:
        before = self.path.stat().st_size
        try:
            with open(self.path, "ab") as file:
                file.write(b"".join(lines))
            files.sync_files([self.path])
        except OSError:
            os.truncate(self.path, before)  # half a line would swallow the next one
            raise
        self._count += len(lines)


def _opened(path: Path) -> BinaryIO:
    try:
        file = os.fdopen(open_plain(path), "rb")
    except NotPlain as error:
        raise StoreDamaged(f"{path} cannot be read, because {error}: restore it from a copy.") from error
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing: restore it from a copy, or collect again.") from error
    if os.fstat(file.fileno()).st_size > LARGEST:
        file.close()
        most = f"{LARGEST >> 20} MiB"
        raise StoreForeign(f"{path} has more than {most}: split the texts into several collections.")
    return file


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Whole lines, none longer than `LONGEST`."""
    while line := file.readline(LONGEST + 1):
        if line.endswith(b"\n"):
            yield line
        elif len(line) > LONGEST:
            raise StoreDamaged(f"{path} has a line of more than {LONGEST:,} bytes: restore it from a copy.")


def _parsed(line: bytes) -> tuple[str, Entry | None]:
    fields = files.parse(line)
    name = fields["name"]
    if not isinstance(name, str) or not 0 < len(name) <= _NAME:
        raise ValueError("its name is none")
    name.encode()  # half a character raises a ValueError too
    if fields.get("gone") is True and len(fields) == 2:
        return name, None
    check_names("it", fields, Entry._fields)
    entry = Entry(**fields)
    if not isinstance(entry.sha256, str) or not _SHA256.fullmatch(entry.sha256):
        raise ValueError("its sha256 is none")
    if not isinstance(entry.store, str) or not _STORE.fullmatch(entry.store):
        raise ValueError("its store is not one of the collection")
    if type(entry.tokens) is not int or entry.tokens < 1:
        raise ValueError("its tokens are no count")
    check_metadata(entry.metadata)
    return name, entry


def check_metadata(metadata: object) -> None:
    """`ValueError` unless it is a flat object of texts, numbers and truth values."""
    if not isinstance(metadata, dict) or len(metadata) > _FIELDS:
        raise ValueError(f"its metadata are no object of at most {_FIELDS} fields")
    for name, value in metadata.items():
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(f"its field {name!r} is neither text nor a number")
        if any("\ud800" <= letter <= "\udfff" for letter in f"{name}{value}"):
            raise ValueError(f"its field {name!r} has half a character")


def _line(fields: Mapping[str, object]) -> bytes:
    # `dict`: metadata are any mapping.
    return json.dumps(fields, ensure_ascii=False, allow_nan=False, default=dict).encode() + b"\n"


def _cut_torn_line(path: Path) -> None:
    with open(path, "rb+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST))
        tail = file.read()
        if not tail.endswith(b"\n"):
            file.truncate(size - len(tail) + tail.rfind(b"\n") + 1)
