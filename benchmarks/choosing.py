"""Which documents does a question mean: by BM25, by a few retrieval heads, or by both? `python -m
benchmarks.choosing COLLECTION --texts FOLDER --peps FOLDER --kept FOLDER`.

COLLECTION holds documents that `benchmarks/together.py --texts` wrote from the same texts, among them PEPs
without their headers; --peps has these with them. Questions ask for a made-up fact, name a PEP's title, or
say in other words what it is about (`choosing_paraphrases.txt`). The first 20 of each kind choose the heads,
as in QRRetriever (arXiv 2506.09944); the others are counted. A question is run behind the model's opening
alone. Its queries are turned to where each document ends, and a document's score is the share of their
attention that it would have if all documents lay in one context. --kept: where the questions' queries and the
chosen heads are kept for the next call.
"""

import json
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import option_parser, table
from offload_decode.attention.rows import tensor_view
from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine, without_corpus
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.recorded_queries import AttentionDemand
from offload_decode.evals.tasks.made_up_articles import questions
from offload_decode.hf.positions import rope_parameters
from offload_decode.models.loading import load
from offload_decode.store.reader import KVStore

KINDS = "facts", "titles", "paraphrases"
CHOOSING = 20  # questions of a kind that choose the heads
COUNTED = 40  # facts and titles that are counted
FIRST = 50  # of BM25, which heads put in another order
SMOOTH = 60  # of reciprocal ranks (Cormack, Clarke and Büttcher 2009)
FORMS: Mapping[str, int | None] = {"every key": None, "64 means": 64, "8 means": 8}
PARAPHRASES = Path(__file__).with_name("choosing_paraphrases.txt")

Head = tuple[int, int]


class Asked(NamedTuple):
    """A question, and the documents that are right for it."""

    kind: str
    text: str
    right: frozenset[str]


def title(pep: Path) -> str:
    """As the header of a PEP has it."""
    found = re.search(r"^Title:\s*(.*(?:\n[ \t]+.*)*)", pep.read_text("utf-8", "replace"), re.MULTILINE)
    return " ".join(found[1].replace("\\", "").split()) if found else ""


def asked(sources: Mapping[str, str], peps: Path) -> list[Asked]:
    """Questions of each kind, in an order drawn once; `sources`: the text that each document has."""
    rng = random.Random(5)
    titles = {name: title(peps / source) for name, source in sources.items() if source.startswith("pep-")}
    of_source = {source: name for name, source in sources.items()}
    facts = list(enumerate(sources))
    rng.shuffle(facts)
    named = list(titles)
    rng.shuffle(named)
    others = [line.split(" ", 1) for line in PARAPHRASES.read_text("utf-8").splitlines()]
    rng.shuffle(others)

    def alike(name: str) -> frozenset[str]:
        return frozenset(one for one, own in titles.items() if own == titles[name])

    most = CHOOSING + COUNTED
    return [
        *(Asked(KINDS[0], questions(1)[at].question, frozenset([name])) for at, name in facts[:most]),
        *(Asked(KINDS[1], f"Which proposal is about {titles[one]}?", alike(one)) for one in named[:most]),
        *(Asked(KINDS[2], text, alike(of_source[pep])) for pep, text in others if pep in of_source),
    ]


def queries(engine: Engine, opening: Sequence[int], texts: Sequence[str]) -> Iterator[Tensor]:
    """Of each text its scaled queries `[L, H, T, D]` behind the opening, without those of the template."""
    base = without_corpus(engine.loaded)
    prefix = AttentionDemand(StoredPrefix.over(base.prefix.host, engine.loaded.shape, "dense", {}))
    talk = Conversation(engine.loaded, base.store, prefix)
    talk.extend(opening)
    # What the template puts after a question is the same for any.
    one, other = (engine.prompt.first(engine.tokenizer, letter)[::-1] for letter in "ab")
    closing = int(np.argmax([own != its for own, its in zip(one, other, strict=True)]))
    for text in texts:
        prefix.calls.clear()
        talk.crop(len(opening))
        talk.extend(engine.prompt.first(engine.tokenizer, text))
        yield torch.stack([call.query[0].float() * call.scaling for call, _ in prefix.calls])[:, :, :-closing]


