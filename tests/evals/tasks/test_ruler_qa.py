"""Questions about documents: the gold ones are in the text, not in the control; files are never trusted."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.evals import tasks
from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import ruler_qa
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.ruler_qa import MultiHop, SingleHop, ours, read, task_of
from tests.evals.tasks.drawn import material

RAIN = "It rains. " * 20
IMPOSSIBLE = {"id": "x", "question": "Why?", "answers": [], "is_impossible": True}


def paragraph(town: str) -> dict[str, Any]:
    answers = [{"text": f"{the}Queen {town}", "answer_start": 0} for the in ("", "the ")]
    asked = {"id": town, "question": f"Who founded Town {town}?", "answers": answers, "is_impossible": False}
    return {"context": f"Town {town} was founded by Queen {town}. {RAIN}", "qas": [asked, IMPOSSIBLE]}


SQUAD = {
    "version": "v2.0",
    "data": [
        {"title": f"Article {a}", "paragraphs": [paragraph(f"{a}{number}") for number in range(6)]}
        for a in "ABCDE"
    ],
}
HOTPOT = [
    {
        "_id": str(number),
        "question": f"Where was the author of Book {number} born?",
        "answer": f"City {number}",
        "supporting_facts": [[f"Book {number}", 0], [f"Author {number}", 1]],
        "context": [
            [f"Book {number}", [f"Book {number} is by Author {number}.", " It is long."]],
            [f"Author {number}", [f"Author {number} writes.", f" Born in City {number}."]],
            *([f"Other {number}{other}", ["Nothing of interest. " * 8]] for other in range(8)),
        ],
    }
    for number in range(30)
]


def squad_of(asked: Any) -> Any:
    return {"data": [{"paragraphs": [{"context": "a", "qas": [asked]}]}]}


def saved(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "questions.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def documents(text: str) -> list[str]:
    return [part.strip() for part in re.split(r"Document \d+:\n", text)[1:]]


@pytest.mark.parametrize(("value", "hops", "count"), [(SQUAD, 1, 30), (HOTPOT, 2, 30)])
def test_a_file_gives_its_questions_with_their_documents(
    value: Any, hops: int, count: int, tmp_path: Path
) -> None:
    questions = read(saved(tmp_path, value))
    parameters = task_of(questions).parameters()
    assert json.loads(json.dumps(parameters)) == parameters
    assert (parameters["file"], parameters["file_sha256"]) == ("questions.json", questions.sha256)
    assert (questions.hops, len(questions.asked), questions.name) == (hops, count, "questions.json")
    assert len(set(questions.documents)) == len(questions.documents)
    for one in questions.asked:
        assert len(one.needed) == hops
        assert any(one.answers[0] in questions.documents[at] for at in one.needed)


@pytest.mark.parametrize(("value", "kind"), [(SQUAD, SingleHop), (HOTPOT, MultiHop)])
def test_the_documents_that_answer_are_in_the_text_and_not_in_the_control(
    value: Any, kind: type, tmp_path: Path
) -> None:
    task = task_of(read(saved(tmp_path, value)))
    assert type(task) is kind
    context = task.context(random.Random(1), material(3500))
    files = {one.question: one for one in task.questions.asked}
    assert len(context.questions) == len(context.depths) == task.per_context == 4
    for question, depth in zip(context.questions, context.depths, strict=True):
        one = files[question.text.rsplit("Question: ")[-1]]
        for at in one.needed:
            assert task.questions.documents[at].strip() in documents(context.text)
            assert task.questions.documents[at].strip() not in documents(context.control)
        if kind is SingleHop:
            assert depth is not None
            assert question.response in context.text[int(depth * len(context.text)) :][:300]
        assert task.score(question, question.response) == 1
    for text in (context.text, context.control):
        assert 0.92 * 3500 <= material(0).count(text) <= 3500
        assert len(set(documents(text))) == len(documents(text))


@pytest.mark.parametrize(
    ("asked", "either"),
    [
        ("Which was created first, PEP 251 or PEP 8?", {"PEP 251", "PEP 8"}),
        (
            "Which was started first Arthur's Magazine or First for Women?",
            {"Arthur's Magazine", "First for Women"},
        ),
        ("Who is older, Annie Morton or Terry Richardson?", {"Annie Morton", "Terry Richardson"}),
        ("Is the Duke of York or King George taller, the duke or the king?", {"the duke", "the king"}),
        ("Are whales fish or mammals?", {"fish", "mammals"}),
    ],
)
def test_one_of_two_is_guessed_whole(asked: str, either: set[str], tmp_path: Path) -> None:
    """Chance is one in two there, whatever the names are called."""
    task = task_of(read(saved(tmp_path, HOTPOT)))
    question = Question(f"Tell.\n\nQuestion: {asked}", "", ("x",), any_of=True)
    assert {task.guess(random.Random(seed), question) for seed in range(20)} == either


class Dearer(Material):
    """Documents take more tokens together than each by itself, as with some tokenizers."""

    def count(self, text: str) -> int:
        return super().count(text) + 9 * max(0, text.count("Document ") - 1)


@pytest.mark.parametrize("value", [SQUAD, HOTPOT])
def test_documents_that_take_more_together_are_fewer(value: Any, tmp_path: Path) -> None:
    task = task_of(read(saved(tmp_path, value)))
    dearer = Dearer(**vars(material(3500)))
    context = task.context(random.Random(1), dearer)
    for text in (context.text, context.control):
        assert 0.9 * 3500 <= dearer.count(text) <= 3500
    for question in context.questions:
        one = next(one for one in task.questions.asked if question.text.endswith(one.question))
        assert all(task.questions.documents[at].strip() in documents(context.text) for at in one.needed)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
@pytest.mark.parametrize("tokens", [20_000, 100_000])
def test_our_own_questions_fill_a_text(name: str, tokens: int) -> None:
    context = tasks.get(name).context(random.Random(2), material(tokens))
    for text in (context.text, context.control):
        assert 0.99 * tokens <= material(0).count(text) <= tokens
    again = tasks.get(name).context(random.Random(2), material(tokens))
    other = tasks.get(name).context(random.Random(3), material(tokens))
    assert again == context
    assert other.questions != context.questions


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_whether_questions_fit_is_no_matter_of_luck(name: str) -> None:
    """Else a run would pass its check and end at a later text."""
    fits = []
    for tokens in (700, 1500, 3000, 8000):
        found = set()
        for seed in range(4):
            try:
                found.add(bool(tasks.get(name).context(random.Random(seed), material(tokens))))
            except ConfigError:
                found.add(False)
        (one,) = found
        fits.append(one)
    assert fits == sorted(fits)
    assert fits[-1]


@pytest.mark.parametrize("hops", [1, 2])
def test_every_made_up_question_is_answered_by_its_articles_alone(hops: int) -> None:
    questions = ours(hops)
    assert len(questions.asked) >= 5000
    assert len({one.question for one in questions.asked}) == len(questions.asked)
    titles = [document.split("\n")[0] for document in questions.documents]
    assert len(set(titles)) == len(titles)
    for one in questions.asked:
        assert len(set(one.needed)) == hops, one.question
        assert titles[one.needed[0]] in one.question
        assert one.answers[0] in questions.documents[one.needed[-1]], one.question
        assert one.answers[0] not in one.question
        if hops == 2:  # the first article alone names only the second
            first = questions.documents[one.needed[0]]
            assert titles[one.needed[1]] in first, one.question
            assert one.answers[0] not in first, one.question


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("{", "is no JSON"),
        ("NaN", "is no JSON"),
        ("[" * 5000, "nested too deeply"),
        ("3", "the file: "),
        ({"data": 3}, "data: "),
        ({"data": [{}]}, r"data\.0\.paragraphs: "),
        ({"data": [{"paragraphs": [{"context": ""}]}]}, r"paragraphs\.0\.context: "),
        (squad_of(3), r"paragraphs\.0\.qas\.0: "),
        (squad_of({"question": "q", "answers": [{"text": 1}]}), r"answers\.0\.text: "),
        ({"data": []}, "holds no question"),
        ([], "holds no question"),
        ([{"question": "q"}], r"0\.answer: "),
        ([{"question": "q", "answer": "a", "context": [["t"]]}], r"0\.context\.0\.1: "),
        ([{**HOTPOT[0], "supporting_facts": []}], r"0\.supporting_facts: "),
        ([{**HOTPOT[0], "supporting_facts": [["Nowhere", 0]]}], "of no document of its question"),
        ([{**HOTPOT[0], "context": [["t", [1]]]}], r"0\.context\.0\.1\.0: "),
    ],
)
def test_what_is_no_such_file_is_refused_in_a_sentence(value: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=sentence):
        read(saved(tmp_path, value))


def test_files_that_are_missing_no_files_or_too_large_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CorpusError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(CorpusError, match="not a regular file"):
        read(tmp_path)
    monkeypatch.setattr(ruler_qa, "MOST_BYTES", 1000)
    with pytest.raises(CorpusError, match="is larger than"):
        read(saved(tmp_path, SQUAD))


def test_too_few_tokens_or_documents_are_refused(tmp_path: Path) -> None:
    assert task_of(read(saved(tmp_path, HOTPOT[:1]))).per_context == 1
    task = task_of(read(saved(tmp_path, SQUAD)))
    with pytest.raises(ConfigError, match="300 tokens do not hold"):
        task.context(random.Random(0), material(300))
    with pytest.raises(ConfigError, match=r"all documents of questions\.json come to .* name a larger file"):
        task.context(random.Random(0), material(100_000))


def test_a_guess_is_of_the_kind_that_is_asked_for() -> None:
    rng, task = random.Random(0), tasks.get("qa_1")
    older = Question("… Question: Which is older, Rome or Paris?", "", ("Rome",), any_of=True)
    assert task.guess(rng, older) in ("Rome", "Paris")
    assert task.guess(rng, Question("… Question: Is Rome old?", "", ("yes",), any_of=True)) == "yes"
    questions = ours(1).asked[::97]
    asked = [Question(f"Question: {one.question}", "", one.answers, any_of=True) for one in questions]
    scores = [task.score(question, task.guess(rng, question)) for question in asked * 5]
    assert sum(scores) / len(scores) < 0.1


def test_string_match_takes_any_answer_anywhere_and_exact_match_the_whole() -> None:
    task, question = tasks.get("qa_1"), Question("Question: Who?", "", ("Ada", "Ada King"), any_of=True)
    scores = {"Ada": (1, 1), "ada king.": (1, 1), "It is Ada or Bob.": (1, 0), "Bob": (0, 0)}
    for said, both in scores.items():
        assert (task.ruler_score(question, said), task.score(question, said)) == both
