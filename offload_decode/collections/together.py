"""Several documents that answer one question: which ways there are, with what weights they begin, and what a
reader of the answer should know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry
from offload_decode.engine.conversation import Sampler
from offload_decode.engine.joint import Dissent, Joint
from offload_decode.engine.reading import Reading
from offload_decode.engine.text import Pieces
from offload_decode.store.format import Manifest
from offload_decode.types import Answer

JOINS = ("mixture", "product", "pced", "read", "exact")
SOFTNESS = 1.0
"""A document's weight is the softmax of its BM25 score over this. Of 350 questions for one fact, the right
one of 16 documents begins with a weight of 0.79 in the geometric mean, with 2 of 0.50 and with 4 of 0.22
(benchmarks/together.py). How many answers are right with which was not measured.
"""
EVEN = 0.1
"""So much of the weight is dealt out evenly: BM25 chose the documents, and whoever is chosen is heard."""
SHOWN = 60  # characters of what a document would have said
LEAST = 0.01  # of an answer: a document that gave less is not named


def distinct(found: Iterable[Entry]) -> Iterator[Entry]:
    """The documents, but for copies, whose bytes are those of one before: they would count twice, and keep
    others out.
    """
    seen = set[str]()
    for entry in found:
        if entry.sha256 not in seen:
            seen.add(entry.sha256)
            yield entry


def weights(collection: Collection, question: str, entries: Sequence[Entry]) -> list[float]:
    """A weight above 0 for each document, by its words: their sum is 1. Raises `StoreDamaged`."""
    found = {entry.store: score for entry, score in collection.scored(question)}
    own = np.array([found.get(entry.store, 0.0) for entry in entries]) / SOFTNESS
    raised = np.exp(own - own.max())
    return [float(one) for one in (1 - EVEN) * raised / raised.sum() + EVEN / len(entries)]


def notes(
    way: str,
    names: Sequence[str],
    shares: Sequence[float],
    manifests: Sequence[Manifest],
    selector: str,
    alone: str | None = None,
    dissents: Sequence[Dissent] = (),
) -> Iterator[str]:
    """What is approximate in an answer from the documents of these `names`, what each gave to it, where that
    is known (`shares`), and who would have said otherwise (`dissents`). `manifests`: of the stores that were
    asked; `alone`: the document that answered by itself, because no passage was found to be read.
    """
    count = f"{len(names)} document{'' if len(names) == 1 else 's'}"
    ordered = sorted(zip(shares, names, strict=False), reverse=True)
    given = ", ".join(f"{name} {share:.0%}" for share, name in ordered if share >= LEAST)
    if way == "exact":
        part = "" if selector == "dense" else f", of which each step attends to what '{selector}' chooses"
        yield f"Answered from {count}, prefilled as one text with exact attention{part}."
    elif way == "read" and alone is not None:
        yield f"No passage of {count} was attended to in particular: answered from {alone} alone."
    elif way == "read":
        yield f"Answered from passages of {count}, read as one text: what stands in no passage is not seen."
    else:
        yield f"Joined by {way} from {count}, none of which sees another{given and ': '}{given}."
    for one in dissents:
        said = " ".join(one.text.split())[-SHOWN:]
        yield f"{names[one.document]} would say otherwise: “{said}…” ({one.probability:.0%})."
    for part in dict.fromkeys(part for own in manifests for part in own.approximations()):
        yield f"Stores are approximate: {part}."


@dataclass
class Talk:
    """Stores that are open and answer as one. `names`: what users call their documents, with their
    `addresses`; `weigh`: the weights of the documents for a question. With --join exact, `joint` has the one
    store that was made of all. `least`: an answer that is grounded less is not given: neither are its
    words, nor who dissents from it.
    """

    joint: Joint
    way: str
    names: Sequence[str]
    addresses: Sequence[str]
    weigh: Callable[[str], Sequence[float] | None]
    least: float = 0.0

    def stream(self, question: str, most: int, sampler: Sampler) -> Iterator[str]:
        """An answer piece by piece; the conversation goes on from there."""
        return self.joint.stream(question, self._weights(question), most, sampler)

    def answer(self, question: str, most: int, sampler: Sampler | None = None) -> Answer:
        """An answer as a whole."""
        return self.joint.answer(question, self._weights(question), most, sampler)

    def _weights(self, question: str) -> Sequence[float] | None:
        """One store that was made of all has no weights."""
        return None if self.way == "exact" else self.weigh(question)

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
            if self.joint.cites and self._given:
                told["carried"] = [{"token": text, "shares": shares} for text, shares in self._carried()]
            told["dissents"] = [
                {"document": self.names[one.document], "text": one.text, "probability": one.probability}
                for one in self._dissents
            ]
        return {"joined": told | {"notes": self.notes()}}

    def notes(self) -> list[str]:
        """What a reader of the last answer should know of it."""
        by_itself = self.joint.alone if isinstance(self.joint, Reading) else None
        alone = None if by_itself is None else self.names[by_itself]
        shares, first = self.joint.shares() if self._joins else (), self.joint.talks[0]
        manifests = [talk.store.manifest for talk in self.joint.talks]
        return list(
            notes(self.way, self.names, shares, manifests, first.selector.name, alone, self._dissents)
        )

    def carried(self) -> str:
        """Runs of the last answer's tokens, each with the document that gave most to them; of an answer that
        is not given, none.
        """
        if not self._given:
            return ""
        lines = []
        for name, run in groupby(self._carried(), lambda one: self.names[one[1].index(max(one[1]))]):
            own = list(run)
            share = sum(max(shares) for _, shares in own) / len(own)
            text = " ".join("".join(text for text, _ in own).split())
            lines.append(f"{share:4.0%}  {name}: {text}")
        return "\n".join(lines)

    @property
    def _dissents(self) -> Sequence[Dissent]:
        return self.joint.dissents if self._joins and self._given else ()

    @property
    def _given(self) -> bool:
        return (self.joint.grounded or 0.0) >= self.least

    @property
    def _joins(self) -> bool:
        return bool(self.joint.carried) and self.way != "exact"

    def _carried(self) -> list[tuple[str, Sequence[float]]]:
        """The tokens of the last answer, each with the text that it completes and the share of each document,
        where there are several.
        """
        if not self._joins:
            return []
        pieces, carried = Pieces(self.joint.talks[0].tokenizer), self.joint.carried
        texts = [pieces.push(one.token) for one in carried]
        texts[-1] += pieces.rest()
        return [(text, one.shares) for text, one in zip(texts, carried, strict=True)]
