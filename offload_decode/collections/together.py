"""With what weights the documents of a collection begin to answer a question together."""

from collections.abc import Sequence

import numpy as np

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry

SOFTNESS = 2.0
"""A document's weight is the softmax of its BM25 score over this: a first choice, by a dozen questions. With
shares of the sum of the scores, many poor documents would outvote a good one.
"""


def weights(collection: Collection, question: str, entries: Sequence[Entry]) -> list[float]:
    """A weight for each document, by its words: their sum is 1. Raises `StoreDamaged`."""
    found = {entry.store: score for entry, score in collection.scored(question)}
    own = np.array([found.get(entry.store, 0.0) for entry in entries]) / SOFTNESS
    raised = np.exp(own - own.max())
    return [float(one) for one in raised / raised.sum()]
