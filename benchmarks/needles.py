"""Needles by selector and budget (tier T1, the shipped model): `python benchmarks/needles.py --text FILE`.

Every context is prefilled once and asked with dense attention, with every selector at every budget, and
without its needle (the control). Prints accuracy and the share of what dense attention answers, and saves
every answer as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from offload_decode.config import split_pairs
from offload_decode.engine.engine import Engine
from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, python_topics
from offload_decode.models.loading import LoadedModel, load
from offload_decode.selectors import registry
from offload_decode.store.reader import KVStore
from prefill_jobs.corpus import TextDocument
from prefill_jobs.job import prefill_texts

CONTROL = "without the needle"
HELD_BACK = 150  # tokens of a context that are kept for the needles and the question


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer: of which context, in which way, and its score from 0 to 1."""

    task: str
    tokens: int
    context: int
    selector: str
    budget: str
    text: str
    score: float
    attended: float
    seconds: float


def ask(engine: Engine, task: tasks.HiddenFacts, example: tasks.Example) -> tuple[str, float, float, float]:
    """Text, score, stored tokens attended to by a query row, and seconds."""
    began = time.perf_counter()
    answer = engine.answer(example.asked.text, task.max_new_tokens)
    seconds = time.perf_counter() - began
    attended = answer.stats.selected / max(1, answer.stats.rows)
    return answer.text, task.score(example.asked, answer.text), attended, seconds


def replies(
    loaded: LoadedModel,
    haystack: Haystack,
    task: tasks.HiddenFacts,
    tokens: int,
    index: int,
    arguments: argparse.Namespace,
) -> Iterator[ScoredAnswer]:
    """All answers about one context."""
    rng = random.Random(f"{arguments.seed} {task.name} {tokens} {index}")
    filler = haystack.cut(loaded.tokenizer, tokens - HELD_BACK, start=rng.random())
    example = task.examples(rng, filler, (index + 0.5) / arguments.contexts)[0]
    common = split_pairs(arguments.option)

    with TemporaryDirectory(prefix="offload-decode-needles-") as folder:
        for name, text in (("with", example.context), (CONTROL, filler)):
            path = Path(folder) / name
            prefill_texts(loaded, [TextDocument(haystack.name, text)], path)
            store = KVStore.open(path)
            ways = [("dense", "100%")]
            if name == "with":
                ways += [(way, budget) for budget in arguments.budgets for way in arguments.selectors]
            for way, budget in ways:
                selector, _, own = way.partition(":")
                options = {} if way == "dense" else {**common, "budget": budget}
                options |= split_pairs(re.split(r",(?=\w+=)", own) if own else [])
                engine = Engine.open(store, loaded, selector=selector, options=options)
                label = CONTROL if name == CONTROL else way
                yield ScoredAnswer(task.name, tokens, index, label, budget, *ask(engine, task, example))


def table(found: list[ScoredAnswer]) -> str:
    """Ways down; for every task and length the accuracy and, of what dense answers, the share."""
    columns = list(dict.fromkeys((reply.task, reply.tokens) for reply in found))
    scores: dict[tuple[str, str], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for reply in found:
        scores[reply.selector, reply.budget][reply.task, reply.tokens].append(reply.score)
    dense = {column: fmean(scores["dense", "100%"][column]) for column in columns}
    heads = [f"{task}, {tokens:,} ({len(scores['dense', '100%'][task, tokens])})" for task, tokens in columns]
    lines = ["| selector | budget | " + " | ".join(heads) + " |", "|---|---" + "|---" * len(columns) + "|"]
    for (way, budget), by_column in scores.items():
        cells = []
        for column in columns:
            mean = fmean(by_column[column])
            share = f" ({mean / dense[column]:.0%} of dense)" if dense[column] and way != "dense" else ""
            cells.append(f"{mean:.0%}{share}")
        lines.append(f"| {way} | {budget} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="haystack; default: the standard library's documentation")
    parser.add_argument("--tasks", default="niah_multikey_1", help="names, separated by commas")
    parser.add_argument("--lengths", default="8192,32768", help="tokens, separated by commas")
    parser.add_argument("--contexts", type=int, default=12, help="contexts for each task and length")
    parser.add_argument(
        "-s",
        "--selector",
        action="append",
        dest="selectors",
        help="NAME or NAME:KEY=VALUE,...; repeatable; default: every one",
    )
    parser.add_argument("--budgets", default="64,2%", help="separated by commas")
    parser.add_argument("-o", "--option", action="append", default=[], help="option of every selector")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for all answers")
    arguments = parser.parse_args()
    arguments.budgets = arguments.budgets.split(",")
    everything = [name for name in registry.names() if name != "dense"]
    arguments.selectors = arguments.selectors or everything

    loaded = load("demo", "cpu", "auto")
    haystack = (
        Haystack(arguments.text.name, arguments.text.read_text()) if arguments.text else python_topics()
    )
    found: list[ScoredAnswer] = []
    for length in map(int, arguments.lengths.split(",")):
        for name in arguments.tasks.split(","):
            for index in range(arguments.contexts):
                found += replies(loaded, haystack, tasks.hidden_facts(name), length, index, arguments)
            print(table(found), flush=True)
    if arguments.out:
        configuration = {
            "text": haystack.name,
            "text_sha256": haystack.sha256,
            "weights_hash": loaded.weights_hash,
            "options": arguments.option,
            "seed": arguments.seed,
            "versions": {name: version(name) for name in ("offload-decode", "torch", "transformers")},
        }
        arguments.out.write_text(
            json.dumps({"configuration": configuration, "replies": [asdict(one) for one in found]}, indent=1)
        )


if __name__ == "__main__":
    main()
