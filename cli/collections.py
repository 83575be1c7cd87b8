"""Asking a collection: which of its documents get a question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli.client import ServerAddress
from offload_decode.cli.options import RETRIEVAL, byte_count, on_this_machine, option, url_of
from offload_decode.cli.questions import Question, assign
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.journal import Entry
    from offload_decode.prefill_jobs.buckets.collections import RemoteStores, Watching


TOP = 3
CACHE = "20GiB"


@dataclass(frozen=True)
class DocumentChoice:
    """The options that choose documents of a collection. Raises `ConfigError`."""

    top: Annotated[
        int | None,
        option(
            "N",
            f"In a collection: ask the N documents with the best BM25 score.  [default: {TOP}]",
            min=1,
            panel=RETRIEVAL,
        ),
    ] = None
    where: Annotated[
        list[str] | None,
        option(
            "CONDITION",
            "In a collection: ask only documents whose name or metadata match, as in name=2024/*, "
            "author!=Ada or year>=2020; repeatable, and all must match.",
            panel=RETRIEVAL,
        ),
    ] = None
    every: Annotated[bool, option(None, "In a collection: ask every document.", "--all", panel=RETRIEVAL)] = (
        False
    )
    cache: Annotated[
        str | None,
        option(
            "SIZE",
            "For a collection in a bucket: disk space on each machine for fetched stores; the least recently "
            f"asked are removed first.  [default: {CACHE}]",
            panel=RETRIEVAL,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.every and self.top is not None:
            raise ConfigError("--all and --top do not go together: leave one of them out")


class AskedCollection:
    """A collection that is asked. `unmatched`: questions for which `assign` found no document."""

    def __init__(self, collection: Collection, choice: DocumentChoice):
        from offload_decode.collections.collection import Condition

        self.collection = collection
        self.choice = choice
        self.unmatched: list[Question] = []
        conditions = [Condition.parse(one) for one in choice.where or []]
        everything, name = collection.entries, collection.name
        self.entries = [entry for entry in everything if all(one.holds(entry) for one in conditions)]
        if not everything:
            raise ConfigError(f"the collection {name} has no documents: collect a folder that has some")
        if not self.entries:
            raise ConfigError(
                f"--where matches none of the {len(everything):,} documents of {name}: change the condition"
            )

    @cached_property
    def stores(self) -> Mapping[str, Entry]:
        """The document of each store, by the store's address."""
        return {self.collection.address(entry): entry for entry in self.entries}

    def held(self, store: str) -> AbstractContextManager[Path]:
        return self.collection.held(self.stores[store])

    def on_other_machines(self, stores: Iterable[str]) -> RemoteStores | None:
        """What fetches these stores on other machines; None where they have the same path."""
        from offload_decode.prefill_jobs.buckets.collections import RemoteCollection

        if isinstance(self.collection, RemoteCollection):
            return self.collection.stores
        for store in stores:
            self.collection.store(self.stores[store])
        return None

    def documents(self, question: str) -> Sequence[Entry]:
        """The documents that get a question, the likeliest first; none where no document has a word of it."""
        if self.choice.every:
            return self.entries
        return list(islice(self._likely(question), self.choice.top or TOP))

    def together(self, question: str, most: int | None) -> Sequence[Entry]:
        """The documents that answer a question together: as `documents`, without copies."""
        from offload_decode.collections.together import distinct

        return list(islice(distinct(self._likely(question)), most))

    def _likely(self, question: str) -> Iterator[Entry]:
        found = (entry for entry, _ in self.collection.scored(question))
        return (entry for entry in found if self.collection.address(entry) in self.stores)

    def assign(self, questions: Sequence[Question]) -> dict[str, list[Question]]:
        """The questions for each store, or in `unmatched`. Raises `ConfigError` for an unknown document."""
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
                    "those to ask: give its name in the collection"
                )
            return [by_name[named]]

        return assign(questions, list(self.stores), of)


@contextmanager
def open_collection(
    stores: Sequence[Path], address: ServerAddress | None, choice: DocumentChoice, watching: Watching
) -> Iterator[AskedCollection | None]:
    """The collection among `stores`; None where they are stores. Raises `ConfigError` for a mixture."""
    collections: list[Path] = []
    if address is None:
        from offload_decode.collections.collection import is_collection

        collections = [store for store in stores if _is_remote(store) or is_collection(store)]
    if not collections:
        for store in stores:
            on_this_machine(store)
        if any((choice.top, choice.where, choice.every, choice.cache)):
            raise ConfigError("--top, --all, --where and --cache need a collection, and none is given")
        yield None
        return
    if len(stores) > 1:
        raise ConfigError(f"{url_of(collections[0]) or collections[0]} is a collection: ask it alone")
    if url := url_of(collections[0]):
        from offload_decode.prefill_jobs.buckets.collections import RemoteCollection

        with RemoteCollection.opened(url, byte_count(choice.cache or CACHE), watching) as remote:
            yield AskedCollection(remote, choice)
        return
    if choice.cache is not None:
        raise ConfigError("--cache needs a collection in a bucket, and this one is on this machine")

    from offload_decode.collections.collection import Collection

    yield AskedCollection(Collection(collections[0]), choice)


def _is_remote(store: Path) -> bool:
    if (url := url_of(store)) is None:
        return False
    from offload_decode.prefill_jobs.buckets.collections import is_collection_at

    return is_collection_at(url)
