"""Candidate: documents of a collection chosen by attention, from a few mean keys of each.

    python -m benchmarks.candidates.document_means COLLECTION QUESTIONS.jsonl --means 0 8 64 256

A question is run with no corpus before it, which gives its queries. A document's part of each query's
attention, if all documents lay in one context, is the softmax over documents of the log-sum-exp of the query
times the document's mean keys, with the size of each cluster; the sum over all queries, layers and heads
ranks documents.
`--means 0` takes every key: what attention would say if nothing were left out. Questions are lines with
"question" and "document"; printed is how often that is among the first 1, 3, 10 documents, beside BM25.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from indexes.kmeans import lloyd, nearest
from indexes.rows import encodings
from offload_decode.attention.queries import Queries
from offload_decode.collections.collection import Collection
from offload_decode.collections.words import WORDS, number_of, ranked
from offload_decode.engine.citations import OPENING
from offload_decode.engine.corpusless import without_corpus
from offload_decode.models.loading import LoadedModel, load
from offload_decode.selection.budgeted import Budgeted
from offload_decode.store.reader import KVStore
from offload_decode.types import PageSelection, Selection

FIRST = 1, 3, 10


class Heard(Budgeted):
    """Keeps what each layer asks."""

    def __init__(self, chosen: Budgeted):
        super().__init__(chosen.selector)
        self.asked: list[tuple[int, Queries]] = []

    def select(self, layer: int, queries: Queries) -> Selection | PageSelection:
        self.asked.append((layer, queries))
        return super().select(layer, queries)


def queries_of(loaded: LoadedModel, question: str) -> list[tuple[int, Queries]]:
    """What every layer with full attention asks for, of a question with no corpus before it."""
    conversation = without_corpus(loaded)
    heard = Heard(conversation.prefix.chosen)
    conversation.prefix.chosen = heard
    conversation.ask(question)
    return heard.asked


def means_of(keys: np.ndarray, count: int) -> tuple[Tensor, Tensor]:
    """Mean keys `[C, D]` and the logarithms of their clusters' sizes `[C]`; every key where `count` is 0."""
    keys = encodings.decode(keys)[OPENING:]
    if not 0 < count < len(keys):
        return torch.from_numpy(keys.copy()), torch.zeros(len(keys))
    begin = keys[np.linspace(0, len(keys) - 1, count).astype(np.int64)]
    labels, _ = nearest(keys, lloyd(keys, begin, 4))
    used, labels = np.unique(labels, return_inverse=True)
    means = np.stack([keys[labels == label].mean(0) for label in range(len(used))])
    return torch.from_numpy(means), torch.from_numpy(np.bincount(labels)).float().log()


def shares(stores: list[KVStore], count: int, asked: list[list[tuple[int, Queries]]]) -> Tensor:
    """The attention that each question pays to each document, `[questions, documents]`."""
    each: list[list[Tensor]] = []  # of each document, of each question, the log-sum-exp of every row
    for store in stores:
        held = {
            (layer, head): means_of(store.keys(layer, head), count)
            for layer in store.manifest.shape.full_layers
            for head in range(store.manifest.shape.kv_heads)
        }
        each.append([_lse(held, queries) for queries in asked])
    return torch.stack([torch.stack(of_one).softmax(0).sum(1) for of_one in zip(*each, strict=True)])


def _lse(held: dict[tuple[int, int], tuple[Tensor, Tensor]], asked: list[tuple[int, Queries]]) -> Tensor:
    rows = []
    for layer, queries in asked:
        for head, own in enumerate(queries.rows):
            means, weights = held[layer, head]
            rows.append((queries.logits(own @ means.T) + weights).logsumexp(1))
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--means", type=int, nargs="+", default=[0, 8, 64, 256])
    given = parser.parse_args()
    collection = Collection(given.collection)
    names = [entry.name for entry in collection.entries]
    lines = [json.loads(line) for line in given.questions.read_text().splitlines()]
    lines = [line for line in lines if line["document"] in names]
    wanted = [names.index(line["document"]) for line in lines]

    numbers = [number_of(entry.store) for entry in collection.entries]
    found = [ranked(given.collection / WORDS, line["question"]) for line in lines]
    places = [
        one.index(numbers[want]) if numbers[want] in one else len(names)
        for one, want in zip(found, wanted, strict=True)
    ]
    print(f"{len(lines)} questions, {len(names)} documents; among the first {FIRST}")
    print("BM25", [round(float(np.mean([place < n for place in places])), 2) for n in FIRST])

    loaded = load(collection.header.model_id, "cpu")
    asked = [queries_of(loaded, line["question"]) for line in lines]
    stores = [KVStore.open(collection.store(entry)) for entry in collection.entries]
    for count in given.means:
        paid = shares(stores, count, asked)
        own = paid.gather(1, torch.tensor(wanted)[:, None])
        above = (paid > own).sum(1)
        kind = f"{count} means" if count else "every key"
        print(kind, [round(float((above < n).float().mean()), 2) for n in FIRST])


if __name__ == "__main__":
    main()
