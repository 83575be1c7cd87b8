"""--together: one answer from several stores, or from several documents of a collection."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.collections import CACHE, AskedCollection
from offload_decode.cli.limits import AskOptions, opener_of
from offload_decode.cli.options import RETRIEVAL, byte_count, option
from offload_decode.cli.output import Progress
from offload_decode.cli.questions import Question, assign
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.engine.conversation import Sampler
    from offload_decode.engine.joint import Joint
    from offload_decode.planning.opening import Opener
    from offload_decode.types import Answer


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
                entries = collection.documents(question.text, self.together)
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


def refuse_others(choice: TogetherChoice, server: bool, workers: bool, grounded: bool) -> None:
    """Raise `ConfigError` for --together with what asks stores elsewhere, or must be grounded in one."""
    for other, given in (("--server", server), ("--workers", workers), ("--only-grounded", grounded)):
        if choice.together is not None and given:
            raise ConfigError(f"--together and {other} do not go together: leave one of them out")


@dataclass
class Talk:
    """Stores that are open and answer as one. `names`: what users call their documents, with their
    `addresses`; `weigh`: the weights of the documents for a question. With --join exact, `joint` has the one
    store that was made of all.
    """

    joint: Joint
    way: str
    names: Sequence[str]
    addresses: Sequence[str]
    weigh: Callable[[str], Sequence[float] | None]

    def stream(self, question: str, most: int, sampler: Sampler) -> Iterator[str]:
        """An answer piece by piece; the conversation goes on from there."""
        return self.joint.stream(question, self.weigh(question), most, sampler)

    def answer(self, question: str, most: int, sampler: Sampler | None = None) -> Answer:
        """An answer as a whole."""
        return self.joint.answer(question, self.weigh(question), most, sampler)

    def fields(self) -> dict[str, object]:
        """What JSON says of the last answer beside its text: its documents; where their distributions were
        joined, also their shares of it, and of each token where the answer cites.
        """
        documents: list[dict[str, object]] = [
            {"document": name, "store": address}
            for name, address in zip(self.names, self.addresses, strict=True)
        ]
        told: dict[str, object] = {"exact": self.way == "exact", "documents": documents}
        if self._joins:
            for document, share in zip(documents, self.joint.shares(), strict=True):
                document["share"] = share
            if self.joint.cites:
                told["carried"] = [{"token": text, "shares": shares} for text, shares in self._carried()]
        return {"joined": told | {"notes": self.notes()}}

    def notes(self) -> list[str]:
        """What a reader of the last answer should know of it."""
        from offload_decode.collections.together import notes

        names = [output.one_line(name) for name in self.names]
        alone = None if (alone := getattr(self.joint, "alone", None)) is None else names[alone]
        shares, first = self.joint.shares() if self._joins else (), self.joint.talks[0]
        manifests = [talk.store.manifest for talk in self.joint.talks]
        return list(notes(self.way, names, shares, manifests, first.selector.name, alone))

    def carried(self) -> str:
        """Runs of the last answer's tokens, each with the document that gave most to them."""
        lines = []
        for name, run in groupby(self._carried(), lambda one: self.names[one[1].index(max(one[1]))]):
            own = list(run)
            share = sum(max(shares) for _, shares in own) / len(own)
            text = " ".join("".join(text for text, _ in own).split())
            lines.append(f"{share:4.0%}  {output.one_line(name)}: {text}")
        return "\n".join(lines)

    @property
    def _joins(self) -> bool:
        return bool(self.joint.carried) and self.way != "exact"

    def _carried(self) -> list[tuple[str, Sequence[float]]]:
        """The tokens of the last answer, each with the text that it completes and the share of each document,
        where there are several.
        """
        from offload_decode.engine.text import Pieces

        if not self._joins:
            return []
        pieces, carried = Pieces(self.joint.talks[0].tokenizer), self.joint.carried
        texts = [pieces.push(one.token) for one in carried]
        texts[-1] += pieces.rest()
        return [(text, one.shares) for text, one in zip(texts, carried, strict=True)]


@dataclass
class Together:
    """The stores that give one answer: of a `collection`, or those given."""

    stores: Sequence[Path]
    collection: AskedCollection | None
    choice: TogetherChoice
    options: AskOptions
    cites: bool = False
    opener: Opener = field(init=False)

    def __post_init__(self) -> None:
        self.opener = opener_of(self.options)

    @contextmanager
    def opened(self, question: str) -> Iterator[Talk]:
        """The stores for a question, open to be asked. Raises `ConfigError` where no document has a word of
        it, and for stores of several models; also what opening raises.
        """
        from offload_decode.collections.together import weights
        from offload_decode.engine.joint import Joint
        from offload_decode.engine.reading import Reading

        with ExitStack() as held:
            weigh: Callable[[str], Sequence[float] | None]
            if self.collection is None:
                names = addresses = [str(store) for store in self.stores]
                paths, weigh = list(self.stores), _alike
            else:
                entries = self.collection.documents(question, self.choice.together)
                if not entries:
                    raise ConfigError("no document contains a word of the question: rephrase it")
                if self.choice.way == "exact":
                    entries = sorted(entries)  # the same documents are found again, whichever was the best
                paths = [held.enter_context(self.collection.collection.held(entry)) for entry in entries]
                names = [entry.name for entry in entries]
                addresses = [self.collection.collection.address(entry) for entry in entries]
                weigh = partial(weights, self.collection.collection, entries=entries)
            if (way := self.choice.way) == "exact":
                paths, weigh = [held.enter_context(self._joined(paths))], _alike
            engines = self.opener.open_all([str(path) for path in paths])
            if way == "read":
                joint: Joint = Reading(engines)
            else:
                joint = Joint(engines, "mixture" if way == "exact" else way, self.cites)
            yield Talk(joint, way, names, addresses, weigh)

    @contextmanager
    def _joined(self, stores: Sequence[Path]) -> Iterator[Path]:
        from offload_decode.prefill_jobs.joined import joined_store

        loaded = self.opener.open_all([str(store) for store in stores])[0].loaded
        with Progress() as progress, joined_store(stores, loaded, byte_count(CACHE), progress) as path:
            yield path


def _alike(question: str) -> None:
    """No weights: all stores begin alike."""
