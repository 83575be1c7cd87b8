"""One answer from several documents: `python -m benchmarks.together COLLECTION --out ANSWERS.jsonl`.

With `--texts FOLDER`, documents are written from these texts to the folder --out: in a piece of each, one
made-up article is planted (`evals/tasks/made_up_articles.py`). Collect them as the script says, and run it
again: its questions ask for one fact, for one of two documents together, and for facts that are nowhere.
It prints how many answers hold the fact, or say that the text does not have it, the processor's time for each
token, how well `grounded` tells the ones from the others, and how well words choose the documents. The same
command goes on where it was stopped, and with more --questions asks those of fewer first. Ways are `question`
(no document), `top 1`, `join N` (all that join distributions, with weights of BM25), `heads N` (the same,
with weights of the attention of --heads, which `benchmarks/choosing.py` chose), `read N` and `exact N`.
"""

import json
import math
import random
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.choosing import Head, log_sums, queries, shares
from benchmarks.common import lines_of, option_parser, table
from benchmarks.grounded import auroc
from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry
from offload_decode.collections.together import EVEN, weights
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.joint import Joint, behind_text
from offload_decode.engine.opinion_pools import WAYS
from offload_decode.engine.reading import Reading
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.evals.tasks.made_up_articles import Asked, articles, questions
from offload_decode.hf.positions import rope_parameters
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.joined import joined_store

REFUSAL = "not in the text"
SYSTEM = f"Answer in a few words from the text. Where the text does not say, answer: {REFUSAL}."
FORM = "According to the text: {}"
NEW = 20
ABSENT = 400  # articles from here on are in no document
APART = 33  # numbers of articles that are asked for one after the other, prime to the number of documents
TWO = "two documents"
KINDS = "one fact", TWO, "no document"


def kinds(text: str) -> list[str]:
    """The kinds of questions that an option names."""
    named = text.split(",")
    if unknown := set(named).difference(KINDS):
        raise ArgumentTypeError(f"there is no kind {', '.join(unknown)}: choose from {', '.join(KINDS)}")
    return named


