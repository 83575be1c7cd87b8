"""Is an answer in the text? `python -m benchmarks.grounded --model M --texts FOLDER … --out FILE`.

Two stores are made of each text, with made-up facts in it (`grounded_facts.txt`): what the one tells the
other does not. Both are asked for all of them, for something that neither tells, and for something that has
nothing to do with it. Every answer is a line of `--out`, with which the same command goes on.

With --budget, answers attend to so many stored tokens, and each is put through two further passes: with dense
attention (`offload_decode/engine/second_pass.py`), and behind no text at all.

The table: how well each sign tells questions that the text answers from others (AUROC), a logistic regression
on them where texts or kinds of things are held out, and the number that ships. Last come the weights for
`WEIGHTS` in engine/grounded.py.
"""

import calendar
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.common import lines_of, option_parser, table
from offload_decode.engine import grounded
from offload_decode.engine.engine import Engine
from offload_decode.engine.joint import behind_text
from offload_decode.engine.second_pass import checked
from offload_decode.engine.text import Pieces
from offload_decode.evals.extra import library
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.stats import bootstrapped
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts

MOST = 28  # tokens of an answer
SIGNS = ("attention", "found", "logprob")
AGAIN = ("agrees", "same", "told")
"""Of two further passes: how little the log-probabilities differ with dense attention, at how many tokens the
likeliest one stays, and by how much the text raises the log-probability of the words that tell something.
"""
MONTHS = [*calendar.month_name][1:]
FIRST = "Martha Edwin Clara Ivor Helena Oscar Judith Felix Nora Hugo Irene Conrad Sylvia Walter Agnes Victor"
COLOURS = ["red", "green", "blue", "yellow", "black", "white", "violet", "orange", "grey", "brown"]
_BLOCKS = Path(__file__).with_name("grounded_facts.txt").read_text("utf-8").strip().split("\n\n")
# By kind of thing: how it is named, and four lines: what tells a fact, what its answer is, two questions.
KINDS = {
    kind: (form.strip(), lines) for kind, form, *lines in (re.split(r":|\n", one) for one in _BLOCKS[:-1])
}
_, *GENERAL = _BLOCKS[-1].split("\n")


@dataclass(frozen=True)
class Asked:
    """A question about a thing of a kind: `told` in the text, `removed` from it, `absent` with all that is
    about things of the kind, `renamed` where it is told of another thing of the kind, or `general`; what
    tells its answer.
    """

    kind: str
    label: str
    question: str
    answer: str = ""
    sentence: str = ""


def place(rng: random.Random) -> str:
    return words.made_up(rng).capitalize()


def person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST.split())} {place(rng)}"


ANSWERS: dict[str, Callable[[random.Random], str]] = {
    "place": place,
    "person": person,
    "date": lambda rng: f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1820, 1990)}",
    "code": lambda rng: f"{''.join(rng.choices('BCDFGHJKLMNPQRSTVWXZ', k=3))}-{rng.randint(1000, 9999)}",
    "number": lambda rng: str(rng.randint(12, 9800)),
    "colour": lambda rng: rng.choice(COLOURS),
}


def facts(rng: random.Random, kind: str) -> list[Asked]:
    """The four facts of a thing of that kind; half of the questions ask for a short answer."""
    form, lines = KINDS[kind]
    name, found = form.format(place(rng)) if form else person(rng), []
    for sentence, answer_kind, *questions in (line.split(" | ") for line in lines):
        answer, question = ANSWERS[answer_kind](rng), rng.choice(questions)
        named = {"n": name, "N": name[0].upper() + name[1:], "a": answer, "b": rng.choice(words.NOUNS)}
        brief = " Answer in a few words." if rng.random() < 0.5 else ""
        found.append(Asked(kind, "", question.format(**named) + brief, answer, sentence.format(**named)))
    return found


