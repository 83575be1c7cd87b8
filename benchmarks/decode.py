"""Answers from a store, end to end, beside transformers' own: `python -m benchmarks.decode --store STORE`.

Tokens a second with 1, 4 and 16 questions at once. The baseline is transformers' `generate` with its full
DynamicCache of the same stored tokens, where two copies of it fit into memory; ours are dense attention,
top-k with the exact scan and every index beside the store, and Quest. The time of a token is split into
search, gathering rows, attending to them, the model (transformers' own code between attention calls), and
Python: all else of ours, with attention to generated tokens, masks, merging and sampling.

`same`: the share of the answers' tokens, up to the first
that differs, that dense attention to the store gives too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from benchmarks.common import option_parser, table
from offload_decode.attention.rows import Rows, tensor_view
from offload_decode.common.memory import total_memory
from offload_decode.engine.engine import Engine
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.ruler import ASK
from offload_decode.hf.attention import NAME, generated_mask, prefix_attention
from offload_decode.hf.cache_layers import RUNNING, PrefixLayer
from offload_decode.hf.compat import generate_name
from offload_decode.indexes import registry
from offload_decode.kv.indexes import indexes_folder
from offload_decode.models.loading import LoadedModel, load
from offload_decode.store.reader import KVStore

BASELINE = "transformers, full cache"
DENSE = "dense"
STAGES = ("search", "gather", "attend", "model", "Python")
Answers = list[tuple[int, ...]]


@dataclass
class Pass:
    """One forward pass: when it began and ended, the seconds in it that are not the model's own, and which
    stats had counted how many seconds of search, gathering and attention by its end.
    """

    began: float
    ended: float = 0.0
    ours: float = 0.0
    stats: Any = None
    counted: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Clock:
    """Notes every forward pass of a model inside the block."""

    def __init__(self, model: torch.nn.Module):
        self.passes: list[Pass] = []
        self._model = model

    def __enter__(self) -> Clock:
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, self._timed(generated_mask))
        self._hooks = [
            self._model.register_forward_pre_hook(lambda *_: self._begin()),
            self._model.register_forward_hook(lambda *_: self._end()),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        AttentionInterface.register(NAME, prefix_attention)
        AttentionMaskInterface.register(NAME, generated_mask)
        for hook in self._hooks:
            hook.remove()

    def steps(self) -> list[tuple[float, dict[str, float]]]:
        """Seconds of the steps of an answer, and where they went. The first pass is the question's, and what
        follows the last is no step.
        """
        return [spent(*three) for three in zip(self.passes, self.passes[1:], self.passes[2:], strict=False)]

    def _begin(self) -> None:
        self.passes.append(Pass(time.perf_counter()))

    def _end(self) -> None:
        one = self.passes[-1]
        one.ended = time.perf_counter()
        if one.stats is not None:
            one.counted = (one.stats.search_s, one.stats.gather_s, one.stats.attend_s)

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = work(*arguments, **named)
            self.passes[-1].ours += time.perf_counter() - began
            return result

        return timed

    def _attention(self, module: Any, query: Any, key: Any, *rest: Any, **named: Any) -> Any:
        layer = RUNNING.current.layer_of(key)
        if isinstance(layer, PrefixLayer):
            self.passes[-1].stats = getattr(layer.prefix, "stats", None)
        return self._timed(prefix_attention)(module, query, key, *rest, **named)


@dataclass(frozen=True)
class Row:
    """A way with so many questions at once; seconds are of a step, the median of `steps`."""

    way: str
    questions: int
    steps: int
    seconds: float
    stages: dict[str, float]
    same: float

    @property
    def tokens_per_second(self) -> float:
        return self.questions / self.seconds


@dataclass(frozen=True)
class Bench:
    """A store to ask, the model that attends through our function, and the same model as it came."""

    store: KVStore
    loaded: LoadedModel
    plain: Any
    budget: str
    tokens: int
    seconds: float

    def measured(self, way: str, questions: Sequence[str], expected: Answers | None) -> tuple[Row, Answers]:
        """A way, asked again and again for `seconds`; what it answered."""
        if way == BASELINE:
            ask, model = partial(self._generate, questions), self.plain
        else:
            name = way.partition(",")[0]
            options = {DENSE: {}, **ways(self.store.path, self.budget)}[way]
            engine = Engine.open(self.store, self.loaded, selector=name, options=options)
            ask, model = partial(self._ask, engine, questions), self.loaded.model
        with Clock(model) as clock:
            began = time.perf_counter()
            answers = ask()
            steps: list[tuple[float, dict[str, float]]] = []
            # The first time is a warm-up, unless it took so long that it is all there will be.
            if slow := time.perf_counter() - began > 2 * self.seconds:
                steps = clock.steps()
            until = time.perf_counter() + self.seconds
            while not slow and (not steps or time.perf_counter() < until):
                clock.passes.clear()
                ask()
                steps += clock.steps()
        same = 1.0 if expected is None else statistics.mean(map(agreement, answers, expected))
        stages = {stage: statistics.median(parts[stage] for _, parts in steps) for stage in STAGES}
        seconds = statistics.median(seconds for seconds, _ in steps)
        return Row(way, len(questions), len(steps), seconds, stages, same), answers

    def _ask(self, engine: Engine, questions: Sequence[str]) -> Answers:
        if len(questions) == 1:
            return [engine.answer(questions[0], self.tokens).tokens]
        return [one.tokens for one in engine.answer_many(questions, self.tokens, len(questions))]

    def _generate(self, questions: Sequence[str]) -> Answers:
        prompt = self.loaded.prompt
        rows = [prompt.first(self.loaded.tokenizer, question) for question in questions]
        longest, stored = max(map(len, rows)), self.store.tokens.tolist()
        ids = torch.tensor([stored + [0] * (longest - len(row)) + row for row in rows])
        mask = torch.ones_like(ids)
        for place, row in enumerate(rows):
            mask[place, len(stored) : len(stored) + longest - len(row)] = 0
        cache = full_cache(self.store, self.plain.config, len(questions))
        out = self.plain.generate(
            ids, attention_mask=mask, **{generate_name(): cache}, max_new_tokens=self.tokens, do_sample=False
        )
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]


def ways(path: Path, budget: str) -> dict[str, dict[str, str]]:
    """Our ways with a store, by `SELECTOR, …`: the options of each."""
    built = indexes_folder(path)
    kinds = [kind for kind in registry.kinds() if kind == "flat" or (built / kind).is_dir()]
    return {
        **{f"topk, {kind}": {"budget": budget, "index": kind} for kind in kinds},
        "quest": {"budget": budget, "dense_layers": ""},
    }


def spent(before: Pass, one: Pass, following: Pass) -> tuple[float, dict[str, float]]:
    """The seconds of a step, and where they went."""
    counted = np.array(one.counted)
    if before.stats is one.stats:
        counted -= before.counted
    step, model = following.began - one.began, one.ended - one.began - one.ours
    stages = (*counted.tolist(), model, step - model - counted.sum())
    return step, dict(zip(STAGES, map(float, stages), strict=True))


def agreement(answer: Sequence[int], expected: Sequence[int]) -> float:
    """The share of tokens before the first that differs, of as many as both have."""
    length = min(len(answer), len(expected))
    equal = (place for place in range(length) if answer[place] != expected[place])
    return next(equal, length) / max(1, length)


def full_cache(store: KVStore, config: Any, questions: int) -> DynamicCache:
    """transformers' own cache of everything that is stored, in the model's dtype."""
    cache, shape = DynamicCache(config=config), store.manifest.shape
    dtype = getattr(torch, store.manifest.dtype)
    for number, layer in enumerate(shape.layers):
        if layer.local:
            keys, values = (tensor_view(part) for part in store.window(number))
        else:
            keys, values = (whole(rows, number, shape.kv_heads) for rows in (store.keys, store.values))
        cache.update(keys[None].to(dtype), values[None].to(dtype), number)
        if layer.local:
            cache.layers[number].cumulative_length = store.manifest.n_tokens
    cache.batch_repeat_interleave(questions)
    return cache


def whole(rows: Callable[[int, int], Any], layer: int, kv_heads: int) -> torch.Tensor:
    """All stored rows of a layer, float32 `[Hkv, N, D]`."""
    host = torch.device("cpu")
    return torch.stack([Rows(rows(layer, head)).read(slice(None), host) for head in range(kv_heads)])


def fits(store: KVStore, questions: int) -> bool:
    """Whether a full cache for so many questions does, beside the one that `update` makes of it."""
    cost = store.cost()
    return 2 * questions * (cost["keys"] + cost["values"]) < 0.6 * total_memory()


def different(questions: int) -> list[str]:
    """Different questions, of a length."""
    rng = random.Random(0)
    return [ASK.format(key=key) for key in words.keys(rng, questions)]


def compared(bench: Bench, counts: Sequence[int]) -> list[Row]:
    """Every way with every number of questions."""
    rows: list[Row] = []
    for count in counts:
        questions = different(count)
        expected: Answers | None = None
        for way in (DENSE, *ways(bench.store.path, bench.budget), BASELINE):
            print(f"{way}, {count} at once", file=sys.stderr, flush=True)
            if way == BASELINE and not fits(bench.store, count):
                print(f"{way} does not fit into memory", file=sys.stderr)
                continue
            row, answers = bench.measured(way, questions, expected)
            expected = answers if way == DENSE else expected
            rows.append(row)
    return rows


def ratios(rows: Sequence[Row]) -> Iterator[tuple[Row, float | None, float | None]]:
    """Every row: its seconds in those of a single question, and those of the baseline in its own."""
    base = {row.questions: row.seconds for row in rows if row.way == BASELINE}
    alone = {row.way: row.seconds for row in rows if row.questions == 1}
    for row in rows:
        of_one = row.seconds / alone[row.way] if row.way in alone else None
        yield row, of_one, base[row.questions] / row.seconds if row.questions in base else None


def show(rows: Sequence[Row]) -> str:
    """A table of all rows."""
    heads = ["way", "questions", "tokens/s", "step, ms", *(f"{stage}, ms" for stage in STAGES)]
    heads += ["of 1 question", f"x {BASELINE}", "same"]
    cells = [
        [
            row.way,
            str(row.questions),
            f"{row.tokens_per_second:,.1f}",
            f"{row.seconds * 1e3:.2f}",
            *(f"{row.stages[stage] * 1e3:.2f}" for stage in STAGES),
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in (of_one, faster)),
            f"{row.same:.0%}",
        ]
        for row, of_one, faster in ratios(rows)
    ]
    return table(heads, cells)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--store", type=Path, required=True, help="its model is loaded, on the CPU")
    parser.add_argument("--budget", default="1024", help="stored tokens for each query, of topk and quest")
    parser.add_argument("--questions", default="1,4,16", help="at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--seconds", type=float, default=3.0, help="for the repetitions of a way")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.questions, arguments.tokens, arguments.seconds, arguments.budget = "1,2", 4, 0.0, "16"
    if arguments.tokens < 4:
        parser.error("--tokens must be 4 or more: the first is the question's, the last has no next")
    return arguments


def main(argv: Sequence[str] | None = None) -> list[Row]:
    arguments = parsed(argv)
    store = KVStore.open(arguments.store)
    length, model_id = store.manifest.n_tokens, store.manifest.model_id
    print(f"# Answers from {length:,} stored tokens, budget {arguments.budget}\n", flush=True)
    loaded, plain = (load(model_id, "cpu", store.manifest.dtype) for _ in range(2))
    plain.model.set_attn_implementation("sdpa")
    for model in (loaded.model, plain.model):  # answers of one length
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        model.generation_config.pad_token_id = 0
    bench = Bench(store, loaded, plain.model, arguments.budget, arguments.tokens, arguments.seconds)
    rows = compared(bench, [int(count) for count in arguments.questions.split(",")])
    print(show(rows))
    return rows


if __name__ == "__main__":
    main()