def turned(vectors: Tensor, by: int, theta: Tensor) -> Tensor:
    """Rotated by so many positions further, as RoPE of whole heads does."""
    half = vectors.shape[-1] // 2
    angles = by * theta ** (-torch.arange(half) / half)
    first, second = vectors[..., :half], vectors[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def means(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of keys `[N, D]` the means of so many clusters, and the logarithms of their sizes: Lloyd's."""
    centres = keys[torch.linspace(0, len(keys) - 1, count).round().long()].clone()
    sizes = torch.ones(count)
    for _ in range(6):
        nearest = (keys @ centres.T - 0.5 * centres.square().sum(1)).argmax(1)
        sizes = nearest.bincount(minlength=count).float()
        sums = torch.zeros_like(centres).index_add_(0, nearest, keys)
        centres = torch.where(sizes[:, None] > 0, sums / sizes.clamp_min(1)[:, None], centres)
    return centres, sizes.log()


def log_sums(store: KVStore, opening: int, heads: Sequence[Head], asking: Tensor, theta: Tensor) -> Tensor:
    """Log-sum-exps `[forms, heads, n]` of queries `[heads, n, D]` over a document, in each of the `FORMS`."""
    found, group = torch.empty(len(FORMS), *asking.shape[:2]), store.manifest.shape.group
    known: dict[Head, list[tuple[Tensor, Tensor]]] = {}
    for at, (layer, head) in enumerate(heads):
        own = layer, head // group
        if own not in known:
            keys = tensor_view(store.keys(*own)).float()[opening:]
            every = keys, torch.zeros(len(keys))
            known[own] = [means(keys, count) if count else every for count in FORMS.values()]
        rows = turned(asking[at], store.manifest.n_tokens - opening, theta)
        for form, (keys, sizes) in enumerate(known[own]):
            found[form, at] = (rows @ keys.T + sizes).logsumexp(1)
    return found


def shares(sums: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Of log-sum-exps `[documents, heads, n]` each document's share `[questions, documents, heads]` of the
    attention of a question's tokens.
    """
    every = sums.softmax(0)
    return torch.stack([every[:, :, start:end].mean(2) for start, end in spans])


def place(scores: Tensor, right: Sequence[int]) -> Tensor:
    """At which place `[…]` the first right document stands by scores `[documents, …]`; ties count against."""
    return (scores >= scores[list(right)].amax(0)).sum(0)


def _of(every: Sequence[Asked], kind: str) -> list[int]:
    return [at for at, one in enumerate(every) if one.kind == kind]


def spans_of(vectors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Where each question's tokens lie among all."""
    return list(pairwise(np.cumsum([0, *(own.shape[2] for own in vectors)]).tolist()))


def choose(
    collection: Collection,
    every: Sequence[Asked],
    vectors: Sequence[Tensor],
    opening: int,
    theta: Tensor,
    most: int,
) -> list[Head]:
    """The heads with the largest mean reciprocal rank over the kinds, each asked among the right documents of
    its own questions.
    """
    entries = {entry.name: entry for entry in collection.entries}
    ranks = []
    for kind in KINDS:
        own = _of(every, kind)[:CHOOSING]
        pool = sorted({name for at in own for name in every[at].right})
        asking = torch.cat([vectors[at] for at in own], 2)
        layers, heads = asking.shape[:2]
        sums = torch.empty(len(pool), layers * heads, asking.shape[2])
        for number, name in enumerate(pool):
            store = KVStore.open(collection.store(entries[name]))
            rows = turned(asking, store.manifest.n_tokens - opening, theta)
            for layer in range(layers):
                for head in range(heads):
                    keys = tensor_view(store.keys(layer, head // store.manifest.shape.group)).float()
                    sums[number, layer * heads + head] = (rows[layer, head] @ keys[opening:].T).logsumexp(1)
        found = shares(sums, spans_of([vectors[at] for at in own]))
        right = [[pool.index(name) for name in every[at].right] for at in own]
        places = torch.stack([place(own, at) for own, at in zip(found, right, strict=True)])
        ranks.append((1 / places).mean(0))
    best = torch.stack(ranks).mean(0).argsort(descending=True)[:most]
    return [divmod(int(at), heads) for at in best]


def by_words(collection: Collection, text: str) -> Tensor:
    """BM25's scores `[documents]`, 0 for those without a word of the question."""
    found = {entry.store: score for entry, score in collection.scored(text)}
    return torch.tensor([found.get(entry.store, 0.0) for entry in collection.entries])


def ways(words: Tensor, heads: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each way by its name with its scores `[documents]`: of BM25's and those of heads in each form."""
    said = 1 / (SMOOTH + words.argsort(descending=True, stable=True).argsort()) * (words > 0)
    yield "BM25", torch.where(words > 0, words, -1.0 - torch.arange(len(words)))
    for form, own in zip(FORMS, heads, strict=True):
        ranks = 1 / (SMOOTH + own.argsort(descending=True, stable=True).argsort())
        yield f"heads, {form}", own
        yield f"BM25 and heads, {form}", said + ranks
        if form == "every key":
            first = (words > 0) & (words >= words.topk(min(FIRST, len(words))).values[-1])
            yield f"BM25's first {FIRST}, and heads", said + ranks * first


def rows(found: Mapping[tuple[str, str], list[int]]) -> Iterator[list[str]]:
    """A row of the table for each way."""
    for way in dict.fromkeys(way for way, _ in found):
        cells = []
        for kind in KINDS:
            places = np.array(found[way, kind])
            cells.append(", ".join(f"{(places <= first).mean():.2f}" for first in (1, 3, 10)))
            cells[-1] += f"; {(1 / places).mean():.2f}"
        yield [way, *cells]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--peps", type=Path, required=True)
    parser.add_argument("--kept", type=Path, required=True)
    parser.add_argument("--heads", type=int, default=8)
    arguments = parser.parse_args()
    collection, kept = Collection(arguments.collection), arguments.kept
    kept.mkdir(parents=True, exist_ok=True)
    entries: list[Entry] = collection.entries
    drawn = random.Random("together").sample(sorted(arguments.texts.glob("*.*")), len(entries))
    every = asked({f"{at:03}.txt": path.name for at, path in enumerate(drawn)}, arguments.peps)

    first, other = (KVStore.open(collection.store(entry)).tokens[:100] for entry in entries[:2])
    opening = int((first == other).argmin())
    if not (kept / "queries.npz").exists():
        engine = Engine.open(collection.store(entries[0]), load(collection.header.model_id))
        texts = [one.text for one in every]
        own = (one.half().numpy() for one in queries(engine, first[:opening].tolist(), texts))
        theta = rope_parameters(engine.loaded.model.config)["rope_theta"]
        np.savez(kept / "queries.npz", theta, *own)
    with np.load(kept / "queries.npz", allow_pickle=False) as saved:
        theta, *vectors = (torch.from_numpy(saved[f"arr_{at}"]).float() for at in range(len(every) + 1))
    if (kept / "heads.json").exists():
        heads = [tuple(one) for one in json.loads((kept / "heads.json").read_text())]
    else:
        heads = choose(collection, every, vectors, opening, theta, arguments.heads)
        (kept / "heads.json").write_text(json.dumps(heads))

    counted = [at for kind in KINDS for at in _of(every, kind)[CHOOSING:]]
    vectors = [vectors[at] for at in counted]
    asking = torch.stack([torch.cat([own[at] for own in vectors]) for at in heads])
    began, sums = time.process_time(), []
    for entry in entries:
        store = KVStore.open(collection.store(entry))
        sums.append(log_sums(store, opening, heads, asking, theta))
    ms = 1000 * (time.process_time() - began) / len(entries) / len(counted)
    forms = [shares(own, spans_of(vectors)).mean(2) for own in torch.stack(sums).unbind(1)]
    found: dict[tuple[str, str], list[int]] = {}
    names = [entry.name for entry in entries]
    for number, one in enumerate(every[at] for at in counted):
        right = [names.index(name) for name in one.right]
        for way, scores in ways(by_words(collection, one.text), [form[number] for form in forms]):
            found.setdefault((way, one.kind), []).append(int(place(scores, right)))
    print(f"heads (layer, head): {heads}; {ms:.2f} ms of a core a question and document in all forms")
    print(table(("way", *(f"{len(found['BM25', kind])} {kind}" for kind in KINDS)), list(rows(found))))


if __name__ == "__main__":
    main()
