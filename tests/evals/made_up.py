"""Runs that nobody measured: answers are right with a given probability, or wherever the store tells them."""

import math
import random
import re
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from offload_decode.engine.engine import Engine
from offload_decode.evals import runs
from offload_decode.evals.runs import AnswerRecord, Header, QuestionRecord, Record
from offload_decode.evals.side_by_side import WayAnswer

MADE_WITH = {
    "model": "made-up",
    "weights_hash": "0123456789abcdef",
    "dtype": "torch.float32",
    "device": "cpu",
    "versions": {"python": "3.11.2", "offload-decode": "0.1.0", "torch": "2.13.0"},
}
WAYS = ("dense", "topk:budget=64", "topk:budget=256", "quest:budget=64,page_size=32", "streaming:budget=256")
LAYERS = (2, 4)
"""Those that are searched."""


def budget(way: str, length: int) -> int:
    """Tokens that a way attends to."""
    return length if way == "dense" else int(way.split("budget=")[1].split(",")[0])


def write_run(
    path: Path,
    right: Callable[[str, int, str], float] | float = 0.9,
    *,
    tasks: Sequence[str] = ("niah_single_1", "vt", "cwe"),
    lengths: Sequence[int] = (2048, 8192),
    ways: Sequence[str] = WAYS,
    questions: int = 20,
    seeds: Sequence[int] = (0,),
    guess: float = 0.0,
    control: float | None = 0.0,
    evaluation: str = "ruler",
    said: str = "So it is",
    made_with: dict[str, Any] = MADE_WITH,
    luck: int = 0,
    unfinished: int = 0,
    way_budget: Callable[[str, int], int] = budget,
) -> Path:
    """Write a run in which an answer is right with probability `right(task, length, way)`; its path.

    A question has one difficulty, whatever the way, and other questions and difficulties with another `luck`.
    """
    chance = right if callable(right) else lambda *_: right
    configuration = {
        "suite": evaluation,
        "lengths": list(lengths),
        "contenders": list(ways),
        "limit": questions,
        "seeds": list(seeds),
        "tasks": {task: {} for task in tasks},
        "text": "books.txt",
        "text_sha256": "ab" * 32,
    }
    places = list(product(lengths, tasks, seeds, range(questions)))
    header = Header(
        evaluation, configuration, made_with, len(places) + unfinished, "2026-01-01T00:00:00+00:00"
    )
    with runs.opened(path, header) as (write, _):
        lines: list[Record] = []
        for length, task, seed, i in places:
            unit = f"{task}/{length}/{seed}/{i}"
            rng = random.Random(f"{unit!a} {luck}")
            depth = rng.random() if task.startswith("niah") else None
            asked, expected = f"What is the number of {task}?", [str(rng.randrange(10**6))]
            question = QuestionRecord(unit, 0, task, length, seed, depth, asked, expected, guess, length + 40)
            lines.append(runs.record(question))
            hard, guessed = rng.random(), rng.random()
            for way in ways:
                score = float(hard < chance(task, length, way))
                tokens = way_budget(way, length)
                costs = tokens, 100.0 * tokens, 0.01 + tokens / 1e6
                lines.append(runs.record(AnswerRecord(unit, 0, way, False, said, score, score, *costs)))
            if control is not None and i % 4 == 0:
                score = float(guessed < control)
                costs = length, 1.0, 0.1
                lines.append(runs.record(AnswerRecord(unit, 0, ways[0], True, said, score, score, *costs)))
            lines.append({"record": "unit", "unit": unit, "seconds": 1.0, "finished": runs.now()})
        write(lines)
    return path


def write_likelihoods(path: Path, fashion: str = "continuation") -> Path:
    """A run of `eval perplexity`: the fewer tokens, the more nats."""
    rng = random.Random(0)
    ways = (*WAYS, "window:512")
    header = Header("perplexity", {"fashion": fashion, "chunk": 64}, MADE_WITH, 8, "2026-01-01T00:00+00:00")
    with runs.opened(path, header) as (write, _):
        for place, length in product(range(4), (2048, 8192)):
            unit, said = f"{length}/{place}", []
            dense = [rng.uniform(1.0, 5.0) for _ in range(64)]
            for way in ways:
                tokens = None if way.startswith("window") else budget(way, length)
                more = 0.0 if way == "dense" else 5.0 / (tokens or 512)
                said.append(
                    {
                        "record": "nll",
                        "way": way,
                        "place": place,
                        "length": length,
                        "stored_tokens": length,
                        "first": length + 64 * place,
                        "nll": [nats + more * rng.random() for nats in dense],
                        "attended": tokens,
                        "tail_share": 0.1 if way == "dense" else None,
                    }
                )
            write(runs.unit_records(unit, said, 1.0))
    return path


def write_sparsity(path: Path, heads: int = 3, steep: float = 16.0) -> Path:
    """A run of `eval sparsity`: later layers spread their attention more; `steep`: tokens that half of the
    answers need.
    """
    rng = random.Random(0)
    header = Header("sparsity", {"suite": "sparsity"}, MADE_WITH, 20, "2026-01-01T00:00+00:00")
    with runs.opened(path, header) as (write, _):
        for task, i in product(("niah_single_1", "cwe"), range(10)):
            unit = f"{task}/2048/0/{i}"
            asked = QuestionRecord(unit, 0, task, 2048, 0, None, "Which?", ["this"], 0.0, 2048)
            said: list[Record] = [runs.record(asked)]
            for way in ("dense", "topk:budget=16", "topk:budget=64"):
                tokens = budget(way, 2048)
                score = float(way == "dense" or rng.random() < tokens / (tokens + steep))
                answer = AnswerRecord(unit, 0, way, False, "that", score, score, tokens, 10.0, 0.01)
                said.append(runs.record(answer))
            for layer in LAYERS:
                width = [1 + rng.random() * 4 ** (layer + (task == "cwe")) for _ in range(heads)]
                keys = {
                    name: {key: [1 + part * each for each in width] for key in ("mean", "median", "p95")}
                    for name, part in (("75", 0.5), ("90", 1.0), ("95", 2.0), ("99", 4.0))
                }
                entropy = {key: [math.log(1 + each) for each in width] for key in ("mean", "median", "p95")}
                line = {"record": "sparsity", "question": 0, "task": task, "length": 2048, "seed": 0}
                line |= {"stored_tokens": 2048, "part": "answer", "layer": layer, "rows": 3}
                said.append(line | {"stored_share": [0.9] * heads, "entropy": entropy, "keys": keys})
            write(runs.unit_records(unit, said, 1.0))
    return path


def looked_up(engine: Engine, way: str, question: str, most: int, begun: str = "") -> WayAnswer:
    """What a perfect reader answers, who has the store alone."""
    text = engine.decode(engine.store.tokens.tolist())
    key = re.search(r"magic \w+ for (\S+) mentioned", question)
    assert key is not None
    found = re.search(rf"magic \w+ for {key[1]} is: ([\w-]+)", text)
    said = found[1] if found else "nothing"
    return WayAnswer(question, way, said, 1.0, 2.0, 3.0)
