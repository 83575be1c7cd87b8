"""The grid hides, asks and scores as it says; a stand-in for the model reads the stored text alone."""

import io
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from offload_decode.cli.eval.run import PrefilledStores
from offload_decode.engine.engine import Engine
from offload_decode.evals import needle_grid
from offload_decode.evals.contender import label
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.needle_grid import Cell, GridPlan, NeedleGrid, ScoredText, measure
from offload_decode.evals.plots import save_needles
from offload_decode.evals.runs import Stores
from offload_decode.evals.summary import of_needles
from offload_decode.evals.tasks.base import string_match
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.job import Settings
from offload_decode.store.reader import KVStore
from offload_decode.types import Answer, StepStats

WORDS = Haystack("words", "".join(f"Sentence {number}. " for number in range(100)))
PLAN = GridPlan((300, 500), (0.0, 0.5, 1.0), "topk", {"budget": "16"}, trials=2)
SMALL = GridPlan((200, 300), (0.0, 1.0), "topk", {"budget": "16"})
NEEDLE = re.compile(r" ?One of the special magic numbers for [\w-]+ is: (\d+)\. ?")


def _stores(loaded: LoadedModel, contexts: list[str]) -> Stores:
    stores = PrefilledStores(loaded, "text", Settings())

    def noted(text: str, report: Callable[[int], None]) -> AbstractContextManager[KVStore]:
        contexts.append(text)
        return stores(text, report)

    return noted


def _run(loaded: LoadedModel, plan: GridPlan = PLAN, **others: Any) -> tuple[NeedleGrid, list[str]]:
    contexts: list[str] = []
    return measure(loaded, WORDS, plan, _stores(loaded, contexts), **others), contexts


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> tuple[NeedleGrid, list[str]]:
    """A grid with the model's own answers, and the texts that were prefilled for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needle_grid, "MAX_NEW_TOKENS", 3)
        return _run(loaded)


def _answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[Engine, str], str]) -> None:
    """Replace the model's answers: `answer(engine, question)`."""

    def answer_many(engine: Engine, questions: list[str], *limits: int) -> list[Answer]:
        return [Answer(answer(engine, question), (), StepStats(), "stop") for question in questions]

    monkeypatch.setattr(Engine, "answer_many", answer_many)


def _look_up(engine: Engine, question: str) -> str:
    key = re.search(r"number for (\S+) mentioned", question)
    assert key is not None, question
    found = re.search(f"numbers for {key[1]} is: (\\d+)", engine.decode(engine.store.tokens.tolist()))
    return f"It is {found[1]}." if found else "It is not there."


def test_every_length_depth_and_trial_is_a_cell(measured: tuple[NeedleGrid, list[str]]) -> None:
    grid, _ = measured
    places = [(cell.length, cell.trial, cell.depth) for cell in grid.cells]
    assert places == [(n, t, d) for n in PLAN.lengths for t in range(2) for d in PLAN.depths]
    for cell in grid.cells:
        assert cell.length < cell.stored_tokens < cell.length + 120  # the needle comes on top
        for reply in (cell.dense, cell.selected, cell.control):
            assert reply.score == string_match((cell.expected,), reply.text)
    assert len({cell.expected for cell in grid.cells}) == len(grid.cells)


def test_one_needle_in_each_text_at_its_depth_and_none_in_the_control(
    measured: tuple[NeedleGrid, list[str]],
) -> None:
    _, contexts = measured
    for first in range(0, len(contexts), 4):
        control, *with_needle = contexts[first : first + 4]
        assert NEEDLE.search(control) is None
        for text, depth in zip(with_needle, PLAN.depths, strict=True):
            (found,) = NEEDLE.finditer(text)
            assert found.start() / (len(text) - len(found[0])) == pytest.approx(depth, abs=0.05)
            assert NEEDLE.sub(" ", text).split() == control.split()
    assert len(contexts) == 16


@pytest.mark.parametrize(
    ("answer", "means"), [(_look_up, [1, 1, 0]), (lambda engine, question: question, [0, 0, 0])]
)
def test_needles_score_reading_and_not_repeating_the_question(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, answer: Any, means: list[int]
) -> None:
    """Only what was generated is scored, and the control is not found."""
    _answering(monkeypatch, answer)
    grid, contexts = _run(loaded, SMALL)
    assert all(any(cell.expected in text for text in contexts) for cell in grid.cells)
    assert [grid.mean(panel) for panel in needle_grid.PANELS] == means


