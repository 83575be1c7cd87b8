"""Questions asked side by side: every way reads the same store, and the control lacks the fact."""

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload_decode.cli.eval.run import PrefilledStores
from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.evals import answering, tasks
from offload_decode.evals.answering import Answering, AnswerPlan
from offload_decode.evals.contender import Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.runs import AnswerRecord, Results, questions_and_answers, run
from offload_decode.evals.side_by_side import WayAnswer, reply
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.job import Settings
from tests.evals.made_up import looked_up

WORDS = Haystack("words", "".join(f"Sentence {number}. " for number in range(400)))
FEW, ALL = Contender("topk", {"budget": "8"}), Contender("topk", {"budget": "100%"})
PLAN = AnswerPlan("suite", (600,), (FEW, ALL), limit=2, seeds=(0, 1))
TASKS = ("niah_single_2", "niah_multikey_1")


def evaluation(loaded: LoadedModel, plan: AnswerPlan = PLAN, keep: Path | None = None) -> Answering:
    stores = PrefilledStores(loaded, "text", Settings(), keep=keep)
    return Answering(plan, [tasks.get(name) for name in TASKS], loaded, WORDS, stores)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def read(loaded: LoadedModel, kept: Path) -> Results:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "reply", looked_up)
        return run(evaluation(loaded, keep=kept), loaded, kept / "run.jsonl")


def answers(results: Results, **those: Any) -> list[AnswerRecord]:
    every = [said for _, found in questions_and_answers(results) for said in found]
    return [said for said in every if all(getattr(said, name) == value for name, value in those.items())]


def test_a_perfect_reader_is_right_everywhere_but_in_the_controls(read: Results) -> None:
    assert len(read.finished) == read.header.units
    assert {said.score for said in answers(read, control=False)} == {1.0}
    assert {said.score for said in answers(read, control=True)} == {0.0}
    assert {(said.exact_match, said.f1) for said in answers(read, control=False)} == {(1.0, 1.0)}
    assert {(said.exact_match, said.f1) for said in answers(read, control=True)} == {(0.0, 0.0)}
    assert {said.way for said in answers(read, control=True)} == {"dense"}


def test_controls_are_left_out_where_nobody_wants_them(loaded: LoadedModel) -> None:
    without, asked = (evaluation(loaded, replace(PLAN, control_every=every)) for every in (0, 1))
    for evaluated, lengths in ((without, 600), (asked, 1200)):
        assert {unit.tokens for unit in evaluated.units()} == {lengths}


def test_every_way_answers_every_question_once_and_the_limit_is_kept(read: Results) -> None:
    asked = [found for found, _ in questions_and_answers(read)]
    assert len(asked) == len(TASKS) * len(PLAN.lengths) * len(PLAN.seeds) * PLAN.limit
    for question, found in questions_and_answers(read):
        ways = [said.way for said in found if not said.control]
        assert ways == ["dense", FEW.label, ALL.label], question
    assert {question.stored_tokens > 0.9 * question.length for question in asked} == {True}


def test_seeds_and_contexts_draw_other_questions(read: Results) -> None:
    asked = [question for question, _ in questions_and_answers(read)]
    assert len({question.asked for question in asked}) == len(asked)


def test_keeping_all_keys_answers_as_dense_attention_does(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    def short(engine: Engine, way: str, question: str, most: int, begun: str = "") -> WayAnswer:
        return reply(engine, way, question, 4, begun)

    monkeypatch.setattr(answering, "reply", short)
    plan = dataclasses.replace(PLAN, seeds=(0,))
    found = run(evaluation(loaded, plan, kept), loaded, tmp_path / "run.jsonl")
    for _, each in questions_and_answers(found):
        dense, few, every = [said for said in each if not said.control]
        assert every.said == dense.said
        assert few.attended == 8 < every.attended


def test_a_run_that_was_killed_goes_on_and_is_the_same_as_one_that_was_not(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Results, kept: Path
) -> None:
    left = 9

    def dies(*args: Any) -> WayAnswer:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        return looked_up(*args)

    monkeypatch.setattr(answering, "reply", dies)
    with pytest.raises(KeyboardInterrupt):
        run(evaluation(loaded, keep=kept), loaded, tmp_path / "again.jsonl")
    monkeypatch.setattr(answering, "reply", looked_up)
    assert run(evaluation(loaded, keep=kept), loaded, tmp_path / "again.jsonl").records == read.records


def test_stores_that_are_kept_are_used_again(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Results, kept: Path
) -> None:
    monkeypatch.setattr(answering, "reply", looked_up)

    def none(*_: Any, **__: Any) -> None:
        raise AssertionError("it was prefilled again")

    monkeypatch.setattr("offload_decode.prefill_jobs.job.prefill_texts", none)
    assert run(evaluation(loaded, keep=kept), loaded, tmp_path / "second.jsonl").records == read.records


def test_an_answer_that_is_begun_goes_on_from_there(loaded: LoadedModel, tmp_path: Path) -> None:
    with PrefilledStores(loaded, "text", Settings())(WORDS.text[:400], lambda done: None) as store:
        engine = Engine.open(store, loaded, selector="dense")
        whole = engine.question_tokens("What is it?", " It is")
        asked = engine.question_tokens("What is it?")
        assert whole[: len(asked)] == asked
        assert engine.decode(whole[len(asked) :]) == " It is"
        begun = engine.fork().ask("What is it?", " It is")
        assert begun.tolist() == engine.fork().extend(whole).tolist()


def test_what_cannot_be_asked_shows_before_anything_is_prefilled(loaded: LoadedModel) -> None:
    short = evaluation(loaded, dataclasses.replace(PLAN, lengths=(600, 10)))
    told: list[tuple[int, int]] = []
    unfit = short.unfit(lambda *now: told.append(now))
    assert unfit.keys() == {task.name for task in short.tasks}
    assert all("10 tokens do not hold" in str(why) for why in unfit.values())
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert evaluation(loaded).unfit(lambda *now: told.append(now)) == {}
    assert told[-1] == (2, 2)


def test_ways_that_cannot_be_told_apart_are_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        evaluation(loaded, dataclasses.replace(PLAN, contenders=(FEW, FEW)))
