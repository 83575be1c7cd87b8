"""Several documents that answer one question: which ways there are, with what weights they begin, and what a
reader of the answer should know of it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry
from offload_decode.store.format import Manifest

JOINS = ("mixture", "product", "pced", "read", "exact")
SOFTNESS = 1.0
"""A document's weight is the softmax of its BM25 score over this. Of 280 questions for one fact, the right
one of 16 documents has a weight of 0.78 in the geometric mean, with 2 one of 0.49 and with 4 one of 0.22
(benchmarks/together.py); with less than 1, what the others say could not outvote a wrong first document.
"""
EVEN = 0.1
"""So much of the weight is dealt out evenly: BM25 chose the documents, and whoever is chosen is heard."""
LEAST = 0.01  # of an answer: a document that gave less is not named


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
) -> Iterator[str]:
    """What is approximate in an answer from the documents of these `names`, and what each gave to it, where
    that is known (`shares`). `manifests`: of the stores that were asked; `alone`: the document that answered
    by itself, because no passage was found to be read.
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
    for part in dict.fromkeys(part for own in manifests for part in own.approximations()):
        yield f"Stores are approximate: {part}."
