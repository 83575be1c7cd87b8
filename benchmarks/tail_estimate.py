"""What an estimate of the unselected tail repairs: `python benchmarks/tail_estimate.py [--text FILE]`.

Top-k at 2 % drops most of what a head sums up when it counts words. Two tables compare it with the estimates
and with top-k whose budget is enlarged by as many rows as the estimates read (a cluster or a draw is a row):

T2  the shipped model over a text with a list of words, asked for the most common ones (its own answer is
    often wrong): the attention's relative error against dense fp32, over all rows of question and answer.
T3  counting heads made over the same text's tokens: a key is the unit vector of its token and noise, the
    query attends almost equally to every occurrence of eight words (8 % of the tokens, and so more than 2 %),
    values are one-hot: the output is the counts. Their mean relative error, and how often the three
    commonest words are right and in order.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_decode.engine.step import StoredPrefix
from offload_decode.evals.haystack import Haystack, python_topics
from offload_decode.evals.recorded_queries import Call, run_dense
from offload_decode.evals.tasks.common_words import CommonWords
from offload_decode.kv.host import HostKV
from offload_decode.models.loading import LoadedModel, load
from offload_decode.store.memory import MemoryStore
from offload_decode.store.reader import KVStore
from offload_decode.tails.sample import CLUSTER_SIZE, SampleTail
from offload_decode.types import LayerKind, ModelShape
from prefill_jobs.corpus import TextDocument
from prefill_jobs.job import prefill_texts

SHARE = 0.02
WORDS, ATTENDED, RANKED = (
    8,
    0.08,
    3,
)  # counted words, their share of the tokens, and how many must be in order
LOGIT, WORD_SPREAD, TOKEN_SPREAD = 14.0, 0.03, 0.1  # of counted tokens, and its spread by word and by token
DIM = 128


@dataclass
class Row:
    """One way of attending, in one table. Rows are those read of keys and values in a step, for each head."""

    way: str
    rows: int
    milliseconds: float = 0.0
    build_seconds: float = 0.0
    megabytes: float = 0.0
    stated_error: float | None = None
    errors: dict[str, float] = field(default_factory=dict)


def ways(tokens: int) -> list[tuple[str, int, dict[str, object]]]:
    """Name, rows read and options."""
    k, clusters = round(SHARE * tokens), -(-tokens // CLUSTER_SIZE)
    draws = SampleTail.default_size
    few, many = k + clusters // 4, k + clusters + draws
    topk = f"topk {SHARE:.0%}"
    estimates = [
        (f"clusters:{4 * CLUSTER_SIZE}", few),
        (f"clusters:{CLUSTER_SIZE}", k + clusters),
        (f"sample:{draws}", many),
    ]
    return [
        (topk, k, {"budget": str(k)}),
        *((f"{topk}, tail={tail}", rows, {"budget": str(k), "tail": tail}) for tail, rows in estimates),
        *((f"topk {rows / tokens:.1%}", rows, {"budget": str(rows)}) for rows in (few, many)),
        ("dense", tokens, {"budget": "100%"}),
    ]


def attended(host: HostKV, shape: ModelShape, calls: Sequence[Call]) -> list[tuple[Row, list[Tensor]]]:
    """Every way with what it answers to the calls."""
    results = []
    for way, rows, options in ways(host.length):
        prefix = StoredPrefix.over(host, shape, "topk", {"index": "flat", **options})
        first = []
        for layer in sorted({call.layer for call in calls}):
            one = next(call for call in calls if call.layer == layer)
            began = time.perf_counter()
            prefix.attend(layer, one.query[:, :, -1:], one.scaling, one.softcap)
            first.append(time.perf_counter() - began)
        prefix.take_stats()
        outs, seconds = [], []
        for call in calls:
            began = time.perf_counter()
            outs.append(prefix.attend(call.layer, call.query, call.scaling, call.softcap).out)
            if call.query.shape[2] == 1:
                seconds.append(time.perf_counter() - began)
        stats, tail = prefix.take_stats(), prefix.tail
        typical = float(np.median(seconds))
        row = Row(way, rows, 1000 * typical)
        if tail is not None:
            row.build_seconds, row.megabytes = sum(first) - typical * len(first), tail.nbytes / 1e6
            row.stated_error = stats.tail_error if stats.tail_rows else None
        results.append((row, outs))
    return results


def model_heads(loaded: LoadedModel, context: str, question: str, answer_tokens: int) -> list[Row]:
    """T2."""
    with TemporaryDirectory(prefix="offload-decode-tails-") as folder:
        path = Path(folder) / "store"
        prefill_texts(loaded, [TextDocument("words", context)], path)
        store = KVStore.open(path)
        calls = run_dense(loaded, store, question, answer_tokens, lambda: None).calls
        results = attended(HostKV(store, loaded.device), loaded.shape, calls)
    dense = results[-1][1]
    for row, outs in results:
        for layer in loaded.shape.full_layers:
            errors = torch.cat(
                [
                    ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).flatten()
                    for out, exact, call in zip(outs, dense, calls, strict=True)
                    if call.layer == layer
                ]
            )
            for name, share in (("p50", 0.5), ("p95", 0.95)):
                row.errors[f"layer {layer} {name}"] = float(errors.quantile(share))
    return [row for row, _ in results[:-1]]


def counting_heads(tokenizer: Any, context: str, heads: int, seed: int) -> tuple[list[Row], dict[str, int]]:
    """T3: the table, and the counted words with their counts."""
    ids = np.array(tokenizer.encode(context, add_special_tokens=False))
    counted = some_words(tokenizer, Counter(ids.tolist()), len(ids))
    counts = np.array([int((ids == word).sum()) for word in counted])
    generator = np.random.default_rng(seed)
    keys, queries = np.empty((heads, len(ids), DIM), np.float16), np.empty((heads, DIM), np.float32)
    for head in range(heads):
        units = generator.standard_normal((ids.max() + 1, DIM)).astype(np.float32)
        units /= np.linalg.norm(units, axis=1, keepdims=True)
        logits = LOGIT + WORD_SPREAD * generator.standard_normal(WORDS)
        queries[head] = np.linalg.pinv(units[counted]) @ logits
        spread = TOKEN_SPREAD / np.linalg.norm(queries[head])
        keys[head] = units[ids] + spread * generator.standard_normal((len(ids), DIM))
    values = np.zeros((len(ids), DIM), np.float16)
    for place, word in enumerate(counted):
        values[ids == word, place] = 1

    shape = ModelShape.uniform((LayerKind.FULL,), heads, heads, DIM)
    store = MemoryStore(shape, keys[None], [[values] * heads])
    call = Call(0, torch.from_numpy(queries)[None, :, None], 1.0, None)
    results = attended(HostKV(store, torch.device("cpu")), shape, [call] * 3)
    order = np.argsort(-counts)[:RANKED]
    for row, outs in results:
        shares = outs[0][0, :, 0, :WORDS].numpy()
        estimated = shares / shares.sum(1, keepdims=True) * counts.sum()
        row.errors["counts off by"] = float((np.abs(estimated - counts) / counts).mean())
        right = np.argsort(-estimated, axis=1)[:, :RANKED] == order
        row.errors[f"first {RANKED} right"] = float(right.all(1).mean())
    names = {
        tokenizer.decode([word]).strip(): int(count) for word, count in zip(counted, counts, strict=True)
    }
    return [row for row, _ in results], names


def some_words(tokenizer: Any, counts: Counter[int], total: int) -> list[int]:
    """Every third of the text's words by frequency, the most frequent run that is at most 8 % of the text."""
    frequent = [word for word, _ in counts.most_common(1000) if is_word(tokenizer.decode([word]))]
    for start in range(len(frequent)):
        run = frequent[start::3][:WORDS]
        if sum(counts[word] for word in run) <= ATTENDED * total:
            return run
    raise SystemExit("The text is too short, or one word is most of it: give a longer --text.")