def questions(rng: random.Random, number: int) -> list[Asked]:
    """Those to store `number`; its text tells two facts of each of three things."""
    half, kinds = number % 2, rng.sample(sorted(KINDS), 4)
    every = [facts(rng, kind) for kind in kinds]
    orders = [rng.sample(range(4), 4) for _ in kinds]
    asked = [
        Asked(**{**vars(own[place]), "label": "told" if rank % 2 == half else "removed"})
        for own, order in zip(every[:3], orders, strict=False)
        for rank, place in enumerate(order)
    ]
    asked += [Asked(**{**vars(every[3][one]), "label": "absent"}) for one in orders[3][: 1 + half]]
    asked.append(Asked("general", "general", GENERAL[number % len(GENERAL)]))
    others = random.Random(f"renamed {number}")
    for kind, order in zip(kinds[:3], orders, strict=False):
        # What the text tells of the thing of this kind, asked for one of another name.
        told = [place for rank, place in enumerate(order) if rank % 2 == half]
        asked.append(Asked(**{**vars(facts(others, kind)[others.choice(told)]), "label": "renamed"}))
    return asked


def answers(
    loaded: LoadedModel, number: int, folders: Sequence[Path], done: int, budget: int | None
) -> Iterator[dict[str, Any]]:
    """The lines of a store, but the first ones that are `done`."""
    pair = number // 2
    rng = random.Random(f"pair {pair}")
    path = rng.choice(sorted(folders[pair % len(folders)].iterdir()))
    text = Haystack(path.name, path.read_text("utf-8"))
    text_of = text.cut(loaded.tokenizer, rng.randint(450, 750), rng.random() * 0.9)
    asked = questions(rng, number)
    if done >= len(asked):
        return
    told = [one.sentence for one in asked if one.label == "told"]
    with TemporaryDirectory() as folder:
        document = TextDocument(path.name, insert(text_of, told, [rng.random() for _ in told]))
        prefill_texts(loaded, [document], Path(folder, "store"))
        few = {"selector": "topk", "options": {"budget": str(budget)}}
        engine = Engine.open(Path(folder, "store"), loaded, **(few if budget else {"selector": "dense"}))
        for one in asked[done:]:
            said = engine.fork()
            said.records = True
            tokens = list(said.generate(said.ask(one.question), MOST))
            signs = said.evidence.signs(engine.store, engine.tokenizer)
            if signs is None:  # an empty answer
                signs = grounded.Signs(0.0, 0.0)
            shown = {"store": number, "kind": one.kind, "label": one.label, "question": one.question}
            shown |= {"answer": one.answer, "said": engine.decode(tokens).strip()}
            pieces = Pieces(engine.tokenizer)
            which = grounded.telling([*map(pieces.push, tokens)], one.question)
            shown["logprob"] = of_telling(said.record.logs, which)
            if budget:
                again, alone = checked(said, said.record), without_text(engine, said.record)
                shown |= {"agrees": -again.difference, "same": again.same / max(1, again.tokens)}
                shown["told"] = shown["logprob"] - of_telling(alone, which)
            yield shown | signs._asdict()


def of_telling(each: Sequence[float], which: Sequence[bool]) -> float:
    """The mean log-probability of an answer's tokens that tell something."""
    return fmean([one for one, tells in zip(each, which, strict=True) if tells] or [-10.0])


def without_text(engine: Engine, record: grounded.Record) -> list[float]:
    """The log-probabilities of an answer's tokens where there is no text."""
    if not record.tokens:
        return []
    alone = behind_text(engine, "")
    before = alone.to_run(record.before)
    with alone.step():
        logits = alone.run(before + record.tokens[:-1], every=True)[len(before) - 1 :]
    taken = torch.tensor(record.tokens)[:, None]
    found: list[float] = torch.log_softmax(logits, -1).gather(-1, taken)[:, 0].tolist()
    return found


def auroc(scores: Any, labels: Any, axis: int = -1) -> Any:
    """How often a question that the text answers scores higher than one that it does not."""
    ranks, positive = library("scipy.stats").rankdata(scores, axis=axis), labels.sum(axis)
    above = (ranks * labels).sum(axis) - positive * (positive + 1) / 2
    return above / (positive * (labels.shape[axis] - positive))