def test_the_panels_are_dense_and_the_selector_with_its_options(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answering(monkeypatch, lambda engine, _: f"{engine.selector.name} {engine.selector.options.budget}")
    grid, _ = _run(loaded, SMALL)
    assert {cell.dense.text for cell in grid.cells} == {"dense 100%"}
    assert {cell.selected.text for cell in grid.cells} == {"topk 16"}
    assert {cell.control.text for cell in grid.cells} == {"topk 16"}


def test_accuracy_is_the_mean_of_the_trials_by_depth_and_length() -> None:
    grid = _grid([1, 0, 1, 1, 0, 0, 0, 0])
    assert grid.accuracy("dense") == [[0.5, 0.0], [1.0, 0.0]]
    assert grid.mean("dense") == 3 / 8


def test_a_run_can_be_repeated(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needle_grid, "MAX_NEW_TOKENS", 3)
    plan = GridPlan((200,), (0.5,), "topk", {"budget": "16"})
    assert _run(loaded, plan)[0] == _run(loaded, plan)[0]


def test_progress_ends_at_all_tokens(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, _look_up)
    seen: list[tuple[int, int]] = []
    _run(loaded, SMALL, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (SMALL.tokens, SMALL.tokens) == (3 * 500, 3 * 500)


def test_json_holds_the_configuration_and_every_cell(
    loaded: LoadedModel, measured: tuple[NeedleGrid, list[str]]
) -> None:
    grid, _ = measured
    read = json.loads(json.dumps(grid.to_json()))
    configuration = read["configuration"]
    assert configuration["text_sha256"] == WORDS.sha256
    assert configuration["weights_hash"] == loaded.weights_hash
    libraries = "python offload-decode torch transformers numpy zarr"
    assert configuration["versions"].keys() == set(libraries.split())
    told = {"model": "tiny", "seed": 0, "selector": "topk", "options": {"budget": "16"}}
    assert {key: configuration[key] for key in told} == told
    assert configuration["lengths"] == [300, 500]
    assert TypeAdapter(tuple[Cell, ...]).validate_python(read["cells"]) == grid.cells


def test_lengths_beyond_the_text_are_named(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _answering(monkeypatch, _look_up)
    short = Haystack("short", "Some words. " * 20)
    plan = GridPlan((200, 300), (0.5,), "topk", {"budget": "16"})
    grid = measure(loaded, short, plan, _stores(loaded, []))
    assert grid.configuration["text_repeated_at"] == [300]


def test_labels() -> None:
    assert [label(n) for n in (300, 2048, 3000, 1 << 20)] == ["300", "2K", "3,000", "1M"]


def _grid(dense: list[float], text: str = "t") -> NeedleGrid:
    plan = GridPlan((1024, 2048), (0.0, 1.0), "topk", {"budget": "64"}, trials=2)
    cells = tuple(
        Cell(*place, 9, "q", "1", ScoredText("", score), ScoredText("", 1.0), ScoredText("", 0.0))
        for place, score in zip(product(plan.lengths, plan.depths, range(2)), dense, strict=True)
    )
    return NeedleGrid(plan, {"model": "some/model", "text": text}, cells)


def test_the_picture_shows_the_accuracies(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    pictures = []
    for scores in ([1.0] * 8, [0.0] * 8):
        save_needles(_grid(scores, text="a $ in a name.txt"), tmp_path / "grid.png")
        pictures.append(image.imread(io.BytesIO((tmp_path / "grid.png").read_bytes())))
    assert [path.name for path in tmp_path.iterdir()] == ["grid.png"]
    found, missed = pictures
    height, width, _ = found.shape
    assert height > 400
    assert width > 900
    # Dense is the first panel: only there do the pictures differ, and it is dark where needles were found.
    differing = np.flatnonzero((found != missed).any(axis=(0, 2)))
    assert differing.max() < width * 0.45
    body = np.s_[height // 3 : height * 2 // 3, differing.min() : differing.max()]
    assert found[body].mean() < missed[body].mean() - 0.3


def test_a_model_that_finds_nothing_is_said_to() -> None:
    nothing, all_ = [0.0] * 12, [1.0] * 12
    assert of_needles([all_, nothing], nothing) == []
    assert of_needles([nothing, all_], nothing) == []
    (said,) = of_needles([nothing, nothing], nothing)
    assert "nothing here says anything about a selector" in said
    assert of_needles([all_, all_], all_), "the control is answered as well"
    (few,) = of_needles([[1.0], [1.0]], [0.0])
    assert "Hide more" in few
