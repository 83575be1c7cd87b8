"""Tasks: facts are where they were asked to be, the control has none, a seed decides, lengths are kept."""

import random
import re

import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.evals import tasks
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import HiddenFacts, insert
from offload_decode.evals.tasks.ruler import Needle, needle_at
from tests.evals.tasks.drawn import FILLER, drawn, material

EVERY = {name: tasks.get(name) for name in tasks.names() if not name.startswith("qa")}
HIDDEN = {name: task for name, task in EVERY.items() if isinstance(task, HiddenFacts)}
# Others are short values that a text may hold by chance.
TELLING = [name for name, task in EVERY.items() if task.short_answer and (not task.exact or name in HIDDEN)]


@pytest.mark.parametrize(
    "name", [name for name, task in HIDDEN.items() if type(task).placed is HiddenFacts.placed]
)
def test_every_fact_is_in_the_text_once_and_nothing_else_is_changed(name: str) -> None:
    facts = HIDDEN[name].sample(random.Random(3)).facts
    text = insert(FILLER, facts, [0.5] * len(facts))
    for fact in facts:
        assert text.count(fact) == 1
        text = text.replace(fact, "", 1)
    assert text.split() == FILLER.split()


@pytest.mark.parametrize("depth", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_fact_asked_for_is_at_its_depth(depth: float) -> None:
    context = needle_at(depth).context(random.Random(7), material(5000))
    text = context.text.removeprefix(Needle.instruction)
    needle = re.search(r"One of the special magic numbers for \S+ is: \d+\.", text)
    assert needle is not None
    assert context.depths == (depth,)
    assert needle.start() / (len(text) - len(needle[0])) == pytest.approx(depth, abs=0.01)
    assert "magic numbers for" not in context.control


def test_a_needle_goes_between_two_sentences() -> None:
    assert insert("One. Two. Three.", ["Here."], [0.3]) == "One. Here. Two. Three."


def test_numbers_are_not_those_of_training() -> None:
    assert {sum(map(int, words.number(random.Random(seed), 4))) % 5 for seed in range(300)} == {0}
    for listed in (words.ADJECTIVES, words.NOUNS):
        assert 40 < len(listed) < len(words.KNOWN) / 2


def test_an_unknown_task_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no task 'nedle'"):
        tasks.get("nedle")


@pytest.mark.parametrize("name", HIDDEN)
def test_a_context_fits_and_has_its_questions(name: str) -> None:
    context = drawn(name, 4000)
    assert 0.95 * 4000 <= material(0).count(context.text) <= 1.01 * 4000
    assert len(context.questions) == len(context.depths) == HIDDEN[name].per_context
    assert all(depth is None or 0 <= depth <= 1 for depth in context.depths)


@pytest.mark.parametrize("name", TELLING)
def test_the_text_holds_the_answers_and_neither_the_control_nor_the_question_does(name: str) -> None:
    context = drawn(name)
    for question in context.questions:
        assert all(answer in context.text for answer in question.answers)
        assert not any(answer in context.control for answer in question.answers)
        assert not any(answer in question.text + question.answer_prefix for answer in question.answers)


@pytest.mark.parametrize("name", EVERY)
def test_a_seed_decides_the_context_and_another_draws_afresh(name: str) -> None:
    first, again, other = (drawn(name, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.text != other.text
    if not EVERY[name].exact:
        answers = [{answer for asked in one.questions for answer in asked.answers} for one in (first, other)]
        assert not answers[0] & answers[1]
    if first.depths[0] not in (None, 0.0):
        assert first.depths != other.depths


@pytest.mark.parametrize("name", EVERY)
def test_a_text_too_short_for_the_facts_is_refused(name: str) -> None:
    what = "a pass key" if name == "passkey" else f"the facts of the task '{name}'"
    with pytest.raises(ConfigError, match=f"40 tokens do not hold {what}: take a longer text"):
        drawn(name, 40)
