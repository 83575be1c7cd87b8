"""A collection that is asked: which of its documents a question is put to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.questions import Question, assign
from cli.remote import Reached
from offload_decode.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.collections.journal import Entry


TOP = 3


@dataclass(frozen=True)
class Choosing:
    """Which documents of a collection are asked, as it was written."""

    every: bool = False
    top: int | None = None
    where: tuple[str, ...] = ()


def choosing(
    top: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of a collection: ask the N documents whose words (BM25) speak most for the question.  "
            f"[default: {TOP}]",
            min=1,
            show_default=False,
        ),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Of a collection: only documents whose name or metadata are so: name=2024/*, author!=Ada, "
            "year>=2020; repeatable, and all must hold.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Of a collection: ask every document.", show_default=False)
    ] = False,
) -> Choosing:
    """The options that choose documents."""
    if every and top is not None:
        raise ConfigError("--all asks every document, and --top the first few: give one of them")
    return Choosing(every, top, tuple(where or ()))


class Collected:
    """A collection that is asked."""

    def __init__(self, path: Path, choosing: Choosing):
        from offload_decode.collections.collection import Collection
        from offload_decode.collections.where import Condition

        self.collection = Collection(path)
        self.choosing = choosing
        conditions = [Condition.parse(one) for one in choosing.where]
        self.entries = [
            entry for entry in self.collection.entries if all(one.holds(entry) for one in conditions)
        ]
        if not self.collection.entries:
            raise ConfigError(f"the collection {path} has no documents: collect a folder that has some")

        if not self.entries:
            raise ConfigError(
                f"--where leaves none of the {len(self.collection.entries):,} documents of {path}: ask others"
            )

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of the document that each store holds."""
        return {self._store(entry): entry.name for entry in self.entries}

    def documents(self, question: str) -> Sequence[Entry]:
        """Those that a question is put to, the likeliest first; none where no document has a word of it."""
        if self.choosing.every:
            return self.entries
        from offload_decode.collections.words import WORDS, ranked

        found = ranked(self.collection.path / WORDS, question)
        return [self._numbered[one] for one in found if one in self._numbered][: self.choosing.top or TOP]

    @cached_property
    def _numbered(self) -> dict[int, Entry]:
        from offload_decode.collections.words import number_of

        return {number_of(entry.store): entry for entry in self.entries}

    def assign(self, questions: Sequence[Question]) -> dict[str, list[Question]]:
        """The questions of each store. Raises `ConfigError` for a document that there is not, and for a
        question that no document has a word of.
        """
        by_name = {entry.name: self._store(entry) for entry in self.entries}

        def of(question: Question) -> Sequence[str]:
            named = question.extra.get("document", question.store)
            if named is None:
                if chosen := self.documents(question.text):
                    return [self._store(entry) for entry in chosen]
                raise ConfigError(
                    f"line {question.line} of the questions has no word that a document has: name its "
                    '"document", or give --all'
                )
            if not isinstance(named, str) or named not in by_name:
                raise ConfigError(
                    f"line {question.line} of the questions asks the document {named}, which is not among "
                    "those to ask: give its name as the collection has it"
                )
            return [by_name[named]]

        return assign(questions, list(by_name.values()), of)

    def _store(self, entry: Entry) -> str:
        return str(self.collection.store(entry))


def collected_of(stores: Sequence[Path], reached: Reached | None, choosing: Choosing) -> Collected | None:
    """The collection that is asked; None where it is stores. Raises `ConfigError` for both at once."""
    collections: list[Path] = []
    if reached is None:
        from offload_decode.collections.collection import is_collection

        collections = [store for store in stores if is_collection(store)]
    if not collections:
        if choosing != Choosing():
            raise ConfigError("--top, --all and --where are of a collection here, and none is given")
        return None
    if len(stores) > 1:
        raise ConfigError(f"{collections[0]} is a collection: ask it alone")
    return Collected(collections[0], choosing)
