"""Measure the demo model with dense attention: `python -m training.evaluate --text FILE`.

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

from offload_decode import demo_model
from offload_decode.evals import tasks
from offload_decode.evals.haystack import python_topics
from offload_decode.evals.tasks import HiddenFacts

CHUNK = 1024  # tokens of context a forward
RESERVE = 150  # tokens left for facts and question
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


def cut(text: str, tokenizer: Any, tokens: int, rng: random.Random) -> str:
    """About so many tokens of text from a random start; text is repeated where it is too short."""
    sample = text[:200_000]
    chars = int(tokens * len(sample) / len(tokenizer(sample, add_special_tokens=False)["input_ids"]))
    start = rng.randrange(len(text))
    return (text[start:] + "\n\n" + text * (chars // len(text) + 1))[:chars]


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokenizer: Any, context: str) -> DynamicCache:
    """The cache of a context, which several questions may share."""
    ids = torch.tensor([tokenizer(context)["input_ids"]])
    cache = DynamicCache(config=model.config)
    for at in range(0, ids.shape[1], CHUNK):
        model(ids[:, at : at + CHUNK], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.inference_mode()
def answer(model: PreTrainedModel, tokenizer: Any, cache: DynamicCache, question: str, limit: int) -> str:
    """Greedy answer of at most limit tokens. The cache is copied, so that it can be asked again."""
    cache = copy.deepcopy(cache)
    tokens = tokenizer("\n\n" + question, add_special_tokens=False)["input_ids"]
    out: list[int] = []
    while len(out) < limit:
        logits = model(torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1).logits
        tokens = [int(logits[0, -1].argmax())]
        if tokens[0] == tokenizer.eos_token_id:
            break
        out += tokens
    return str(tokenizer.decode(out))


def measure(
    model: PreTrainedModel, tokenizer: Any, task: HiddenFacts, text: str, cell: Cell, seed: int
) -> dict[str, Any]:
    """Mean score over contexts of about cell.tokens tokens, the first fact at evenly spread depths.

    Every fifth context is also asked without its
    facts (the control), where it is short enough to prefill twice.
    """
    scores: list[float] = []
    controls: list[float] = []
    started = time.time()
    for index in range(cell.contexts):
        rng = random.Random(f"{seed} {task.name} {cell.tokens} {index}")
        filler = cut(text, tokenizer, cell.tokens - RESERVE, rng)
        examples = task.examples(rng, filler, (index + 0.5) / cell.contexts)[: cell.questions]
        cache = prefill(model, tokenizer, examples[0].context)
        for example in examples:
            said = answer(model, tokenizer, cache, example.prompt(), task.max_new_tokens)
            scores.append(task.score(example.asked, said))
        if index % 5 == 0 and cell.tokens <= CONTROL_TOKENS:
            cache = prefill(model, tokenizer, filler)
            said = answer(model, tokenizer, cache, examples[0].prompt(), task.max_new_tokens)
            controls.append(task.score(examples[0].asked, said))
    return {
        "task": task.name,
        "tokens": cell.tokens,
        "questions": len(scores),
        "score": round(sum(scores) / len(scores), 3),
        "control": round(sum(controls) / len(controls), 3) if controls else None,
        "seconds": round(time.time() - started, 1),
    }


def table(results: list[dict[str, Any]]) -> str:
    """Tasks down, lengths across; each cell is the score in percent and the number of questions."""
    lengths = sorted({r["tokens"] for r in results})
    lines = ["| task | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for name in dict.fromkeys(r["task"] for r in results):
        cells = {
            r["tokens"]: f"{100 * r['score']:.0f} % ({r['questions']})" for r in results if r["task"] == name
        }
        lines.append(f"| {name} | " + " | ".join(cells.get(n, "–") for n in lengths) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=demo_model.path())
    parser.add_argument(
        "--text", type=Path, help="haystack (default: the standard library's documentation topics)"
    )
    hiding = [name for name in tasks.names() if isinstance(tasks.get(name), HiddenFacts)]
    parser.add_argument("--tasks", default=",".join(hiding))
    parser.add_argument(
        "--lengths", default="2048:20,8192:20,32768:20,131072:4", help="tokens:contexts[xquestions], ..."
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    text = options.text.read_text(encoding="utf-8") if options.text else python_topics().text
    results = []
    for cell in options.lengths.split(","):
        for name in options.tasks.split(","):
            results.append(
                measure(model, tokenizer, tasks.hidden_facts(name), text, Cell.parse(cell), options.seed)
            )
            print(json.dumps(results[-1]), flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
