"""--together: one answer from several stores, or from several documents of a collection."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.collections import AskedCollection
from offload_decode.cli.limits import AskOptions, opener_of
from offload_decode.cli.options import RETRIEVAL, option
from offload_decode.cli.output import Progress
from offload_decode.cli.questions import Question, assign
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.collections.journal import Entry
    from offload_decode.collections.together import Talk
    from offload_decode.planning.opening import Opener
    from offload_decode.prefill_jobs.on_ray.asking import JointQuestion


@dataclass(frozen=True)
class TogetherChoice:
    """The options of one answer from several stores. Raises `ConfigError`."""

    together: Annotated[
        int | None,
        option(
            "N",
            "Give one answer from N documents of a collection, those with the best BM25 score, or from the N "
            "stores that are named; not exact attention to all of them, but for --join exact.",
            min=1,
            panel=RETRIEVAL,
        ),
    ] = None
    join: Annotated[
        str | None,
        option(
            "WAY",
            "With --together: mixture, product or pced (join the distributions of the next token), read "
            "(answer from the passages that were attended to), or exact (prefill the documents as one store, "
            "which is kept).  [default: mixture]",
            panel=RETRIEVAL,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.join is not None and self.together is None:
            raise ConfigError("--join says how --together joins: give --together N too, or leave it out")
        if self.join is not None and self.join not in (joins := _joins()):
            raise ConfigError(f"there is no --join {self.join}: choose {', '.join(joins)}")

    @property
    def way(self) -> str:
        return self.join or "mixture"

    @property
    def settings(self) -> dict[str, object]:
        """What a line of answers says of it."""
        return {} if self.together is None else {"together": self.together, "join": self.way}

    def check(self, stores: Sequence[Path], collection: AskedCollection | None) -> None:
        """Raise `ConfigError` where these stores, or so many, are not asked in this way."""
        count, places = len(stores), [os.path.realpath(store) for store in stores]
        for store, place in zip(stores, places, strict=True):
            if self.together is not None and places.count(place) > 1:
                raise ConfigError(f"the store {store} is given twice, and would count twice: give it once")
        if self.together is None:
            if count > 1:
                raise ConfigError(
                    f"{count} stores are given: give --together {count} for one answer from all of them, or "
                    "put the question in quotation marks"
                )
        elif collection is None and count != self.together:
            raise ConfigError(
                f"--together {self.together} takes as many stores, and {output.count(count, 'store')} "
                f"{'is' if count == 1 else 'are'} given: give --together {count}, or a collection"
            )
        elif collection is not None and (collection.choice.every or collection.choice.top is not None):
            raise ConfigError("--together, --top and --all each say how many documents: leave the others out")

    def assign(
        self, questions: Sequence[Question], stores: Sequence[Path], collection: AskedCollection | None
    ) -> dict[str, list[Question]]:
        """The questions by the addresses of the documents that answer each: where others are chosen, because
        a collection has changed, it is asked again. Those that no document speaks to go to the collection's
        `unmatched`. Raises `ConfigError` for a question that names its store.
        """
        asked: dict[int, str] = {}  # by its line
        for question in questions:
            if question.store is not None or "document" in question.extra:
                raise ConfigError(
                    f"line {question.line} of the questions names its store or document, and --together asks "
                    "several: leave one of them out"
                )
            addresses = [str(store) for store in stores]
            if collection is not None:
                entries = collection.together(question.text, self.together)
                addresses = [collection.collection.address(entry) for entry in entries]
            if addresses:
                asked[question.line] = " + ".join(addresses)
            elif collection is not None:
                collection.unmatched.append(question)
        put = [question for question in questions if question.line in asked]
        return assign(put, list(dict.fromkeys(asked.values())), lambda question: [asked[question.line]])


def _joins() -> Sequence[str]:
    from offload_decode.collections.together import JOINS

    return JOINS


def refuse_others(choice: TogetherChoice, server: bool, workers: bool, grounded: bool, check: bool) -> None:
    """Raise `ConfigError` for --together with a server, with workers that share one question, or with a check
    by one store; and where answers are to be grounded that come from no store.
    """
    for other, given in (("--server", server), ("--workers", workers), ("--check", check)):
        if choice.together is not None and given:
            raise ConfigError(f"--together and {other} do not go together: leave one of them out")
    if grounded and choice.join == "read":
        raise ConfigError("--join read and --only-grounded do not go together: leave one of them out")


@dataclass
class Together:
    """The stores that give one answer: of a `collection`, or those given. `least`: what it must be grounded
    by, if that is asked for.
    """

    stores: Sequence[Path]
    collection: AskedCollection | None
    choice: TogetherChoice
    options: AskOptions
    cites: bool = False
    least: float | None = None
    opener: Opener = field(init=False)

    def __post_init__(self) -> None:
        self.opener = opener_of(self.options)

    @contextmanager
    def opened(self, question: str) -> Iterator[Talk]:
        """The stores for a question, open to be asked. Raises `ConfigError` where no document has a word of
        it, and for stores of several models; also what opening raises.
        """
        from offload_decode.collections.together import Talk, weights
        from offload_decode.prefill_jobs.joined import opened_together

        with ExitStack() as held:
            weigh: Callable[[str], Sequence[float] | None]
            entries = self._entries(question)
            if self.collection is None:
                names = addresses = [str(store) for store in self.stores]
                paths, weigh = list(self.stores), _alike
            else:
                own = self.collection.collection
                paths = [held.enter_context(own.held(entry)) for entry in entries]
                names = [entry.name for entry in entries]
                addresses = [own.address(entry) for entry in entries]
                weigh = partial(weights, own, entries=entries)
            shown = (held.enter_context(Progress()),) if self.choice.way == "exact" else ()
            least = self.least is not None
            opened = opened_together(self.opener, paths, self.choice.way, self.cites, least, *shown)
            joint = held.enter_context(opened)
            yield Talk(joint, self.choice.way, names, addresses, weigh, self.least or 0.0)

    def question(self, question: str) -> JointQuestion:
        """A question as workers on other machines take it. Raises as `opened`, before anything is opened."""
        from offload_decode.collections.together import weights
        from offload_decode.prefill_jobs.on_ray.asking import JointQuestion

        way, entries = self.choice.way, self._entries(question)
        if self.collection is None:
            names = tuple(map(str, self.stores))
            return JointQuestion(tuple(map(os.path.abspath, names)), question, way, names, names, None)
        own = self.collection.collection
        addresses, names = tuple(map(own.address, entries)), tuple(entry.name for entry in entries)
        remote = self.collection.on_other_machines(addresses) is not None
        stores = addresses if remote else tuple(map(os.path.abspath, addresses))
        given = tuple(weights(own, question, entries))
        return JointQuestion(stores, question, way, names, addresses, given)

    def _entries(self, question: str) -> Sequence[Entry]:
        if self.collection is None:
            return ()
        entries = self.collection.together(question, self.choice.together)
        if not entries:
            raise ConfigError("no document contains a word of the question: rephrase it")
        # The same documents are found again as one, whichever was the best.
        return sorted(entries) if self.choice.way == "exact" else entries


def _alike(question: str) -> None:
    """No weights: all stores begin alike."""