def is_word(text: str) -> bool:
    """A token that is a whole word of some letters."""
    return text.startswith(" ") and text[1:].isalpha() and len(text) > 2


def table(rows: Sequence[Row]) -> str:
    """Columns for people."""
    names = list(rows[0].errors)
    lines = [["", "rows", *names, "ms a layer", "build s", "MB", "stated error"]]
    for row in rows:
        stated = "" if row.stated_error is None else f"{row.stated_error:.2%}"
        numbers = [f"{row.errors[name]:.1%}" for name in names]
        costs = [f"{row.milliseconds:.2f}", f"{row.build_seconds:.2f}", f"{row.megabytes:.1f}"]
        lines.append([row.way, f"{row.rows:,}", *numbers, *costs, stated])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--text", type=Path, help="a text to count in; else Python's documentation topics")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--heads", type=int, default=20, help="counting heads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="save both tables as JSON")
    arguments = parser.parse_args()

    loaded = load("demo")
    text = arguments.text
    haystack = Haystack(text.name, text.read_text(encoding="utf-8")) if text else python_topics()
    filler = haystack.cut(loaded.tokenizer, arguments.tokens)
    example = CommonWords().build(random.Random(arguments.seed), filler)

    model = model_heads(loaded, example.context, example.question, arguments.answer_tokens)
    print(f"T2: the shipped model's heads, error of the output\n{table(model)}\n")
    counting, words = counting_heads(loaded.tokenizer, example.context, arguments.heads, arguments.seed)
    print(f"T3: {arguments.heads} made heads that count {words}\n{table(counting)}")
    if arguments.out:
        configuration = {**vars(arguments), "text": haystack.name, "sha256": haystack.sha256}
        results = {
            "configuration": configuration | {"version": version("offload-decode")},
            "T2": [asdict(row) for row in model],
            "T3": {"words": words, "rows": [asdict(row) for row in counting]},
        }
        arguments.out.write_text(json.dumps(results, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
