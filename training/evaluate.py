"""Measure a demo model with dense attention: `python -m training.evaluate --text FILE`.

Prints accuracy for each task and length as JSON and as the table of the card. The context goes through plain
transformers in chunks (its own cache and attention): nothing of this project's engine takes part.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Strand, python_topics
from offload_decode.evals.stats import wilson
from offload_decode.evals.tasks import Task
from offload_decode.models.arguments import with_cache
from offload_decode.models.checkpoint import source_of

CHUNK = 1024  # tokens of context a forward
RESERVE = 160  # tokens left for question and answer
CONTROL_TOKENS = 8192


@dataclass(frozen=True)
class Cell:
    """How long the contexts are, how many of them, and how many questions each is asked at most."""

    tokens: int
    contexts: int
    questions: int = 1

    @classmethod
    def parse(cls, text: str) -> Cell:
        """`32768:20` or `131072:3x4`."""
        tokens, _, size = text.partition(":")
        contexts, _, questions = size.partition("x")
        return cls(int(tokens), int(contexts), int(questions or 1))


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokenizer: Any, context: str) -> DynamicCache:
    """The cache of a context, which several questions may share."""
    ids = torch.tensor([tokenizer(context)["input_ids"]])
    cache = DynamicCache(config=model.config)
    for at in range(0, ids.shape[1], CHUNK):
        model(ids[:, at : at + CHUNK], **with_cache(model, cache), logits_to_keep=1)
    return cache


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: Any, cache: DynamicCache, question: str, limit: int) -> str:
    """Greedy answer of at most limit tokens. The cache is copied, so that it can be asked again."""
    cache = copy.deepcopy(cache)
    tokens = tokenizer("\n\n" + question, add_special_tokens=False)["input_ids"]
    out: list[int] = []
    while len(out) < limit:
        logits = model(torch.tensor([tokens]), **with_cache(model, cache), logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        if tokens[0] == tokenizer.eos_token_id:
            break
        out += tokens
    return str(tokenizer.decode(out))


def measure(
    model: PreTrainedModel, tokenizer: Any, task: Task, text: Haystack, cell: Cell, seed: int, prefix: bool
) -> dict[str, Any]:
    """Mean score over contexts of about cell.tokens tokens, each from another place of the text.

    With `prefix` the answer is begun for the model, as RULER does. Every fifth context is also asked without
    what the question asks for (the control), where it is short enough to prefill twice.
    """
    scores: list[float] = []
    controls: list[float] = []
    started = time.time()

    def score(cache: DynamicCache, question: tasks.Question) -> float:
        begun = question.answer_prefix if prefix else ""
        said = answer(model, tokenizer, cache, f"{question.text}\nAnswer:{begun}", task.max_new_tokens)
        return task.score(question, said)

    for index in range(cell.contexts):
        rng = random.Random(f"{seed} {task.name} {cell.tokens} {index}")
        context = task.context(rng, Strand(text, tokenizer, cell.tokens - RESERVE, rng.random()))
        cache = prefill(model, tokenizer, context.text)
        scores += [score(cache, question) for question in context.questions[: cell.questions]]
        if index % 5 == 0 and cell.tokens <= CONTROL_TOKENS:
            controls.append(score(prefill(model, tokenizer, context.control), context.questions[0]))
    share = wilson(scores)
    return {
        "task": task.name,
        "tokens": cell.tokens,
        "questions": share.count,
        "score": round(share.mean, 3),
        "low": round(share.low, 3),
        "high": round(share.high, 3),
        "control": round(sum(controls) / len(controls), 3) if controls else None,
        "seconds": round(time.time() - started, 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Tasks down, lengths across; each cell is the score in percent, its interval and the questions."""
    lengths = sorted({r["tokens"] for r in results})
    lines = ["| task | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name in dict.fromkeys(r["task"] for r in results):
        cells = {
            r["tokens"]: f"{r['score']:.0%} ({r['low']:.0%}-{r['high']:.0%}, {r['questions']})"
            for r in results
            if r["task"] == name
        }
        lines.append(f"| {name} | " + " | ".join(cells.get(n, "–") for n in lengths) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=source_of, default="demo", help="a shipped model's name, or a folder")
    parser.add_argument(
        "--text", type=Path, help="haystack (default: the standard library's documentation topics)"
    )
    parser.add_argument("--tasks", default="niah_single_2,niah_multikey_1", help="names, with commas")
    parser.add_argument(
        "--lengths", default="2048:20,8192:20,32768:20,131072:4", help="tokens:contexts[xquestions], ..."
    )
    parser.add_argument("--prefix", action="store_true", help="begin the answers, as RULER does")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    text = python_topics()
    if options.text:
        text = Haystack(options.text.name, options.text.read_text(encoding="utf-8"))
    results = []
    for cell in options.lengths.split(","):
        for name in options.tasks.split(","):
            size = Cell.parse(cell)
            results.append(
                measure(model, tokenizer, tasks.get(name), text, size, options.seed, options.prefix)
            )
            print(json.dumps(results[-1]), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
