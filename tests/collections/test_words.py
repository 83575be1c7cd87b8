"""Documents are ranked by the words that they share with a question, whatever a file from elsewhere holds."""

import math
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from offload_decode.collections import words
from offload_decode.collections.words import WORDS, Words, number_of, scores, verify
from offload_decode.common.errors import StoreDamaged

TEXTS = {
    f"stores/{digit * 2}/{digit * 32}.kv": text
    for digit, text in {
        "1": "The brisk lantern is in the harbour, and the harbour is far away from the city.",
        "2": "A lantern, a lantern, and a lantern again.",
        "3": "Nothing of that kind is in the city at all; it is about ships, ships and ships.",
        "4": "Über die Brücke, sagte der Kapitän.",
    }.items()
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with Words(tmp_path / WORDS) as words:
        for store, text in TEXTS.items():
            words.put(store, text)
    return tmp_path / WORDS


def ranked(path: Path, question: str) -> list[int]:
    return list(scores(path, question))


def bm25(question: str, k1: float = 1.2, b: float = 0.75) -> dict[int, float]:
    """The definition (Robertson and Zaragoza 2009, 3.1), by hand."""
    counts = {number_of(store): Counter(re.findall(r"\w+", text.lower())) for store, text in TEXTS.items()}
    mean = sum(counted.total() for counted in counts.values()) / len(counts)
    found: Counter[int] = Counter()
    for word in set(re.findall(r"\w+", question.lower())):
        having = sum(word in counted for counted in counts.values())
        # SQLite takes a word that most documents have for next to nothing.
        weight = max(1e-6, math.log((len(counts) - having + 0.5) / (having + 0.5)))
        for number, counted in counts.items():
            if counted[word]:
                length = 1 - b + b * counted.total() / mean
                found[number] += weight * counted[word] * (k1 + 1) / (counted[word] + k1 * length)
    return dict(found.most_common())


@pytest.mark.parametrize(
    "question",
    ["Where is the brisk lantern?", "ships", "which city has a harbour and ships", "lantern ships"],
)
def test_scores_and_their_order_are_those_of_bm25(path, question):
    assert ranked(path, question) == list(bm25(question))
    assert scores(path, question) == pytest.approx(bm25(question))


def refused(path: Path, match: str | None) -> None:
    """Neither a question nor a change takes the file."""
    for use in (lambda: ranked(path, "lantern"), Words(path).__enter__):
        with pytest.raises(StoreDamaged, match=match) as told:
            use()
        assert len(str(told.value)) < 1000
        assert "\n" not in str(told.value)


def rewrite_schema(path: Path, change: str, *given: object) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(f"UPDATE sqlite_schema SET {change}", given)
        connection.commit()


def test_marks_and_accents_do_not_matter(path):
    number = number_of(next(store for store, text in TEXTS.items() if "Brücke" in text))
    assert ranked(path, "BRUCKE") == ranked(path, "brücke!") == [number]


@pytest.mark.parametrize("question", ["", "?!", '"', "text:", "NEAR(", "* OR -", "absent"])
def test_what_is_no_word_of_a_document_finds_nothing(path, question):
    assert ranked(path, question) == []


def test_what_is_removed_is_not_found(path):
    kept = list(TEXTS)[1:]
    with Words(path) as words:
        words.keep(kept)
        assert [store in words for store in TEXTS] == [False, True, True, True]
    assert ranked(path, "brisk harbour") == []
    assert len(ranked(path, "a is der")) == 3


def test_a_damaged_file_is_told(path):
    path.write_bytes(b"no database" * 1000)
    refused(path, "remove it, and collect again")
    path.unlink()
    with pytest.raises(StoreDamaged, match="is missing"):
        ranked(path, "lantern")


@pytest.mark.parametrize(
    "added",
    [
        "CREATE TABLE more (x)",
        "CREATE VIEW seen AS SELECT load_extension('evil')",
        "CREATE TRIGGER t AFTER INSERT ON words_config BEGIN SELECT 1; END",
    ],
)
def test_other_tables_views_and_triggers_are_refused(path, added):
    with sqlite3.connect(path) as connection:
        connection.execute(added)
    refused(path, "other tables")


def test_a_link_is_not_followed(path):
    path.rename(path.with_name("other"))
    path.symlink_to(path.with_name("other"))
    refused(path, "not a plain file")


def journal_that_names(victim: Path, database: Path) -> bytes:
    """A journal to be rolled back, of one of several databases (sqlite.org/fileformat.html, section 3)."""
    magic, sector = bytes.fromhex("d9d505f920a163d7"), 512
    page = int.from_bytes(database.read_bytes()[16:18], "big")
    pages = database.stat().st_size // page
    header = magic + b"".join(n.to_bytes(4, "big") for n in (0, 1, pages, sector, page))
    name = str(victim).encode()
    numbers = (n.to_bytes(4, "big") for n in (0x40000000 // page + 1, len(name), sum(name)))
    first, length, checksum = numbers
    return header.ljust(sector, b"\0") + first + name + length + checksum + magic


def test_a_journal_from_elsewhere_removes_no_file(path, tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    journal = path.with_name(f"{WORDS}-journal")
    journal.write_bytes(journal_that_names(victim, path))
    refused(path, "is not of a collection")
    assert victim.read_text() == "mine"
    sqlite3.connect(path).execute("SELECT count(*) FROM sqlite_schema").fetchall()
    assert not victim.exists(), "SQLite by itself would have removed it"


@pytest.mark.parametrize("end", ["-wal", "-shm"])
def test_what_we_do_not_write_is_refused(path, end):
    path.with_name(WORDS + end).touch()
    refused(path, "is not of a collection")


def test_a_document_of_many_words_shuts_no_reader_out(path):
    with Words(path) as words:
        words.put(f"stores/55/{'5' * 32}.kv", " ".join(map(str, range(200_000))))
        assert ranked(path, "ships") == list(bm25("ships"))


UNSPACED = {
    "1": ("港口的灯塔是一九零三年建造的，由李明看守。", "谁看守灯塔？"),
    "2": ("市图书馆每天早上八点开门，星期一休息。", "图书馆几点开门？"),
    "3": ("この橋は大正時代に作られ、川を渡る唯一の道です。", "橋はいつ作られましたか。"),
    "4": ("会議の議長は田中さんで、来月東京で開かれます。", "議長はだれですか。"),
    "5": ("박물관은 서울에 있으며 월요일에는 쉽니다.", "서울의 박물관은 언제 쉽니까?"),
}


def test_writing_without_spaces_is_found(tmp_path):
    stores = {digit: f"stores/{digit * 2}/{digit * 32}.kv" for digit in UNSPACED}
    with Words(tmp_path / WORDS) as words:
        for digit, (text, _) in UNSPACED.items():
            words.put(stores[digit], text)
    for digit, (_, question) in UNSPACED.items():
        assert ranked(tmp_path / WORDS, question)[0] == number_of(stores[digit])


def test_what_was_written_verifies_and_leaves_the_file_alone(path):
    before = path.read_bytes()
    verify(path, TEXTS)
    assert path.read_bytes() == before
    for stores in ([*TEXTS][1:], [*TEXTS, f"stores/99/{'9' * 32}.kv"], []):
        with pytest.raises(StoreDamaged, match="differ in"):
            verify(path, stores)


def test_a_text_that_is_not_what_is_searched_is_told(path):
    data = path.read_bytes()
    for word, other in ((b"Nothing of", b"Nothinh of"), (b"brisk lantern is", b"brisk lantern it")):
        assert data.count(word) == 1
        path.write_bytes(data.replace(word, other))
        with pytest.raises(StoreDamaged, match="cannot be used"):
            verify(path, TEXTS)


def test_no_flipped_bit_changes_an_answer_unseen(path):
    data, questions = path.read_bytes(), ("lantern city", "ships", "brücke der kind")
    right = [ranked(path, question) for question in questions]
    spoilt = bytearray(data)
    for bit in range(0, 8 * len(data), 8 * 61 + 5):
        spoilt[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoilt)
        spoilt[bit // 8] ^= 1 << bit % 8
        try:
            verify(path, TEXTS)
            found = [ranked(path, question) for question in questions]
        except StoreDamaged:
            continue
        assert found == right, bit


def test_what_sqlite_says_of_a_file_is_one_short_sentence(path):
    rewrite_schema(path, "name = ?, sql = 'CREATE y' WHERE name = 'words_idx'", "x\n" * 5000)
    refused(path, "cannot be used")


@pytest.mark.parametrize(
    "column", ["c0 AS (zeroblob(1000000000))", "c0 CHECK (randomblob(9))", "c0 DEFAULT (1)"]
)
def test_a_table_that_computes_is_refused(path, column):
    rewrite_schema(path, "sql = replace(sql, 'c0', ?)", column)
    refused(path, "compute something")
    with pytest.raises(StoreDamaged, match="compute something"):
        verify(path, TEXTS)


@pytest.mark.parametrize("sql", [b"CREATE \xff", None, 7])
def test_a_schema_that_is_no_text_is_refused(path, sql):
    rewrite_schema(path, "sql = CAST(? AS TEXT) WHERE name = 'words_idx'", sql)
    refused(path, None)


def test_a_length_that_no_memory_holds_is_told(path, monkeypatch):
    def refuse(connection: sqlite3.Connection) -> None:
        raise MemoryError  # as SQLite's own allocations end

    monkeypatch.setattr(words, "_check", refuse)
    with pytest.raises(StoreDamaged, match="more memory than there is"):
        ranked(path, "lantern")


def test_what_lies_behind_the_last_page_is_not_taken_along(tmp_path):
    """SQLite would not notice terabytes of nothing, and a push would send them."""
    with Words(tmp_path / WORDS):
        pass
    with open(tmp_path / WORDS, "ab") as file:
        file.truncate(1 << 42)
    with pytest.raises(StoreDamaged, match="more bytes than its pages"), Words(tmp_path / WORDS):
        pass
