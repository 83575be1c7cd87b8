"""The files of a folder that is a corpus: which are read, and which are left out and why."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from offload_decode.collections.collection import is_collection
from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs.documents.files import read_plain
from offload_decode.store.files import SEAL
from offload_decode.store.staging import LOCK, PROGRESS

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

_CACHES = ("__pycache__", "node_modules")
_IGNORES = ".gitignore"
_MOST_LINES = 10_000

STDIN = "-"
LINK = "it is a link"
LEFT_OUT = ("a .gitignore names it", "--exclude names it", "--glob does not name it")
NO_DOCUMENT = (
    "it is a KV store or belongs to one",
    "it is a collection of stores",
    "it is not a regular file",
    "it is read already, under another name",
)


class Skipped(NamedTuple):
    """A file or folder that was left out, and why."""

    name: str
    reason: str

    @property
    def unread(self) -> bool:
        """Whether it may be an unreadable document or folder of documents."""
        return self.reason not in LEFT_OUT + NO_DOCUMENT and not self.reason.startswith(f"{LINK} to")


@dataclass(frozen=True)
class Rules:
    """What to read of a folder: files that match one of `globs` (all files without any) and none of
    `excludes`, both patterns as in a `.gitignore`; and whether to follow links.
    """

    globs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    follow_links: bool = False

    def __post_init__(self) -> None:
        for pattern in (*self.globs, *self.excludes):  # fail before the work begins
            if not pattern.strip():
                raise ConfigError("an empty pattern names nothing: write one as in a .gitignore, like *.md")
            _patterns([pattern])


EVERYTHING = Rules()


class _Entry(NamedTuple):
    """A file, or a folder, whose name ends with a `/` (empty for the corpus); and the `.gitignore` files
    above it, each with the name of its folder.
    """

    name: str
    path: str
    ignores: tuple[tuple[str, GitIgnoreSpec], ...]


class Walk:
    """Walks a folder once. Hidden files and caches are ignored; everything else that is not returned is in
    `skipped`. Links are followed only where `rules` says so, after everything else, so that files in the
    folder keep their own names; no file is then read twice.
    """

    def __init__(self, folder: Path, rules: Rules) -> None:
        self.skipped: list[Skipped] = []
        self._rules, self._globs, self._excludes = rules, _patterns(rules.globs), _patterns(rules.excludes)
        self._todo = deque([_Entry("", str(folder), ())])
        self._links: deque[_Entry] = deque()
        self._seen = {_identity(os.stat(folder))}

    def files(self) -> Iterator[tuple[str, str]]:
        """The files, in no particular order: the name of each below the corpus, with `/`, and its path."""
        while self._todo or self._links:
            if self._todo:
                yield from self._enter(self._todo.popleft())
                continue
            link = self._links.popleft()
            try:
                found = os.stat(link.path)
            except OSError:
                self.skip(link.name, f"{LINK} that leads nowhere")
            else:
                yield from self._take(link, found)

    def skip(self, name: str, reason: str) -> None:
        self.skipped.append(Skipped(clean(name), reason))

    def _enter(self, here: _Entry) -> Iterator[tuple[str, str]]:
        try:
            names = sorted(os.listdir(here.path))
            ignores = (*here.ignores, *self._own_ignores(here)) if _IGNORES in names else here.ignores
        except OSError as error:
            self.skip(here.name.rstrip("/") or ".", error.strerror or str(error))
            return
        for name in names:
            if not name.startswith("."):
                entry = _Entry(here.name + name, os.path.join(here.path, name), ignores)
                try:
                    yield from self._take(entry, os.lstat(entry.path))
                except OSError as error:
                    self.skip(entry.name, error.strerror or str(error))

    def _take(self, entry: _Entry, found: os.stat_result) -> Iterator[tuple[str, str]]:
        folder = stat.S_ISDIR(found.st_mode)
        if folder and os.path.basename(entry.name) in _CACHES:
            return
        if left_out := self._left_out(entry, folder):
            self.skip(entry.name, left_out)
        elif stat.S_ISLNK(found.st_mode):
            if self._rules.follow_links:
                self._links.append(entry)
            else:
                self.skip(entry.name, f"{LINK} to a {'folder' if os.path.isdir(entry.path) else 'file'}")
        elif reason := self._no_document(Path(entry.path), found):
            self.skip(entry.name, reason)
        else:
            self._seen.add(_identity(found))
            if folder:
                self._todo.append(entry._replace(name=f"{entry.name}/"))
            else:
                yield entry.name, entry.path

    def _no_document(self, path: Path, found: os.stat_result) -> str | None:
        """One of `NO_DOCUMENT`, or None."""
        store, collection, irregular, duplicate = NO_DOCUMENT
        if stat.S_ISDIR(found.st_mode):
            if is_store(path):
                return store
            if is_collection(path):
                return collection
        elif not stat.S_ISREG(found.st_mode):  # reading a pipe would block
            return irregular
        return duplicate if self._rules.follow_links and _identity(found) in self._seen else None

    def _left_out(self, entry: _Entry, folder: bool) -> str | None:
        """One of `LEFT_OUT`, or None."""
        name = f"{entry.name}/" if folder else entry.name
        for above, spec in reversed(entry.ignores):  # the innermost match decides
            if (ignored := spec.check_file(name.removeprefix(above)).include) is not None:
                if ignored:
                    return LEFT_OUT[0]
                break
        if self._excludes.match_file(name):
            return LEFT_OUT[1]
        return LEFT_OUT[2] if self._rules.globs and not folder and not self._globs.match_file(name) else None

    def _own_ignores(self, here: _Entry) -> list[tuple[str, GitIgnoreSpec]]:
        try:
            text = read_plain(os.path.join(here.path, _IGNORES)).decode("utf-8", "surrogateescape")
        except CorpusError as error:
            self.skip(here.name + _IGNORES, str(error))
            return []
        lines = text.splitlines()
        if len(lines) > _MOST_LINES or any(map(_is_slow, lines)):
            self.skip(here.name + _IGNORES, "its patterns would take too long")
            return []
        return [(here.name, _patterns(lines, lenient=True))]


def check_corpus(corpus: str) -> None:
    """`CorpusError` where `corpus` is missing, a store, or neither a file nor a folder; `-` (standard input)
    passes.
    """
    if corpus == STDIN:
        return
    path = Path(corpus)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        way_out = "give a file, a folder, or - for standard input"
        raise CorpusError(f"there is no corpus at {corpus}: {way_out}") from error
    except (OSError, ValueError) as error:
        raise CorpusError(f"{corpus} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    real = Path(os.path.realpath(path))
    if is_store(real) or any((folder / SEAL).exists() for folder in (real, *real.parents)):
        raise CorpusError(f"{path} is a KV store or belongs to one: give the text that it was made of")
    if is_collection(real):
        raise CorpusError(f"{path} is a collection of stores: give the texts that it was made of")
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        way_out = "give a file, a folder, or - and its text on standard input"
        raise CorpusError(f"{corpus} is not a regular file: {way_out}")


def is_store(folder: Path) -> bool:
    """Whether `folder` belongs to a store: one within its corpus must not become part of it."""
    if folder.suffix == ".partial":
        return any((folder / name).exists() for name in (LOCK, PROGRESS))
    store = folder.with_suffix("") if folder.suffix == ".indexes" else folder
    return (store / "zarr.json").exists()


def clean(name: str) -> str:
    """A file name as text: it may hold bytes that are not UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _patterns(lines: Sequence[str], lenient: bool = False) -> GitIgnoreSpec:
    """Raises `ConfigError` for an invalid pattern; `lenient` ignores it, as git does."""
    from pathspec import GitIgnoreSpec

    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as error:
        if lenient:
            valid = []
            for line in lines:
                with suppress(ValueError):
                    GitIgnoreSpec.from_lines([line])
                    valid.append(line)
            return GitIgnoreSpec.from_lines(valid)
        raise ConfigError(f"'{lines[0]}' is no pattern: write one as in a .gitignore, like *.md") from error


def _is_slow(pattern: str) -> bool:
    """Whether matching may never end: each wildcard multiplies its time by the length of a name."""
    if pattern.startswith("#"):
        return False
    return pattern.count("**") > 4 or any(part.count("*") > 3 for part in pattern.split("/"))


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
