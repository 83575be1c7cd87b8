"""Answers from a store, end to end, beside transformers' own: `python -m benchmarks.decode --store STORE`.

Tokens a second with 1, 4 and 16 questions at once. The baseline is transformers' `generate` with its full
DynamicCache of the same stored tokens, where two copies of it fit into memory; ours are dense attention,
top-k with the exact scan and every index beside the store, and Quest. The time of a token is split into
search, gathering rows, attending to them, the model (transformers' own code between attention calls), and
Python: all else of ours, with the tail's attention, masks, merging and sampling.

`idle`: what a step of the same way takes on IDLE stored tokens, where there is nothing to read, beyond
transformers' step on the same: Python and dispatch. `same`: the share of the answers' tokens, up to the first
that differs, that dense attention to the store gives too.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from benchmarks import history, machine, tables
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
from offload_decode.prefill_jobs.indexing import build_indexes
from offload_decode.prefill_jobs.job import prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document

BASELINE = "transformers, full cache"
DENSE = "dense"
IDLE = 64
STAGES = ("search", "gather", "attend", "model", "Python")
Answers = list[tuple[int, ...]]


@dataclass
class Pass:
    """One forward pass: when it began and ended, and the seconds in it that are not the model's own."""

    began: float
    ended: float = 0.0
    ours: float = 0.0
    stages: tuple[float, float, float] = (0.0, 0.0, 0.0)


class Clock:
    """Notes every forward pass of a model inside the block."""

    def __init__(self, model: torch.nn.Module):
        self.passes: list[Pass] = []
        self._model = model
        self._stats: Any = None
        self._before: tuple[Any, tuple[float, float, float]] = (None, (0.0, 0.0, 0.0))

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
        return [spent(one, following.began) for one, following in pairwise(self.passes[1:])]

    def _begin(self) -> None:
        self.passes.append(Pass(time.perf_counter()))

    def _end(self) -> None:
        own = self.passes[-1]
        own.ended = time.perf_counter()
        if self._stats is not None:
            spent = (self._stats.search_s, self._stats.gather_s, self._stats.attend_s)
            stats, known = self._before
            before = known if stats is self._stats else (0.0, 0.0, 0.0)
            own.stages = (spent[0] - before[0], spent[1] - before[1], spent[2] - before[2])
            self._before = (self._stats, spent)

    def _timed(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            given = work(*arguments, **named)
            self.passes[-1].ours += time.perf_counter() - began
            return given

        return timed

    def _attention(self, module: Any, query: Any, key: Any, *rest: Any, **named: Any) -> Any:
        layer = RUNNING.current.layer_of(key)
        if isinstance(layer, PrefixLayer):
            self._stats = getattr(layer.prefix, "stats", None)
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
    idle: float | None = None

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

    def ways(self) -> dict[str, dict[str, str]]:
        """Our ways: the options of each."""
        found = indexes_folder(self.store.path)
        kinds = [kind for kind in registry.kinds() if kind == "flat" or (found / kind).is_dir()]
        return {
            DENSE: {},
            **{f"topk, {kind}": {"budget": self.budget, "index": kind} for kind in kinds},
            "quest": {"budget": self.budget, "dense_layers": ""},
        }

    def measured(self, way: str, questions: Sequence[str], expected: Answers | None) -> tuple[Row, Answers]:
        """A way, asked again and again for `seconds`; what it answered."""
        if way == BASELINE:
            ask, model = partial(self._generate, questions), self.plain
        else:
            name = way.partition(",")[0]
            engine = Engine.open(self.store, self.loaded, selector=name, options=self.ways()[way])
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
        asked = [prompt.first(self.loaded.tokenizer, question) for question in questions]
        longest, stored = max(map(len, asked)), self.store.tokens.tolist()
        ids = torch.tensor([stored + [0] * (longest - len(own)) + own for own in asked])
        mask = torch.ones_like(ids)
        for row, own in enumerate(asked):
            mask[row, len(stored) : len(stored) + longest - len(own)] = 0
        cache = full_cache(self.store, self.plain.config, len(questions))
        out = self.plain.generate(
            ids, attention_mask=mask, **{generate_name(): cache}, max_new_tokens=self.tokens, do_sample=False
        )
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]


