"""The words of a collection's documents, and which documents a question's words speak for: BM25 (Robertson
and Zaragoza 2009), by SQLite's full-text search.

COLLECTION/words.sqlite is made of the documents and can be made again; what it says of documents that are not
in the list is not looked at. Of a file from elsewhere nothing but the tables that are expected is used.
"""

import os
import re
import sqlite3
import stat
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Self

from offload_decode.common.errors import ConfigError, StoreBusy, StoreDamaged

WORDS = "words.sqlite"
_TABLE = "CREATE VIRTUAL TABLE words USING fts5(text, tokenize = 'unicode61 remove_diacritics 2')"
_PARTS = {"words", *(f"words_{part}" for part in ("data", "idx", "content", "docsize", "config"))}
# Columns with types and keys, and nothing that SQLite would compute.
_PLAIN = re.compile(r"(?!.*\b(as|generated|check|default|collate|references)\b)[\w ,'()]+", re.IGNORECASE)
_LONGEST = 1 << 30  # bytes of a value: a document has fewer
_LONGEST_REASON = 200  # letters: SQLite names what the file holds
_MOST_WORDS = 100  # of a question
_COMMIT_EVERY = 64
# Chinese, Japanese and Korean: FTS5 would take what lies between two marks for one word.
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]+")
_OF_SEVERAL = bytes.fromhex("d9d505f920a163d7")  # how a journal ends that names another file
_WAIT_S = 30.0  # for another process' commit


def number_of(store: str) -> int:
    """By what number a document is known there: digits of its store's name."""
    return int(Path(store).stem[:15], 16)


class Words:
    """The words of documents, while they change; used as a context manager, by whoever holds the lock."""

    def __init__(self, path: Path):
        self._path = path
        self._uncommitted = 0

    def __enter__(self) -> Self:
        if os.path.lexists(self._path):
            _check_plain(self._path)
        with _surfaced(self._path):
            self._connection = _connected(self._path)
            if not next(self._connection.execute("SELECT count(*) FROM sqlite_schema"))[0]:
                self._connection.execute(_TABLE)
                self._connection.commit()
            _check(self._connection)
            _check_size(self._connection, self._path)
            self._there = {number for (number,) in self._connection.execute("SELECT id FROM words_docsize")}
        return self

    def __exit__(self, *_: object) -> None:
        with _surfaced(self._path), closing(self._connection):
            self._connection.commit()

    def __contains__(self, store: str) -> bool:
        return number_of(store) in self._there

    def put(self, store: str, text: str) -> None:
        """Add the text of the document in `store`. A kill loses the last few: whoever holds the text asks
        whether they are there.
        """
        with _surfaced(self._path):
            row = number_of(store), _spaced(text.encode("utf-8", "replace").decode())
            self._connection.execute("INSERT INTO words (rowid, text) VALUES (?, ?)", row)
            self._uncommitted += 1
            if self._uncommitted % _COMMIT_EVERY == 0:
                self._connection.commit()
        self._there.add(number_of(store))

    def keep(self, stores: Collection[str]) -> None:
        """Remove the documents that are in none of `stores`."""
        gone = self._there - set(map(number_of, stores))
        with _surfaced(self._path):
            self._connection.executemany("DELETE FROM words WHERE rowid = ?", ((one,) for one in gone))
        self._there -= gone


def scores(path: Path, question: str) -> dict[int, float]:
    """The BM25 score, above 0, of each document with a word of the question, by its number; the best first.
    Raises `StoreDamaged`.
    """
    words = re.findall(r"\w+", _spaced(question))[:_MOST_WORDS]
    wanted = " OR ".join(f'"{word}"' for word in dict.fromkeys(words))
    if not wanted:
        return {}
    _check_plain(path)
    with _surfaced(path), closing(_connected(path)) as connection:
        connection.execute("PRAGMA query_only = ON")
        _check(connection)
        found = connection.execute(
            "SELECT rowid, rank FROM words WHERE words MATCH ? ORDER BY rank", (wanted,)
        )
        return {int(number): -float(rank) for number, rank in found}  # SQLite's are negative


