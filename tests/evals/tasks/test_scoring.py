"""Scores are what their sources define: RULER's string match, and SQuAD's exact match and F1."""

import json
import random

import pytest

from offload_decode.evals import tasks
from offload_decode.evals.tasks.base import Question, exact_match, normal, string_match, token_f1
from offload_decode.models.checkpoint import source_of
from tests.evals.tasks.drawn import drawn

BY_STRING = [name for name in tasks.names() if not tasks.get(name).exact and name != "every-record"]
EXACT = [name for name in tasks.names() if tasks.get(name).exact and not name.startswith("qa")]


@pytest.mark.parametrize(
    ("said", "every", "one"),
    [
        ("1111111, 2222222", 1, 1),
        ("2222222 and 1111111.", 1, 1),
        ("either 1111111 or 3333333", 1 / 2, 1),
        ("x1111111y", 1 / 2, 1),
        ("not 2222222", 1 / 2, 1),
        ("1,111,111", 0, 0),
        ("111111", 0, 0),
        ("", 0, 0),
    ],
)
def test_string_match_is_the_share_of_answers_that_occur_anywhere(
    said: str, every: float, one: float
) -> None:
    answers = ("1111111", "2222222")
    assert string_match(answers, said) == every
    assert string_match(answers, said, any_of=True) == one


def test_string_match_knows_no_case() -> None:
    assert string_match(("Ab",), "cAB") == string_match(("QWXYZ",), "qwxyz") == 1


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The Statue  of\nLiberty.", "statue of liberty"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),
        ("Ada <ada@mail.org>", "ada adamailorg"),
        ("07-Mar-2011", "07mar2011"),
        ("Caf\u00e9\u2019s", "caf\u00e9s"),
        (" ** ", "**"),
        ("the", "the"),
        ("", ""),
    ],
)
def test_squads_normal_form(text: str, form: str) -> None:
    assert normal(text) == form


@pytest.mark.parametrize(
    ("said", "exact", "f1"),
    [
        ("the Statue of Liberty", 1, 1),
        ("Statue of Liberty.", 1, 1),
        (" **statue of liberty**\n", 1, 1),
        ("Liberty Statue", 1, 1),
        ("Statue", 0, 2 / 3),  # of the second answer: 2 * 1 / (2 + 1)
        ("Liberty of Statue", 0, 1),
        ("It is the Statue of Liberty", 0, 6 / 8),
        ("statue statue statue", 0, 2 / 5),
        ("Eiffel Tower", 0, 0),
        ("", 0, 0),
    ],
)
def test_squads_exact_match_and_f1(said: str, exact: float, f1: float) -> None:
    answers = ("Statue of Liberty", "Liberty Statue")
    assert exact_match(answers, said) == exact
    assert token_f1(answers, said) == pytest.approx(f1)


def test_answers_of_punctuation_alone_are_compared_as_they_are() -> None:
    assert exact_match(("**",), "**") == token_f1(("**",), "**") == 1
    assert exact_match(("**",), "//") == token_f1(("**",), "//") == exact_match(("**",), "") == 0


@pytest.mark.parametrize("name", [name for name in BY_STRING if name != "cwe"])
def test_tasks_whose_answers_are_strings_of_a_kind_are_scored_by_string_match(name: str) -> None:
    task = tasks.get(name)
    for question in drawn(name).questions:
        for said in (question.response, f"So: {question.response}!", question.response.upper(), "no"):
            assert task.score(question, said) == string_match(question.answers, said)
        assert task.score(question, f"{question.answer_prefix} {question.response}.") == 1


@pytest.mark.parametrize("name", BY_STRING)
def test_repeating_the_question_scores_nothing_and_part_of_the_answers_a_part(name: str) -> None:
    task = tasks.get(name)
    for question in drawn(name).questions:
        assert task.score(question, question.text + question.answer_prefix) == task.score(question, "") == 0
        assert task.score(question, question.answers[-1]) == pytest.approx(1 / len(question.answers))


@pytest.mark.parametrize("name", EXACT)
def test_tasks_that_ask_for_the_answer_alone_are_scored_by_exact_match(name: str) -> None:
    task = tasks.get(name)
    for question in drawn(name).questions:
        assert task.score(question, f" {question.response}.\n") == 1
        assert task.score(question, f"Perhaps {question.response}") == 0
        assert task.ruler_score(question, f"Perhaps {question.response}") == 1
        assert task.score(question, "") == 0


def test_squads_measures_stand_beside_short_answers_alone() -> None:
    one = Question("Who?", "", ("Ada King",))
    assert tasks.get("niah_single_2").squad_scores(one, "Ada") == (0, pytest.approx(2 / 3))
    either = Question("Who?", "", ("Ada", "Ada King"), any_of=True)
    assert tasks.get("qa_1").squad_scores(either, "ada") == (1, 1)
    assert either.response == "Ada"
    assert tasks.get("niah_multivalue").squad_scores(Question("Who?", "", ("Ada", "Bob")), "Ada, Bob") is None
    assert tasks.get("every-record").squad_scores(Question("Who?", "", ("[]",)), "[]") is None


@pytest.mark.parametrize("said", ["“The Ada’s” – King", "'Ada's' King", "ADAS  king."])
def test_quotation_marks_dashes_and_articles_do_not_count(said: str) -> None:
    assert exact_match(["Ada's King"], said) == 1
    assert string_match(["'Ada’s'"], "It was ‘Ada's’") == 1


@pytest.mark.parametrize(
    ("said", "scored"),
    [
        ("1. oak\n2. elm\n3. as", "1. oak\n2. elm"),
        ("oak\n\n", "oak"),
        ("oak\n\nQues", "oak"),
        ("the number is 1234", "the number is"),
        ("1234", "1234"),
        ("", ""),
    ],
)
def test_an_answer_that_was_cut_loses_the_line_or_word_it_was_cut_in(said: str, scored: str) -> None:
    assert tasks.get("cwe").complete(said) == scored


@pytest.mark.parametrize("fence", ["", "```json\n"])
def test_a_list_that_was_cut_counts_as_far_as_its_records_are_whole(fence: str) -> None:
    task, records = tasks.get("every-record"), [{"item": "oak"}, {"item": "elm"}, {"item": "ash"}]
    question = Question("List them.", "", (json.dumps(records),))
    cut = fence + json.dumps(records)[:-10]
    assert task.score(question, cut) == 0
    assert task.score(question, task.complete(cut)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("name", [name for name in BY_STRING if name != "cwe"])
def test_an_answer_that_says_its_prefix_again_is_not_cut_off(name: str) -> None:
    """In tokens of the demo model, which takes one for every digit."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source_of("demo"))
    for question in drawn(name).questions:
        said = f"{question.answer_prefix}: {question.response}."
        assert len(tokenizer(said)["input_ids"]) <= tasks.get(name).max_new_tokens


@pytest.mark.parametrize("name", BY_STRING)
def test_the_guess_is_at_chance(name: str) -> None:
    task = tasks.get(name)
    (question, *_), rng = drawn(name).questions, random.Random(0)
    scores = [task.score(question, task.guess(rng, question)) for _ in range(60)]
    assert sum(scores) / len(scores) <= (0.01 if name == "cwe" else 0)