def fitted(signs: Any, labels: Any) -> Any:
    """Constant and weights of a logistic regression with a little shrinkage."""
    mean, spread = signs.mean(0), signs.std(0) + 1e-9
    given = np.c_[np.ones(len(signs)), (signs - mean) / spread]

    def loss(weights: Any) -> Any:
        wrong = np.logaddexp(0, -(given @ weights) * (2 * labels - 1)).sum()
        return wrong + 0.15 * (weights[1:] ** 2).sum()

    found = library("scipy.optimize").minimize(loss, np.zeros(given.shape[1])).x
    return np.r_[found[0] - (found[1:] / spread * mean).sum(), found[1:] / spread]


def held_out(signs: Any, labels: Any, groups: Any) -> Any:
    """The logit of each answer, by the weights of all other groups."""
    scores = np.zeros(len(labels))
    for group in set(groups):
        own = groups == group
        weights = fitted(signs[~own], labels[~own])
        scores[own] = weights[0] + signs[own] @ weights[1:]
    return scores


def show(lines: Sequence[dict[str, Any]], shipped: grounded.Weights | None) -> None:
    labels = np.array([line["label"] == "told" for line in lines], np.float64)
    kept = np.array([line["label"] in ("told", "removed") for line in lines])
    names = SIGNS + (AGAIN if "told" in lines[0] else ())
    signs = np.array([[line[name] for name in names] for line in lines])
    texts = np.array([line["store"] // 2 for line in lines])
    kinds = np.array([line["kind"] for line in lines])
    scores = {name: signs[:, place] for place, name in enumerate(names)}
    for further in (None, *range(2, len(names))):
        given = signs[:, [0, 1] if further is None else [0, 1, further]]
        called = ", ".join(names[:2] + (() if further is None else (names[further],)))
        scores[f"{called}: other texts"] = held_out(given, labels, texts)
        scores[f"{called}: other kinds"] = held_out(given, labels, kinds)
    if shipped is not None:
        scores["grounded"] = np.array([shipped.of(grounded.Signs(*own[:2])) for own in signs])

    def cell(score: Any, labels: Any) -> str:
        found = bootstrapped(auroc, score, labels)
        return (
            f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})" if found.low else f"{found.value:.2f}"
        )

    told = [line for line in lines if line["label"] == "told"]
    right = fmean(string_match((line["answer"],), line["said"]) for line in told)
    print(
        f"{len(lines)} questions to {len(set(texts))} texts; of {len(told)} told, {right:.0%} answered right"
    )
    rows = [[name, cell(score, labels), cell(score[kept], labels[kept])] for name, score in scores.items()]
    print(table(["AUROC", "all", "told or removed"], rows))
    if shipped is not None:
        for least in (0.3, 0.5, 0.7):
            shares = [fmean(scores["grounded"][labels == one] >= least) for one in (1, 0)]
            print(f"at least {least}: {shares[0]:.0%} of told, {shares[1]:.0%} of others")
    print("weights:", ", ".join(f"{one:.1f}" for one in fitted(signs[:, :2], labels)))


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True, help="a folder, an id, or a .gguf file")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="folders of text files")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file of the answers, which is resumed")
    parser.add_argument("--stores", type=int, default=22)
    parser.add_argument("--budget", type=int, help="stored tokens that answers attend to; all, if not given")
    arguments = parser.parse_args()
    lines = lines_of(arguments.out)
    loaded = load(arguments.model)
    shipped = grounded.weights_of(loaded.model.config)
    # What an answer attends to is gathered where there are weights.
    grounded.WEIGHTS.setdefault(grounded.kind_of(loaded.model.config), grounded.Weights(0.0, 0.0, 0.0))
    with arguments.out.open("a") as file:
        for number in range(arguments.stores):
            done = sum(line["store"] == number for line in lines)
            for line in answers(loaded, number, arguments.texts, done, arguments.budget):
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
            print(f"store {number + 1} of {arguments.stores}", flush=True)
    show(lines, shipped)


if __name__ == "__main__":
    main()