def spent(one: Pass, following: float) -> tuple[float, dict[str, float]]:
    """The seconds of a step, and where they went."""
    step, model = following - one.began, one.ended - one.began - one.ours
    return step, dict(zip(STAGES, (*one.stages, model, step - model - sum(one.stages)), strict=True))


def agreement(answer: Sequence[int], expected: Sequence[int]) -> float:
    """The share of tokens before the first that differs, of as many as both have."""
    length = min(len(answer), len(expected))
    equal = (place for place in range(length) if answer[place] != expected[place])
    return next(equal, length) / max(1, length)


def full_cache(store: KVStore, config: Any, questions: int) -> DynamicCache:
    """transformers' own cache of everything that is stored, in the model's dtype."""
    cache, shape = DynamicCache(config=config), store.manifest.shape
    for layer, own in enumerate(shape.layers):
        if own.local:
            keys, values = (tensor_view(part) for part in store.window(layer))
        else:
            keys, values = (whole(rows, layer, shape.kv_heads) for rows in (store.keys, store.values))
        dtype = getattr(torch, store.manifest.dtype)
        cache.update(keys[None].to(dtype), values[None].to(dtype), layer)
        if own.local:
            cache.layers[layer].cumulative_length = store.manifest.n_tokens
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


def asked(questions: int) -> list[str]:
    """Different questions, of a length."""
    rng = random.Random(0)
    return [ASK.format(key=key) for key in words.keys(rng, questions)]


@contextmanager
def idle_store(store: KVStore, loaded: LoadedModel) -> Iterator[KVStore]:
    """The first IDLE tokens of a store, as a store of their own with the same indexes."""
    tokens = np.array(store.tokens[:IDLE])
    with TemporaryDirectory(prefix="offload-decode-idle-") as folder:
        path = Path(folder) / "idle.kv"
        prefill_tokens(loaded, tokens, [Document("idle", 0, len(tokens))], path)
        for kind in registry.kinds():
            if kind != "flat" and (indexes_folder(store.path) / kind).is_dir():
                build_indexes(path, kind)
        yield KVStore.open(path)


def compared(bench: Bench, counts: Sequence[int]) -> list[Row]:
    """Every way with every number of questions."""
    rows: list[Row] = []
    with idle_store(bench.store, bench.loaded) as small:
        idle = Bench(small, bench.loaded, bench.plain, bench.budget, bench.tokens, bench.seconds / 4)
        for count in counts:
            questions = asked(count)
            expected: Answers | None = None
            least, _ = idle.measured(BASELINE, questions, None)
            for way in (*bench.ways(), BASELINE):
                print(f"{way}, {count} at once", file=sys.stderr, flush=True)
                if way == BASELINE and not fits(bench.store, count):
                    print(f"{way} does not fit into memory", file=sys.stderr)
                    continue
                row, answers = bench.measured(way, questions, expected)
                expected = answers if way == DENSE else expected
                if way != BASELINE:
                    still, _ = idle.measured(way, questions, None)
                    row = Row(**{**vars(row), "idle": max(0.0, still.seconds - least.seconds)})
                rows.append(row)
    return rows


