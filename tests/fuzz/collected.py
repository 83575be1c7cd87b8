"""A collection from elsewhere: its header, its list of documents, and SQLite's file of their words, in whose
schema and tables a stranger may write what SQL can write.
"""

import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from hypothesis import strategies as st

from offload_decode.collections.collection import HEADER, Changing, Collection, Condition, Header, store_name
from offload_decode.collections.journal import DOCUMENTS, Entry, Journal
from offload_decode.collections.words import WORDS, Words, scores, verify
from offload_decode.common.files import remove
from tests.fuzz.edits import KINDS, Edit, Files, apply, join, put_back

MADE = Header("demo", "0" * 64, "1" * 64, "2" * 64, "float32", "full", {"method": "dense", "chunk": 64})
TEXTS = ["Ada keeps the minutes of the society. ", "Who was it? Nobody says. ", "Où? À Paris, en 1843. "]
CONDITIONS = [Condition.parse(text) for text in ("name=*1*", "year>=1800", "author!=Ada", "draft=false")]
BESIDE = [f"{WORDS}{end}" for end in ("-journal", "-wal", "-shm")]
SQL = [
    "CREATE VIEW more AS SELECT * FROM words",
    "CREATE TRIGGER gone AFTER INSERT ON words_content BEGIN DELETE FROM words_data; END",
    "CREATE VIRTUAL TABLE other USING fts5(text, content='words')",
    "CREATE INDEX slow ON words_content(c0)",
    "DROP TABLE words",
    "DROP TABLE words_idx",
    "UPDATE sqlite_schema SET rootpage = 1",
    "UPDATE sqlite_schema SET rootpage = rootpage + 1",
    "UPDATE sqlite_schema SET rootpage = 0 WHERE name = 'words_data'",
    "UPDATE sqlite_schema SET type = 'view' WHERE name = 'words_content'",
    "UPDATE sqlite_schema SET sql = replace(sql, 'fts5', 'fts4')",
    "UPDATE sqlite_schema SET sql = replace(sql, 'text', 'text, more')",
    "UPDATE sqlite_schema SET sql = replace(sql, 'remove_diacritics 2', 'tokenchars ''x''')",
    "UPDATE sqlite_schema SET sql = replace(sql, ' v', ' v AS (randomblob(1000000000))')",
    "UPDATE sqlite_schema SET sql = replace(sql, 'c0', 'c0 AS (zeroblob(1000000000))')",
    "DELETE FROM words_data",
    "DELETE FROM words_config",
    "DELETE FROM words_content",
    "UPDATE words_data SET block = zeroblob(3000000)",
    "UPDATE words_data SET block = randomblob(length(block))",
    "UPDATE words_data SET block = x'ffffffffffffffffffffffff'",
    "UPDATE words_data SET block = substr(block, 1, length(block) / 2)",
    "UPDATE words_data SET id = id + 1 WHERE id > 10",
    "UPDATE words_idx SET pgno = 1 << 40",
    "UPDATE words_idx SET term = zeroblob(1000000)",
    "UPDATE words_docsize SET sz = zeroblob(1000000)",
    "UPDATE words_docsize SET sz = NULL",
    "UPDATE words_docsize SET id = -id",
    "UPDATE words_content SET id = -id",
    "UPDATE words_content SET c0 = zeroblob(3000000)",
    "UPDATE words_config SET v = 999",
    "INSERT INTO words_config VALUES ('pgsz', 1 << 40)",
    "INSERT INTO words_config VALUES ('pgsz', 32)",
    "INSERT INTO words_config VALUES ('crisismerge', -1)",
    "INSERT INTO words_config VALUES ('rank', 'bm25(1e308, -1e308)')",
    "INSERT INTO words_config VALUES ('rank', 'highlight(0, ''<'', ''>'')')",
    "INSERT INTO words_config VALUES ('rank', 'load_extension(''/x'')')",
    "PRAGMA page_size = 65536",
    "PRAGMA journal_mode = WAL",
    "PRAGMA user_version = -1",
    "PRAGMA application_id = 7",
    "PRAGMA encoding = 'UTF-16'",
]
"""Run one by one with a writable schema; what SQLite does not let a stranger do, it refuses here."""


