"""Questions about documents among others: RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3.4).

Questions and documents are from SQuAD's or HotpotQA's files, or made up (`made_up_articles`).
"""

import hashlib
import os
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, Field, Strict, TypeAdapter, ValidationError, model_validator

from offload_decode.common import files as plain_json
from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.common.files import NotPlain, open_plain
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import made_up_articles
from offload_decode.evals.tasks.base import Context, Question, Task, too_short

MOST_BYTES = 256 * 2**20
_TELL = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words."
)
_INSTRUCTION = f"{_TELL}\n\nThe following are given documents.\n\n"
_NAME = r"(?<!\S)[A-Z0-9][^\s,]*"
_MISSES = 200  # documents that are tried in vain for what is left of the room


@dataclass(frozen=True)
class Item:
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
    asked: tuple[Item, ...]


def read(path: str | Path) -> Questions:
    """Questions in SQuAD's format (v1.1 and v2, JSON; those that are impossible are left out) or HotpotQA's.

    Raises `CorpusError` for a file that cannot be read, is larger than `MOST_BYTES`, or is of neither format.
    """
    try:
        with os.fdopen(open_plain(path, follow=True), "rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (NotPlain, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path} cannot be read: {why}") from error
    if len(raw) > MOST_BYTES:
        raise CorpusError(f"{path} is larger than {MOST_BYTES >> 20} MiB: give a part of it")
    try:
        value = plain_json.parse(raw)
    except ValueError as error:
        raise CorpusError(f"{path} is no JSON ({error}): give a file of SQuAD or HotpotQA") from error
    try:
        hops, found = (2, [*_hotpot(value)]) if isinstance(value, list) else (1, [*_squad(value)])
    except ValidationError as error:
        odd = error.errors()[0]
        where = ".".join(map(str, odd["loc"])) or "the file"
        raise CorpusError(
            f"{path} is not in SQuAD's or HotpotQA's format ({where}: {odd['msg']}): give the JSON file as "
            "it is published"
        ) from error
    if not found:
        raise CorpusError(f"{path} holds no question that has an answer: give another file")
    numbers: dict[str, int] = {}

    def numbered(documents: list[str]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(numbers.setdefault(document, len(numbers)) for document in documents))

    asked = [
        Item(question, answers, numbered(needed), numbered(near)) for question, answers, needed, near in found
    ]
    return Questions(Path(path).name, hashlib.sha256(raw).hexdigest(), hops, tuple(numbers), tuple(asked))


@cache
def ours(hops: int) -> Questions:
    """Questions about made-up articles, which nobody answers without the text."""
    documents = tuple(article.text for article in made_up_articles.articles())
    asked = tuple(Item(one.question, (one.answer,), one.needed) for one in made_up_articles.questions(hops))
    digest = hashlib.sha256(repr((documents, asked)).encode()).hexdigest()
    return Questions("made-up articles", digest, hops, documents, asked)


_Read = tuple[str, tuple[str, ...], list[str], list[str]]
_String = Annotated[str, Strict()]
_Filled = Annotated[_String, Field(pattern=r"\S")]


def _possible(asked: Any) -> Any:
    if not isinstance(asked, list):
        return asked
    return [one for one in asked if not (isinstance(one, dict) and one.get("is_impossible"))]


class _SquadAnswer(BaseModel):
    text: _Filled


class _SquadQuestion(BaseModel):
    question: _Filled
    answers: list[_SquadAnswer]


class _Paragraph(BaseModel):
    context: _Filled
    qas: Annotated[list[_SquadQuestion], BeforeValidator(_possible)]


class _Article(BaseModel):
    paragraphs: list[_Paragraph]


class _Squad(BaseModel):
    data: list[_Article]