def show(rows: Sequence[Row]) -> str:
    """A table for each number of questions."""
    base = {row.questions: row.seconds for row in rows if row.way == BASELINE}
    alone = {row.way: row.seconds for row in rows if row.questions == 1}
    heads = ["way", "questions", "tokens/s", "step, ms", *(f"{stage}, ms" for stage in STAGES)]
    heads += ["idle, ms", "of 1 question", f"x {BASELINE}", "same"]
    return tables.table(
        heads,
        [
            [
                row.way,
                str(row.questions),
                f"{row.tokens_per_second:,.1f}",
                f"{row.seconds * 1e3:.2f}",
                *(f"{row.stages[stage] * 1e3:.2f}" for stage in STAGES),
                "" if row.idle is None else f"{row.idle * 1e3:.2f} ({row.idle / row.seconds:.0%})",
                f"{row.seconds / alone[row.way]:.2f}x" if row.way in alone else "",
                f"{base[row.questions] / row.seconds:.2f}x" if row.questions in base else "",
                f"{row.same:.0%}",
            ]
            for row in rows
        ],
    )


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """Single numbers for the history."""
    base = {row.questions: row.seconds for row in rows if row.way == BASELINE}
    alone = {row.way: row.seconds for row in rows if row.questions == 1}
    found: dict[str, float] = {}
    for row in rows:
        name = f"{row.way}/{row.questions}"
        found[f"{name}/tokens per second"] = row.tokens_per_second
        if row.questions in base and row.way != BASELINE:
            found[f"{name}/x transformers"] = base[row.questions] / row.seconds
        if row.questions > 1 and row.way in alone:
            found[f"{name}/of 1 question"] = row.seconds / alone[row.way]
        if row.idle is not None:
            found[f"{name}/idle share"] = row.idle / row.seconds
    return found


def without_end(model: Any) -> None:
    """Answers of one length."""
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, help="a store; its model is loaded, on the CPU")
    parser.add_argument("--budget", default="1024", help="stored tokens for each query, of topk and quest")
    parser.add_argument("--questions", default="1,4,16", help="at once, separated by commas")
    parser.add_argument("--tokens", type=int, default=12, help="of each answer")
    parser.add_argument("--seconds", type=float, default=3.0, help="for the repetitions of a way")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="save everything that was measured")
    parser.add_argument("--results", type=Path, default=history.RESULTS, help="for the plot and the history")
    arguments = parser.parse_args(argv)
    if arguments.store is None:
        parser.error("--store is needed: make one with `offload-decode prefill`")
    if arguments.quick:
        arguments.questions, arguments.tokens, arguments.seconds, arguments.budget = "1,2", 4, 0.0, "16"
    if arguments.tokens < 4:
        parser.error("--tokens must be 4 or more: the first is the question's, the last has no next")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = machine.measure(1 << 22) if arguments.quick else machine.measure()
    store = KVStore.open(arguments.store)
    loaded, plain = (load(store.manifest.model_id, "cpu", store.manifest.dtype) for _ in range(2))
    plain.model.set_attn_implementation("sdpa")
    for model in (loaded.model, plain.model):
        without_end(model)
    length = store.manifest.n_tokens
    print(
        f"# Answers from {length:,} stored tokens, budget {arguments.budget}\n\n{host.lines()}\n", flush=True
    )
    bench = Bench(store, loaded, plain.model, arguments.budget, arguments.tokens, arguments.seconds)
    rows = compared(bench, [int(count) for count in arguments.questions.split(",")])
    print(show(rows))
    settings = {"stored tokens": length, "budget": arguments.budget, "model": store.manifest.model_id}
    settings |= {"tokens": arguments.tokens, "threads": torch.get_num_threads()}
    if arguments.json:
        saved = {"settings": settings, **machine.made_with(host), "figures": figures(rows)}
        saved["rows"] = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            lines.setdefault(row.way, []).append((row.questions, row.tokens_per_second))
        tables.draw(
            arguments.results / "decode.png",
            "Answers from a store, end to end",
            {f"{length:,} stored tokens, budget {arguments.budget}": lines},
            across="questions at once",
            up="tokens a second",
            footnote=host.lines(),
        )
        history.append(arguments.results, "decode", settings, figures(rows), host)


if __name__ == "__main__":
    main()
