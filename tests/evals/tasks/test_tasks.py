"""Tasks: facts are where they were asked to be, the control has none, the score reads the answer alone."""

from __future__ import annotations

import random

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import tasks
from offload_decode.evals.haystack import Haystack, Strand
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import HiddenFacts, insert
from tests.tiny import tiny_tokenizer

HIDDEN = [name for name in tasks.names() if isinstance(tasks.get(name), HiddenFacts)]
FILLER = " ".join(f"Sentence {'abcdefghij'[i % 10] * (1 + i % 7)} says nothing at all." for i in range(400))


@pytest.mark.parametrize("name", HIDDEN)
def test_every_fact_is_in_the_context_once_and_nothing_else_is_changed(name: str) -> None:
    task = tasks.hidden_facts(name)
    episode = task.sample(random.Random(3))
    example, control = task.pair(random.Random(3), FILLER, 0.5)
    rest = example.context
    for fact in episode.facts:
        assert rest.count(fact.strip()) == 1
        rest = rest.replace(fact.strip(), "", 1)
    assert rest.split() == FILLER.split()
    assert control.context == FILLER


@pytest.mark.parametrize("name", HIDDEN)
def test_the_control_asks_the_same_and_holds_no_answer(name: str) -> None:
    example, control = tasks.hidden_facts(name).pair(random.Random(5), FILLER)
    assert (control.asked.text, control.asked.answers) == (example.asked.text, example.asked.answers)
    assert all(answer in example.context for answer in example.asked.answers)
    assert not any(answer in control.context for answer in example.asked.answers)


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", ["niah_single_2", "niah_multikey_1", "plain-fact", "key-value", "header"])
def test_the_fact_asked_for_is_at_its_depth(name: str, depth: float) -> None:
    task = tasks.hidden_facts(name)
    example = task.build(random.Random(7), FILLER, depth)
    fact = task.sample(random.Random(7)).facts[0].strip()
    before = example.context.index(fact)
    others = sum(len(f) for f in task.sample(random.Random(7)).facts)
    assert before / len(example.context) == pytest.approx(depth, abs=0.01 + others / len(FILLER))


def test_a_needle_goes_between_two_sentences() -> None:
    context = insert("One. Two. Three.", ["Here."], [0.3])
    assert context == "One. Here. Two. Three."


def test_a_depth_outside_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="share of the text"):
        tasks.hidden_facts("niah_single_2").build(random.Random(0), FILLER, 1.5)


@pytest.mark.parametrize("name", HIDDEN)
def test_the_score_is_one_for_the_answers_and_nothing_for_others(name: str) -> None:
    task = tasks.hidden_facts(name)
    example = task.build(random.Random(1), FILLER)
    assert task.score(example.asked, " " + ", ".join(example.asked.answers)) == 1
    assert task.score(example.asked, "") == 0
    assert task.score(example.asked, example.asked.text.replace("?", " is what I do not know.")) == 0
    other = task.build(random.Random(2), FILLER)
    assert task.score(example.asked, " " + ", ".join(other.asked.answers)) < 1


def test_part_of_the_answers_is_part_of_the_score() -> None:
    task = tasks.hidden_facts("niah_multivalue")
    example = task.build(random.Random(1), FILLER)
    assert task.score(example.asked, " " + example.asked.answers[2]) == pytest.approx(
        1 / len(example.asked.answers)
    )


@pytest.mark.parametrize("name", HIDDEN)
def test_a_seed_decides_the_example(name: str) -> None:
    task = tasks.hidden_facts(name)
    assert task.build(random.Random(4), FILLER, 0.3) == task.build(random.Random(4), FILLER, 0.3)
    assert task.build(random.Random(4), FILLER, 0.3) != task.build(random.Random(5), FILLER, 0.3)


def test_variable_tracking_assigns_in_order() -> None:
    example = tasks.hidden_facts("vt").build(random.Random(9), FILLER)
    at = [example.context.index(f"VAR {name} =") for name in example.asked.answers]
    assert at == sorted(at)


def test_training_and_evaluation_share_no_word_and_no_number() -> None:
    for lists in (words.ADJECTIVES, words.NOUNS):
        assert len(lists["eval"]) > 40
        assert not set(lists["train"]) & set(lists["eval"])
    rng = random.Random(0)
    train, held_out = ({words.number(rng, split, 4) for _ in range(3000)} for split in ("train", "eval"))
    assert not train & held_out


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no task 'nedle'"):
        tasks.get("nedle")


def test_multikey_hides_needles_of_other_keys() -> None:
    episode = tasks.hidden_facts("niah_multikey_1").sample(random.Random(0))
    assert len(episode.facts) == len(episode.questions) == 4
    assert len({question.answers for question in episode.questions}) == 4


@pytest.mark.parametrize("name", HIDDEN)
def test_a_context_fits_holds_the_answers_and_its_control_does_not(name: str) -> None:
    task = tasks.get(name)
    strand = Strand(Haystack("filler", FILLER), tiny_tokenizer(), 4000, 0.2)
    drawn = task.context(random.Random(6), strand)
    assert 0.95 * strand.tokens <= strand.count(drawn.text) <= 1.01 * strand.tokens
    assert len(drawn.questions) == len(drawn.depths) == task.per_context
    for question, depth in zip(drawn.questions, drawn.depths, strict=True):
        assert all(answer in drawn.text and answer not in drawn.control for answer in question.answers)
        assert depth is None or 0 <= depth <= 1
        assert task.score(question, task.guess(random.Random(1), question)) < 1


def test_a_text_too_short_for_the_facts_is_refused() -> None:
    strand = Strand(Haystack("filler", FILLER), tiny_tokenizer(), 100, 0.0)
    with pytest.raises(ConfigError, match="100 tokens do not hold the facts of the task 'header'"):
        tasks.get("header").context(random.Random(0), strand)
