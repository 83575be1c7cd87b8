"""Questions and the documents that answer them: SQuAD's and HotpotQA's files, and a small set of our own."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from indexes.plain_files import NotPlain, open_plain
from offload_decode import plain_json
from offload_decode.errors import CorpusError
from offload_decode.evals.haystack import python_topics_by_name

MOST_BYTES = 256 * 2**20
_OURS = Path(__file__).with_name("questions.json")
_PASSAGE = 800  # characters from which on a passage of the topics ends


@dataclass(frozen=True)
class Asked:
    """A question, each way of saying its answer, and documents by number: those that are needed to answer it,
    and others about the same things.
    """

    question: str
    answers: tuple[str, ...]
    needed: tuple[int, ...]
    near: tuple[int, ...] = ()


@dataclass(frozen=True, repr=False)
class Questions:
    """Questions of one file, and its documents; `hops` is 1, or 2 where an answer takes several of them."""

    name: str
    sha256: str
    hops: int
    documents: tuple[str, ...]
    asked: tuple[Asked, ...]


def read(path: str | Path) -> Questions:
    """Questions in SQuAD's format (v1.1 and v2, JSON; those that are impossible are left out) or HotpotQA's.

    Raises `CorpusError` for a file that cannot be read, is larger than `MOST_BYTES`, or is of neither format.
    """
    raw = _bytes(Path(path))
    try:
        value = plain_json.parse(raw)
    except ValueError as error:
        raise CorpusError(f"{path} is no JSON ({error}): give a file of SQuAD or HotpotQA") from error
    try:
        hops, found = (2, [*_hotpot(value)]) if isinstance(value, list) else (1, [*_squad(value)])
    except _Odd as odd:
        raise CorpusError(
            f"{path} is not in SQuAD's or HotpotQA's format: {odd}; give the JSON file as it is published"
        ) from odd
    if not found:
        raise CorpusError(f"{path} holds no question that has an answer: give another file")
    numbers: dict[str, int] = {}

    def numbered(documents: list[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(numbers.setdefault(document, len(numbers)) for document in documents))

    asked = [
        Asked(question, answers, numbered(needed), numbered(near))
        for question, answers, needed, near in found
    ]
    return Questions(Path(path).name, hashlib.sha256(raw).hexdigest(), hops, tuple(numbers), tuple(asked))


@cache
def ours(hops: int) -> Questions:
    """A small set over Python's documentation topics, for tests and a first look.

    A question is left out where this Python's topics say it in other words. Raises `CorpusError` where Python
    came without them.
    """
    documents = tuple(_passages())
    flat = [_flat(document) for document in documents]
    raw = _OURS.read_bytes()
    asked = []
    for entry in plain_json.parse(raw)["one" if hops == 1 else "two"]:
        places = [[at for at, text in enumerate(flat) if part in text] for part in entry["evidence"]]
        if all(places):
            needed = tuple(dict.fromkeys(at for found in places for at in found))
            asked.append(Asked(entry["question"], tuple(entry["answers"]), needed))
    if not asked:
        raise CorpusError("this Python's documentation topics answer none of our questions: give a file")
    digest = hashlib.sha256(raw + "\n".join(documents).encode()).hexdigest()
    return Questions("questions about Python's documentation topics", digest, hops, documents, tuple(asked))


def _passages() -> Iterator[str]:
    """The topics, cut at paragraphs; a paragraph of several topics stands in the shortest of them."""
    seen: set[str] = set()
    for _, text in sorted(python_topics_by_name().items(), key=lambda topic: (len(topic[1]), topic[0])):
        title = text.split("\n", 1)[0].strip()
        passage = ""
        for paragraph in re.split(r"\n\s*\n", text):
            if _flat(paragraph) in seen:
                continue
            seen.add(_flat(paragraph))
            passage += ("\n\n" if passage else "") + paragraph.strip("\n")
            if len(passage) >= _PASSAGE:
                yield f"{title}\n\n{passage}"
                passage = ""
        if passage:
            yield f"{title}\n\n{passage}"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _bytes(path: Path) -> bytes:
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except NotPlain as error:
        raise CorpusError(f"{path} cannot be read: {error}") from error
    except OSError as error:
        raise CorpusError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(raw) > MOST_BYTES:
        raise CorpusError(f"{path} is larger than {MOST_BYTES >> 20} MiB: give a part of it")
    return raw


_Read = tuple[str, tuple[str, ...], list[str], list[str]]


class _Odd(Exception):
    """What is not as the format has it."""


def _get(value: Any, name: str, kind: type, what: str) -> Any:
    found = value.get(name) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise _Odd(f"{what} has no proper '{name}'")
    return found


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Odd(f"{what} is no text")
    return value


def _squad(value: Any) -> Iterator[_Read]:
    for article in _get(value, "data", list, "the file"):
        paragraphs = _get(article, "paragraphs", list, "an article")
        near = [_text(_get(p, "context", str, "a paragraph"), "a paragraph's context") for p in paragraphs]
        for paragraph, context in zip(paragraphs, near, strict=True):
            for asked in _get(paragraph, "qas", list, "a paragraph"):
                question = _text(_get(asked, "question", str, "a question"), "a question")
                if asked.get("is_impossible"):
                    continue
                answers = [
                    _text(_get(answer, "text", str, "an answer"), "an answer")
                    for answer in _get(asked, "answers", list, "a question")
                ]
                if answers:
                    yield question, tuple(dict.fromkeys(answers)), [context], near


def _hotpot(value: list[Any]) -> Iterator[_Read]:
    for asked in value:
        question = _text(_get(asked, "question", str, "a question"), "a question")
        answer = _text(_get(asked, "answer", str, "a question"), "an answer")
        documents: dict[str, str] = {}
        for titled in _get(asked, "context", list, "a question"):
            if not isinstance(titled, list) or len(titled) != 2 or not isinstance(titled[1], list):
                raise _Odd("a document is no title with a list of sentences")
            title = _text(titled[0], "a document's title")
            documents[title] = f"{title}\n{''.join(_sentence(part) for part in titled[1])}"
        needed = []
        for fact in _get(asked, "supporting_facts", list, "a question"):
            if not isinstance(fact, list) or not fact or fact[0] not in documents:
                raise _Odd("a supporting fact is of no document of its question")
            needed.append(documents[fact[0]])
        if not needed:
            raise _Odd("a question has no supporting facts")
        yield question, (answer,), needed, list(documents.values())


def _sentence(value: Any) -> str:
    if not isinstance(value, str):
        raise _Odd("a sentence is no text")
    return value