class Collected(Files):
    """The three files of a collection without stores; a line of the list is a document of its own."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "c"
        self.path.mkdir()
        with Changing.at(self.path) as made, Words(self.path / WORDS) as words:
            made.state(MADE)
            for number, text in enumerate(TEXTS):
                entry = self._entry(number)
                made.journal.put(entry)
                words.put(entry.store, text * 50)
        self.lines = [self.path / f"{number}.json" for number in range(len(TEXTS))]
        for file, line in zip(self.lines, (self.path / DOCUMENTS).read_bytes().splitlines(), strict=True):
            file.write_bytes(line)
        super().__init__(self.path, [HEADER, WORDS, *(file.name for file in self.lines)], often=[WORDS])
        written = st.builds(Edit, st.just(WORDS), st.just("sql"), st.tuples(st.sampled_from(SQL)))
        kinds = st.sampled_from([*KINDS, "junk", "own"])
        beside = st.builds(Edit, st.sampled_from(BESIDE), st.just("beside"), st.tuples(kinds))
        # What lies beside comes last: SQLite itself would wait for a pipe.
        both = st.tuples(st.lists(written, max_size=2), st.lists(beside, max_size=1))
        by_sql = both.map(lambda lists: [*lists[0], *lists[1]])
        self.cases = st.one_of(self.cases, self.cases, by_sql)

    @staticmethod
    def _entry(number: int) -> Entry:
        digest = f"{number:064x}"
        name = f"{number}.txt"
        return Entry(name, digest, store_name(name, digest), 100, {"year": 1843 + number, "author": "Ada"})

    def attempt(self, case: Sequence[Edit]) -> None:
        apply(self.path, [edit for edit in case if edit.action not in ("sql", "beside")])
        for edit in case:
            if edit.action == "sql":
                self._write(*edit.given)
            elif edit.action == "beside":
                self._put_beside(self.path / edit.name, *edit.given)
        join(self.path / DOCUMENTS, self.lines, case)
        self.use()

    def restore(self, case: Sequence[Edit]) -> None:
        for name in (*BESIDE, f"{HEADER}.tmp"):
            remove(self.path / name)
        put_back(self.path, self.files, self.files)

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        own = Edit(WORDS, "kind", ("sparse",))  # SQLite knows where its file ends
        return super().must_refuse(case) and case[0] != own

    def use(self) -> None:
        collection = Collection(self.path)
        for entry in collection.entries:
            collection.store(entry)
            for condition in CONDITIONS:
                condition.holds(entry)
        for number in scores(self.path / WORDS, "Who keeps the minutes, à Paris?"):
            assert isinstance(number, int)
        verify(self.path / WORDS, [entry.store for entry in collection.entries])
        with Changing.at(self.path) as changing, Words(self.path / WORDS) as words:
            changing.state(MADE)
            wanted = {entry.store for entry in changing.journal.entries.values()}
            words.keep(wanted)
            words.put(self._entry(9).store, "Nobody else.")
            changing.sweep(wanted)
            changing.journal.put(self._entry(9))
            changing.journal.drop(["9.txt"])
            changing.journal.compact()
        Journal(self.path / DOCUMENTS)

    def _write(self, statement: str) -> None:
        with suppress(sqlite3.Error, MemoryError), closing(sqlite3.connect(self.path / WORDS)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute(statement)
            connection.commit()

    def _put_beside(self, path: Path, what: str) -> None:
        """A journal or a log that SQLite may take for one of a process that was killed."""
        remove(path)
        if what == "own":  # one that can be rolled back
            with suppress(sqlite3.Error), closing(sqlite3.connect(self.path / WORDS)) as connection:
                connection.isolation_level = None
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("UPDATE words_config SET v = v")
                data = path.read_bytes() if path.exists() else b""
                connection.execute("ROLLBACK")
                path.write_bytes(data)
        else:
            path.write_bytes(os.urandom(5000))
            if what != "junk":
                apply(self.path, [Edit(path.name, "kind", (what,))])


TARGETS = {"files": Collected}
