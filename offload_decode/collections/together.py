"""Which documents of a collection answer a question together, and with what weights they begin."""

from collections.abc import Iterable, Sequence

import numpy as np

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry
from offload_decode.collections.words import WORDS, number_of, scores

SOFTNESS = 1.0
"""A document's weight is the softmax of its BM25 score over this."""


def best(collection: Collection, question: str, most: int, among: Iterable[Entry]) -> list[Entry]:
    """The documents `among` those given whose words speak most for a question, the best first, at `most` so
    many; none where no document has a word of it. Raises `StoreDamaged`.
    """
    numbered = {number_of(entry.store): entry for entry in among}
    found = scores(collection.path / WORDS, question)
    return [numbered[number] for number in found if number in numbered][:most]


def weights(collection: Collection, question: str, entries: Sequence[Entry]) -> list[float]:
    """A weight for each document, by its words: their sum is 1. Raises `StoreDamaged`."""
    found = scores(collection.path / WORDS, question)
    own = np.array([found.get(number_of(entry.store), 0.0) for entry in entries]) / SOFTNESS
    raised = np.exp(own - own.max())
    return [float(one) for one in raised / raised.sum()]