def _spaced(text: str) -> str:
    """Writing without spaces as the pairs of neighbours in it, as Lucene's CJKAnalyzer has it."""

    def pairs(found: re.Match[str]) -> str:
        run = found[0]
        return f" {' '.join(run[at : at + 2] for at in range(max(1, len(run) - 1)))} "

    return _UNSPACED.sub(pairs, text)


def verify(path: Path, stores: Collection[str]) -> None:
    """`StoreDamaged` unless the words at `path` are those of the documents in `stores`, and what is searched
    says of them what their texts say. Of a copy, for SQLite checks this with a statement that writes.
    """
    _check_plain(path)
    with _surfaced(path), closing(_connected(path)) as connection, closing(_connected("")) as copy:
        _check(connection)
        connection.backup(copy)
        finding = next(copy.execute("PRAGMA integrity_check(1)"))[0]
        if finding != "ok":
            raise sqlite3.DatabaseError(finding)
        copy.execute("INSERT INTO words (words) VALUES ('integrity-check')")
        there = {number for (number,) in copy.execute("SELECT id FROM words_docsize")}
    others = there ^ set(map(number_of, stores))
    if others:
        raise StoreDamaged(f"{path} and the list of documents differ in {len(others):,}: collect again.")


def _connected(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_WAIT_S)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
    # The first two as sqlite.org/security.html advises; the third, so that what is not committed shuts out
    # no reader.
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "cache_spill = OFF"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Nothing but the table of words and its parts is there: no view or trigger that would run."""
    found = list(connection.execute("SELECT type, name, sql FROM sqlite_schema"))
    if {name for _, name, _ in found} != _PARTS or {kind for kind, _, _ in found} != {"table"}:
        raise sqlite3.DatabaseError("it holds other tables than those of a collection")
    if ("table", "words", _TABLE) not in found:
        raise sqlite3.DatabaseError("its table is another release's")
    if not all(_PLAIN.fullmatch(str(sql)) for _, name, sql in found if name != "words"):
        raise sqlite3.DatabaseError("its tables compute something")


def _check_size(connection: sqlite3.Connection, path: Path) -> None:
    """SQLite looks at none of what lies behind its last page; whoever copies the file would."""
    pages, size = (next(connection.execute(f"PRAGMA {what}"))[0] for what in ("page_count", "page_size"))
    if os.stat(path).st_size > pages * size:
        raise sqlite3.DatabaseError("it has more bytes than its pages")


def _check_plain(path: Path) -> None:
    try:
        plain = stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError as error:
        raise StoreDamaged(f"{path} is missing: collect again.") from error
    if not plain:
        raise StoreDamaged(f"{path} is not a plain file: remove it, and collect again.")
    journal = path.with_name(f"{path.name}-journal")
    foreign = [f"{path}{end}" for end in ("-wal", "-shm") if os.path.lexists(f"{path}{end}")]  # we write none
    if foreign or not _is_ours(journal):
        named = foreign[0] if foreign else journal
        raise StoreDamaged(f"{named} is not of a collection: remove it, and collect again.")


def _is_ours(journal: Path) -> bool:
    """Whether a journal that a killed process left may be rolled back: SQLite would remove the file that one
    of several databases names, and ours is one of none.
    """
    try:
        if not stat.S_ISREG(os.lstat(journal).st_mode):
            return False
        with open(journal, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - len(_OF_SEVERAL)))
            return file.read() != _OF_SEVERAL
    except FileNotFoundError:
        return True


@contextmanager
def _surfaced(path: Path) -> Iterator[None]:
    """Errors of SQLite as our own."""
    try:
        yield
    except MemoryError as error:  # of a length that the file states
        way = "free some, or remove it and collect again."
        raise StoreDamaged(f"{path} asks for more memory than there is: {way}") from error
    except (sqlite3.Error, UnicodeDecodeError) as error:  # of a sentence that quotes the file
        if "no such module" in str(error):
            lacks = "this Python's SQLite was built without full-text search (FTS5)"
            raise ConfigError(f"{lacks}: use another build of Python") from error
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise StoreBusy(f"Another process is writing {path}: try again in a moment.") from error
        reason = " ".join(str(error).split())[:_LONGEST_REASON]
        raise StoreDamaged(f"{path} cannot be used ({reason}): remove it, and collect again.") from error
