"""Needle in a haystack over a grid of lengths and depths: dense attention, a selector, and a control.

Kamradt's test (github.com/gkamradt/LLMTest_NeedleInAHaystack) with RULER's needle (arXiv 2404.06654). The
control asks the same questions of the same text without the needle: what is answered there was not read.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal, get_args

from offload_decode.engine.engine import Engine
from offload_decode.evals.contender import DENSE
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.runs import Stores, grouped
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.ruler import Needle
from offload_decode.models.loading import LoadedModel
from offload_decode.models.made_with import made_with
from offload_decode.store.reader import KVStore

Panel = Literal["dense", "selected", "control"]
PANELS: tuple[Panel, ...] = get_args(Panel)
MAX_NEW_TOKENS = 64  # enough for models that repeat the question before they answer it
_NEEDLE = Needle()


@dataclass(frozen=True)
class GridPlan:
    """What is measured: `lengths` in tokens, `depths` from 0 (start) to 1 (end), `trials` needles for each.

    `selector` with its `options` is what stands beside dense attention.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    selector: str
    options: Mapping[str, str]
    trials: int = 1
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens to prefill, the needles not counted."""
        return sum(self.lengths) * (len(self.depths) + 1) * self.trials


@dataclass(frozen=True)
class ScoredText:
    """The generated text and its score, from 0 to 1."""

    text: str
    score: float


@dataclass(frozen=True)
class Cell:
    """One needle: where it was hidden, in how many stored tokens, and the three replies."""

    length: int
    depth: float
    trial: int
    stored_tokens: int
    question: str
    expected: str
    dense: ScoredText
    selected: ScoredText
    control: ScoredText


@dataclass(frozen=True)
class NeedleGrid:
    """A plan, the configuration that it was measured with, and its cells."""

    plan: GridPlan
    configuration: Mapping[str, Any]
    cells: tuple[Cell, ...]

    def accuracy(self, panel: Panel) -> list[list[float]]:
        """Mean score `[depths][lengths]`."""
        cells = grouped(self.cells, lambda cell: (cell.depth, cell.length))
        places = [[(depth, length) for length in self.plan.lengths] for depth in self.plan.depths]
        return [[fmean(getattr(cell, panel).score for cell in cells[at]) for at in row] for row in places]

    def mean(self, panel: Panel) -> float:
        """Mean score over all cells."""
        return fmean(getattr(cell, panel).score for cell in self.cells)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: the configuration, the means, and every cell."""
        return {
            "configuration": {**self.configuration, **asdict(self.plan)},
            "accuracy": {panel: self.mean(panel) for panel in PANELS},
            "cells": [asdict(cell) for cell in self.cells],
        }


def measure(
    loaded: LoadedModel,
    haystack: Haystack,
    plan: GridPlan,
    stores: Stores,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NeedleGrid:
    """Measure every cell of a plan, with one temporary store at a time; `progress` counts prefilled tokens.

    The trials of a length take their text from evenly spread places. One control for each length and trial
    serves all depths: without the needle their texts are the same. Raises as `stores` and `Engine.open`.
    """
    done, cells, repeated = 0, [], set()

    @contextmanager
    def stored(text: str, length: int) -> Iterator[KVStore]:
        nonlocal done
        # A store is a little longer than its cell: the needle and what opens the prompt.
        with stores(text, lambda now: progress(done + min(now, length), plan.tokens)) as store:
            yield store
        done += length

    def replies(
        store: KVStore, selector: str, options: Mapping[str, str], *asked: Question
    ) -> list[ScoredText]:
        engine = Engine.open(store, loaded, selector=selector, options=options)
        answers = engine.answer_many([question.text for question in asked], MAX_NEW_TOKENS)
        scored = zip(asked, answers, strict=True)
        return [ScoredText(said.text, _NEEDLE.score(question, said.text)) for question, said in scored]

    # The longest first: the time that is left, judged by the speed so far, is then not promised too short.
    for length in sorted(plan.lengths, reverse=True):
        for trial in range(plan.trials):
            filler = haystack.cut(loaded.tokenizer, length, start=trial / plan.trials)
            if len(filler) > len(haystack.text):
                repeated.add(length)
            hidden = [
                _NEEDLE.hide(random.Random(f"{plan.seed} {length} {depth} {trial}"), filler, depth)
                for depth in plan.depths
            ]
            with stored(filler, length) as store:
                controls = replies(store, plan.selector, plan.options, *(question for _, question in hidden))
            for depth, (text, question), control in zip(plan.depths, hidden, controls, strict=True):
                with stored(text, length) as store:
                    (dense,) = replies(store, DENSE, {}, question)
                    (selected,) = replies(store, plan.selector, plan.options, question)
                    size = store.manifest.n_tokens
                about = length, depth, trial, size, question.text, question.answers[0]
                cells.append(Cell(*about, dense, selected, control))
    configuration = {
        **made_with(loaded),
        "text": haystack.name,
        "text_sha256": haystack.sha256,
        "max_new_tokens": MAX_NEW_TOKENS,
        "text_repeated_at": sorted(repeated),
    }
    cells.sort(key=lambda cell: plan.lengths.index(cell.length))
    return NeedleGrid(plan, configuration, tuple(cells))
