"""A collection that is asked: which of its documents a question is put to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli.client import Reached
from offload_decode.cli.options import byte_count, on_this_machine, url_of
from offload_decode.cli.questions import Question, assign
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.journal import Entry
    from offload_decode.prefill_jobs.buckets.collections import FarStores, Watching


TOP = 3
CACHE = "20GiB"


@dataclass(frozen=True)
class Choosing:
    """Which documents of a collection are asked, and how much of one in a bucket is kept here, as it was
    written.
    """

    every: bool = False
    top: int | None = None
    where: tuple[str, ...] = ()
    cache: str | None = None


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
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Of a collection in a bucket: most disk space on each machine for stores that were "
            f"fetched; those that were asked longest ago leave.  [default: {CACHE}]",
            show_default=False,
        ),
    ] = None,
) -> Choosing:
    """The options that choose documents."""
    if every and top is not None:
        raise ConfigError("--all asks every document, and --top the first few: give one of them")
    return Choosing(every, top, tuple(where or ()), cache)


class Collected:
    """A collection that is asked. unmatched: questions that were assigned to none of its documents."""

    def __init__(self, collection: Collection, choosing: Choosing):
        from offload_decode.collections.collection import Condition

        self.collection = collection
        self.choosing = choosing
        self.unmatched: list[Question] = []
        conditions = [Condition.parse(one) for one in choosing.where]
        self.entries = [
            entry for entry in self.collection.entries if all(one.holds(entry) for one in conditions)
        ]
        if not self.collection.entries:
            raise ConfigError(
                f"the collection {collection.name} has no documents: collect a folder that has some"
            )
        if not self.entries:
            raise ConfigError(
                f"--where leaves none of the {len(collection.entries):,} documents of {collection.name}: "
                "ask others"
            )

    @cached_property
    def stores(self) -> Mapping[str, Entry]:
        """The document that each store holds, by what users call the store."""
        return {self.collection.address(entry): entry for entry in self.entries}

    def held(self, store: str) -> AbstractContextManager[Path]:
        """Where one of `stores` lies while it is asked."""
        return self.collection.held(self.stores[store])

    def on_other_machines(self, stores: Iterable[str]) -> FarStores | None:
        """How these stores come to other machines: from a bucket, or None where those have the collection at
        the same path. Raises `StoreDamaged` where they could not open one.
        """
        from offload_decode.prefill_jobs.buckets.collections import FarCollection

        if isinstance(self.collection, FarCollection):
            return self.collection.stores
        for store in stores:
            self.collection.store(self.stores[store])
        return None

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
        """The questions of each store. One that no document has a word of is of none, and is among the
        `unmatched`. Raises `ConfigError` for a document that there is not.
        """
        by_name = {entry.name: store for store, entry in self.stores.items()}

        def of(question: Question) -> Sequence[str]:
            named = question.extra.get("document", question.store)
            if named is None:
                chosen = self.documents(question.text)
                if not chosen:
                    self.unmatched.append(question)
                return [by_name[entry.name] for entry in chosen]
            if not isinstance(named, str) or named not in by_name:
                raise ConfigError(
                    f"line {question.line} of the questions asks the document {named}, which is not among "
                    "those to ask: give its name as the collection has it"
                )
            return [by_name[named]]

        return assign(questions, list(self.stores), of)


@contextmanager
def collected_of(
    stores: Sequence[Path], reached: Reached | None, choosing: Choosing, watching: Watching
) -> Iterator[Collected | None]:
    """The collection that is asked; None where it is stores. Raises `ConfigError` for both at once, and for
    stores in buckets.
    """
    collections: list[Path] = []
    if reached is None:
        from offload_decode.collections.collection import is_collection

        collections = [store for store in stores if _is_far(store) or is_collection(store)]
    if not collections:
        for store in stores:
            on_this_machine(store)
        if choosing != Choosing():
            raise ConfigError("--top, --all, --where and --cache are of a collection here, and none is given")
        yield None
        return
    if len(stores) > 1:
        raise ConfigError(f"{url_of(collections[0]) or collections[0]} is a collection: ask it alone")
    with _opened(collections[0], choosing, watching) as collection:
        yield Collected(collection, choosing)


def _is_far(store: Path) -> bool:
    if (url := url_of(store)) is None:
        return False
    from offload_decode.prefill_jobs.buckets.collections import lies_at

    return lies_at(url)


@contextmanager
def _opened(path: Path, choosing: Choosing, watching: Watching) -> Iterator[Collection]:
    from offload_decode.collections.collection import Collection

    if url := url_of(path):
        from offload_decode.prefill_jobs.buckets.collections import FarCollection

        with FarCollection.opened(url, byte_count(choosing.cache or CACHE), watching) as far:
            yield far
        return
    if choosing.cache is not None:
        raise ConfigError("--cache is of a collection in a bucket, and this one lies here")
    yield Collection(path)