class _HotpotQuestion(BaseModel):
    question: _Filled
    answer: _Filled
    context: list[tuple[_Filled, list[_String]]]
    supporting_facts: Annotated[list[Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _of_its_documents(self) -> Self:
        if not all(fact[0] in [title for title, _ in self.context] for fact in self.supporting_facts):
            raise ValueError("a supporting fact is of no document of its question")
        return self


def _squad(value: Any) -> Iterator[_Read]:
    for article in _Squad.model_validate(value).data:
        near = [paragraph.context for paragraph in article.paragraphs]
        for paragraph, asked in ((each, asked) for each in article.paragraphs for asked in each.qas):
            if asked.answers:
                answers = dict.fromkeys(answer.text for answer in asked.answers)
                yield asked.question, tuple(answers), [paragraph.context], near


def _hotpot(value: list[Any]) -> Iterator[_Read]:
    for asked in TypeAdapter(list[_HotpotQuestion]).validate_python(value):
        documents = {title: f"{title}\n{''.join(sentences)}" for title, sentences in asked.context}
        needed = [documents[fact[0]] for fact in asked.supporting_facts]
        yield asked.question, (asked.answer,), needed, list(documents.values())


@dataclass(frozen=True)
class SingleHop(Task):
    """Questions that one document answers, among others: those of its article first, then any.

    Several questions share a text, which holds the documents of all of them; the control holds none of these.
    """

    name: ClassVar[str] = "qa_1"
    max_new_tokens: ClassVar[int] = 32
    exact: ClassVar[bool] = True
    hops: ClassVar[int] = 1
    source: Questions | None = None
    asked: int = 4

    @property
    def questions(self) -> Questions:
        return self.source or ours(self.hops)

    @property
    def per_context(self) -> int:
        return self.asked

    def parameters(self) -> dict[str, Any]:
        return {"asked": self.asked, "file": self.questions.name, "file_sha256": self.questions.sha256}

    def context(self, rng: random.Random, material: Material) -> Context:
        """As many documents as there is room for. Raises `ConfigError` also where there are too few."""
        files = self.questions
        room = material.tokens - material.count(_INSTRUCTION)
        costs = _Costs(material, files.documents)
        wanted = min(self.asked, len(files.asked))
        chosen, needed = costs.chosen(rng.sample(files.asked, len(files.asked)), wanted, room)
        if len(chosen) < wanted:  # those whose documents are the shortest: no draw decides what fits
            shortest = sorted(files.asked, key=lambda one: sum(len(files.documents[at]) for at in one.needed))
            chosen, needed = costs.chosen(shortest, wanted, room)
        if len(chosen) < wanted:
            raise too_short(self, material.tokens)
        near = sorted({at for one in chosen for at in one.near} - needed)
        others = sorted(set(range(len(files.documents))) - needed - set(near))
        around = [*rng.sample(near, len(near)), *rng.sample(others, len(others))]
        taken = costs.fill(sorted(needed), around, room)
        instead = costs.fill([], around, room)
        every = costs.total(instead) + costs.total(needed)
        if len(instead) == len(around) and every < room:
            raise ConfigError(
                f"all documents of {files.name} come to {every:,} tokens, fewer than {material.tokens:,}: "
                "name a larger file, or take a shorter text"
            )
        rng.shuffle(taken)
        rng.shuffle(instead)
        text = costs.fitted(taken, needed)
        at = {one: text.index(f"Document {taken.index(one.needed[0]) + 1}:\n") / len(text) for one in chosen}
        return Context(
            text,
            costs.fitted(instead, set()),
            tuple(
                Question(f"{_TELL}\n\nQuestion: {one.question}", "", one.answers, any_of=True)
                for one in chosen
            ),
            tuple(at[one] if len(one.needed) == 1 else None for one in chosen),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        """Of `A or B?` one, of yes-or-no questions `yes` (the more frequent answer), else the answer to a
        question that begins alike.
        """
        asked = question.text.rsplit("Question: ", 1)[-1]
        if either := _either(asked):
            return rng.choice(either)
        first, *_ = asked.lower().split()
        if first in ("is", "are", "was", "were", "do", "does", "did", "has", "have", "can"):
            return "yes"
        others = [one for one in self.questions.asked if one.question != asked]
        alike = [one for one in others if one.question.lower().startswith(f"{first} ")] or others
        return rng.choice(alike).answers[0] if alike else ""


class MultiHop(SingleHop):
    """Questions that take two documents."""

    name: ClassVar[str] = "qa_2"
    hops: ClassVar[int] = 2


def task_of(questions: Questions, asked: int = 4) -> SingleHop:
    """The task that asks the questions of a file: `qa_2` for HotpotQA's, else `qa_1`."""
    return (MultiHop if questions.hops == 2 else SingleHop)(questions, min(asked, len(questions.asked)))


class _Costs:
    """What documents take of the room for a text."""

    def __init__(self, material: Material, documents: Sequence[str]) -> None:
        self.material, self.documents = material, documents
        self.of = cache(lambda at: material.count(_one(100, documents[at])))

    def total(self, taken: Iterable[int]) -> int:
        return sum(map(self.of, taken))

    def chosen(self, asked: Iterable[Item], count: int, room: int) -> tuple[list[Item], set[int]]:
        """The first `count` questions whose documents fit together, and these documents."""
        chosen: list[Item] = []
        needed: set[int] = set()
        for tried, one in enumerate(asked):
            if len(chosen) == count or tried - len(chosen) == _MISSES:
                break
            together = needed | set(one.needed)
            if self.total(together) <= 0.9 * room:
                chosen.append(one)
                needed = together
        return chosen, needed

    def fill(self, taken: list[int], others: Iterable[int], room: int) -> list[int]:
        """As many of the others besides as there is room for."""
        found, size, misses = list(taken), self.total(taken), 0
        for at in others:
            if size + self.of(at) <= room:
                found.append(at)
                size += self.of(at)
            elif (misses := misses + 1) == _MISSES:
                break
        return found

    def fitted(self, taken: list[int], needed: set[int]) -> str:
        """The documents as a text. Some of the last, which are not needed, are left out of it and of `taken`
        where together they take more tokens than each by itself, and too many.
        """
        while True:
            documents = "".join(_one(number, self.documents[at]) for number, at in enumerate(taken, 1))
            text = _INSTRUCTION + documents.rstrip("\n")
            over = self.material.count(text) - self.material.tokens
            spare = [at for at in taken if at not in needed]
            if over <= 0 or not spare:
                return text
            while over > 0 and spare:
                at = spare.pop()
                taken.remove(at)
                over -= self.of(at)


def _either(asked: str) -> tuple[str, str] | None:
    """The two things of `Which came first, the hen or the egg?`, names of several words whole."""
    parts = re.search(r"^(.*[^,\s]),?\s+or\s+([^?]+?)\s*\?$", asked)
    if parts is None:
        return None
    before, second = parts.groups()
    listed = before.rpartition(", ")[2] if ", " in before else ""
    named = re.search(rf"(?:{_NAME}\s+(?:(?:of|the|for|and|in|de)\s+)*)*{_NAME}$", before)
    first = listed or (named.group() if named else (before.split() or [""])[-1])
    return first, second


def _one(number: int, document: str) -> str:
    return f"Document {number}:\n{document}\n\n"


TASKS: tuple[type[Task], ...] = (SingleHop, MultiHop)