def write_documents(texts: Path, out: Path, count: int, characters: int) -> None:
    """A document for each of the first articles, whose first line names its group."""
    rng = random.Random("together")
    out.mkdir(parents=True)
    for number, path in enumerate(rng.sample(sorted(texts.glob("*.*")), count)):
        text = path.read_text("utf-8", "replace")
        start = rng.randrange(len(text) - characters)
        filler = text[text.find("\n", max(0, start - 200), start + 1) + 1 or start :][:characters]
        planted = insert(filler, [articles()[number].text], [rng.random()])
        town, _, company, _ = articles()[number // 4 * 4 : number // 4 * 4 + 4]
        (out / f"{number:03}.txt").write_text(f"File: {town.name}, {company.name}\n\n{planted}", "utf-8")


def asked(documents: int, count: int, kinds: Sequence[str]) -> list[tuple[str, Asked]]:
    """So many questions of each of the kinds, in turns; fewer are the first of more."""
    every = questions(1)[:documents]
    single = [every[APART * number % documents] for number in range(documents)]
    two = [one for one in questions(2) if max(one.needed) < documents]
    absent = questions(1)[ABSENT : ABSENT + 7 * count : 7]
    of_kind = dict(zip(KINDS, (single[:count], two[:count], absent), strict=True))
    return [
        (kind, one)
        for turn in zip_longest(*(of_kind[kind] for kind in kinds))
        for kind, one in zip(kinds, turn, strict=True)
        if one is not None
    ]


class Answers:
    """Answers in several ways, from the documents of a collection."""

    def __init__(self, path: Path, model: str | None, heads: Path | None):
        self.collection = Collection(path)
        self.loaded = load(model or self.collection.header.model_id)
        self.heads: list[Head] = (
            [(layer, head) for layer, head in json.loads(heads.read_text())] if heads else []
        )
        self.engines: dict[str, Engine] = {}

    def __call__(self, way: str, question: str) -> Iterator[dict[str, Any]]:
        """In a way, or in all that join distributions (`join`): its name, what was said, the milliseconds of
        the processor that each token took, and how grounded it is, where these can be told.
        """
        name, _, number = way.partition(" ")
        entries = [entry for entry, _ in self.collection.scored(question)[: int(number or 1)]]
        engines, put = [self._engine(entry) for entry in entries], FORM.format(question)
        given = weights(self.collection, question, entries)
        if name == "heads":
            given = self._attended(question, engines)
        if name in ("join", "heads"):
            asked = Joint(engines, "pced")
            logits = asked.ask(put, given)
            for own in WAYS:
                joint = asked.fork()
                joint.way = own
                yield timed(f"{own} {number}{', heads' * (name == 'heads')}", joint, logits)
        elif name == "read":
            yield {"way": way, "said": Reading(engines).answer(put, given, NEW).text}
        elif name == "exact":
            stores = [self.collection.store(entry) for entry in sorted(entries)]
            with joined_store(stores, self.loaded) as whole:
                talk = Engine.open(whole, self.loaded).fork()
                yield timed(way, talk, talk.ask(put))
        elif name == "top":
            talk = engines[0].fork()
            yield timed(way, talk, talk.ask(put))
        else:
            alone = behind_text(engines[0], "")
            yield timed(way, alone, alone.ask(put))

    def _attended(self, question: str, engines: Sequence[Engine]) -> list[float]:
        """A weight for each document: its share of the attention of the heads, if all lay in one context."""
        first, other = (engine.store.tokens[:100] for engine in list(self.engines.values())[:2])
        opening = int((first == other).argmin())
        [vectors] = queries(engines[0], first[:opening].tolist(), [question])
        asking = torch.stack([vectors[at] for at in self.heads])
        theta = torch.tensor(rope_parameters(self.loaded.model.config)["rope_theta"])
        sums = [log_sums(one.store, opening, self.heads, asking, theta)[0] for one in engines]
        found = shares(torch.stack(sums), [(0, asking.shape[1])])[0].mean(1)
        return ((1 - EVEN) * found + EVEN / len(engines)).tolist()

    def _engine(self, entry: Entry) -> Engine:
        if entry.store not in self.engines:
            self.engines[entry.store] = Engine.open(self.collection.store(entry), self.loaded)
        return self.engines[entry.store]


def timed(way: str, talk: Conversation | Joint, logits: torch.Tensor) -> dict[str, Any]:
    """What a question that was put is answered."""
    began = time.process_time()
    tokens = list(talk.generate(logits, NEW))
    ms = 1000 * (time.process_time() - began) / max(1, len(tokens))
    first = talk.talks[0] if isinstance(talk, Joint) else talk
    return {"way": way, "said": first.decode(tokens), "ms": ms, "grounded": talk.grounded}


def chosen(collection: Collection, documents: int) -> str:
    """How well words choose among so many documents: questions for one fact of those whose number 8 does not
    divide, so that ten that are asked are others, and all questions for two.
    """

    def ranks(one: Asked) -> list[int]:
        names = [entry.name for entry, _ in collection.scored(one.question)]
        return [
            names.index(name) if (name := f"{number:03}.txt") in names else documents for number in one.needed
        ]

    single = [one for one in questions(1)[:documents] if one.needed[0] % 8]
    places = [ranks(one)[0] for one in single]
    among = [(one, place) for one, place in zip(single, places, strict=True) if place < 16]
    logs = []
    for one, place in among:
        entries = [entry for entry, _ in collection.scored(one.question)[:16]]
        logs.append(math.log(weights(collection, one.question, entries)[place]))
    last = [max(ranks(one)) for one in questions(2) if max(one.needed) < documents]
    weight = math.exp(sum(logs) / max(1, len(logs)))
    few, more = (sum(one < count for one in last) for count in (4, 16))
    return (
        f"one fact: the right document is first for {places.count(0)} of {len(places)} questions, and begins "
        f"of 16 with a weight of {weight:.2f} in the geometric mean; both of two are among 4 for {few} of "
        f"{len(last)}, among 16 for {more}"
    )


def rows(lines: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A row of the table for each way."""
    right, count = Counter[tuple[object, object]](), Counter[tuple[object, object]]()
    for line in lines:
        key = line["way"], line["kind"]
        count[key] += 1
        wanted = REFUSAL if line["kind"] == KINDS[-1] else str(line["answer"])
        right[key] += int(string_match((wanted,), str(line["said"])))
    for way in dict.fromkeys(line["way"] for line in lines):
        own = [line for line in lines if line["way"] == way]
        times = sorted(line["ms"] for line in own if "ms" in line)
        shown = [f"{right[way, kind]} of {count[way, kind]}" for kind in KINDS]
        yield [str(way), *shown, f"{times[len(times) // 2]:.0f}" if times else "", *grounds(own)]


def grounds(lines: list[dict[str, Any]]) -> tuple[str, str, str]:
    """How often an answer to a question for one fact is more grounded than one to a question for a fact that
    is nowhere, and how many of the ones and of the others --only-grounded 0.5 lets through.
    """
    told, absent = (
        [line["grounded"] for line in lines if line["kind"] == kind and line.get("grounded") is not None]
        for kind in (KINDS[0], KINDS[-1])
    )
    if not told or not absent:
        return "", "", ""
    labels = np.repeat([1, 0], [len(told), len(absent)])
    passed = (f"{sum(one >= 0.5 for one in each)} of {len(each)}" for each in (told, absent))
    return f"{auroc(np.array([*told, *absent]), labels):.2f}", *passed


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("collection", type=Path)
    parser.add_argument(
        "--texts", type=Path, help="write documents of these texts to the folder --out, and end"
    )
    parser.add_argument("--characters", type=int, default=1500, help="of a document, beside its article")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="if not the one that the collection names")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--questions", type=int, default=16, help="of each kind; 0 tells what words choose")
    parser.add_argument("--kinds", type=kinds, default=KINDS)
    parser.add_argument("--ways", default="question,top 1,join 4,join 16,read 4,exact 4")
    parser.add_argument("--heads", type=Path, help="heads.json of benchmarks.choosing")
    arguments = parser.parse_args()
    out: Path = arguments.out
    if arguments.texts:
        write_documents(arguments.texts, out, arguments.documents, arguments.characters)
        print(f"offload-decode collect {out} --out {arguments.collection} --system '{SYSTEM}' --model …")
        return
    lines = lines_of(out)
    there = {(line["asked"], line["question"]) for line in lines}
    print(chosen(Collection(arguments.collection), arguments.documents))
    if not arguments.questions:
        return
    answers = Answers(arguments.collection, arguments.model, arguments.heads)
    for kind, one in asked(arguments.documents, arguments.questions, arguments.kinds):
        for way in arguments.ways.split(","):
            if (way, one.question) in there:
                continue
            told = {"asked": way, "kind": kind, "question": one.question, "answer": one.answer}
            new = [told | said for said in answers(way, one.question)]
            with out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in new)
            lines += new
    header = "way", *KINDS, "CPU ms a token", "AUROC of grounded", "one fact passes", "no document passes"
    print(table(header, list(rows(lines))))


if __name__ == "__main__":
    main()
