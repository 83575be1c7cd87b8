"""A batch asks each question of each store once, however often it is interrupted and run again."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from offload_decode import Engine
from offload_decode.cli.questions import append_answers, read_answered
from offload_decode.common.errors import ConfigError, StoreDamaged
from offload_decode.planning import opening
from offload_decode.prefill_jobs.documents import files as document_files
from tests.cli.conftest import batch, lines_of, refused, run, write_lines

QUESTIONS: list[dict[str, Any]] = [
    {"question": "first?", "id": 1, "answers": ["a", "b"]},
    {"question": "second, which is longer?", "id": "two"},
    {"question": "third?"},
]


def refused_batch(store: Path, questions: Path, out: Path) -> str:
    return refused(2, "batch", store, "--questions", questions, "--out", out)


def test_answers_cite_where_that_is_asked(store, questions, out, tmp_path):
    assert batch(questions, out, store, "--cite").code == 0
    engine = Engine.open(store)
    for line, asked in zip(lines_of(out), QUESTIONS, strict=True):
        cited = engine.answer(asked["question"], 4, cites=True).citations
        assert [one["name"] for one in line["citations"]] == [one.name for one in cited or ()]
    assert batch(questions, out, store, "--cite").err.startswith(f"{out}: 0 answers, 3 there")
    uncited = tmp_path / "uncited.jsonl"
    assert batch(questions, uncited, store).code == 0
    assert "citations" not in lines_of(uncited)[0]
    again = batch(questions, uncited, store, "--cite")
    assert (again.code, "choose another --out" in again.err) == (2, True)


def test_every_store_answers_every_question(store, copy, questions, tmp_path):
    stores = [store, copy("b.kv")]
    ran = batch(questions, tmp_path / "out.jsonl", *stores, "--batch-size", "2")
    assert (ran.code, ran.out) == (0, "")
    engine = Engine.open(store)
    answers = lines_of(tmp_path / "out.jsonl")
    assert [line["store"] for line in answers] == [str(path) for path in stores for _ in QUESTIONS]
    for line, asked in zip(answers, QUESTIONS * 2, strict=True):
        answer = engine.answer(asked["question"], 4)
        settings = {"selector": "auto", "options": {}, "max_new_tokens": 4, "model": None, "weights": "auto"}
        told = {"answer": answer.text, "tokens": 4, "finish": "length", "store": line["store"]}
        told |= {"grounded": None}
        assert line == {"id": None, **asked, **told, **settings}


def test_a_model_is_loaded_once_for_the_stores_that_share_it(store, copy, questions, tmp_path, monkeypatch):
    loaded: list[str] = []
    load = opening.load
    monkeypatch.setattr(opening, "load", lambda *args: loaded.append(args[0]) or load(*args))
    assert batch(questions, tmp_path / "out.jsonl", store, copy("b.kv"), copy("c.kv")).code == 0
    assert len(loaded) == 1


def test_a_question_may_name_its_store_by_path_or_by_name(store, copy, tmp_path):
    other = copy("b.kv")
    lines = [{"question": "one", "store": "b.kv"}, {"question": "two", "store": str(store)}]
    assert batch(write_lines(tmp_path / "q", *lines), tmp_path / "out", store, other).code == 0
    answered = [(line["store"], line["question"]) for line in lines_of(tmp_path / "out")]
    assert answered == [(str(store), "two"), (str(other), "one")]


@pytest.mark.parametrize("cut", [0, 1, 5, 40])
def test_only_a_torn_last_line_is_answered_again(store, questions, out, cut):
    batch(questions, out, store)
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) - cut])
    ran = batch(questions, out, store)
    assert (ran.code, out.read_bytes()) == (0, whole)
    assert ("1 answer, 2 there already" if cut else "0 answers, 3 there already") in ran.err


def test_a_store_that_fails_does_not_stop_the_others(store, questions, out, tmp_path, monkeypatch):
    ran = batch(questions, out, tmp_path / "missing.kv", store)
    assert ran.code == 1
    assert [line["store"] for line in lines_of(out)] == [str(store)] * 3
    assert "There is no store at" in ran.err
    assert f"(unanswered: 3 questions to {tmp_path / 'missing.kv'})" in ran.err

    def fail(*args: object, **kwargs: object) -> None:
        raise StoreDamaged("a page is gone: restore it")

    monkeypatch.setattr(Engine, "answer_many", fail)
    ran = batch(questions, tmp_path / "more.jsonl", store)
    assert ran.code == 1
    assert "error: a page is gone: restore it (unanswered: 3 questions" in ran.err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"question": ', "line 2 of .* is not JSON"),
        ('"question"', 'line 2 of .* has no text in "question"'),
        ('{"id": 3}', 'line 2 of .* has no text in "question"'),
        ('{"question": 3}', 'line 2 of .* has no text in "question"'),
        ('{"question": "  "}', "line 2 of .* its question is empty"),
        ('{"question": "q", "store": 3}', "line 2 of .* neither a name nor a path"),
        ('{"question": "q", "store": "other.kv"}', "line 2 .* asks the store other.kv, but it is not among"),
        ('{"question": "q", "answer": "gold"}', 'line 2 of .* has a field "answer".*rename it'),
        ('{"question": "first?", "id": 1}', "line 2 .* repeats line 1"),
        ('{"question": "q", "model": "gold"}', 'line 2 of .* has a field "model".*rename it'),
        ('{"question": "q", "id": ' + "[" * 100_000, "line 2 of .* cannot be read"),
        ('{"question": "q", "id": ' + "1" * 5_000 + "}", "line 2 of .* cannot be read"),
        *(
            (f'{{"question": "q", "more": {"[" * depth + "]" * depth}}}', "line 2 of .* nested too deeply")
            for depth in (101, 900)
        ),
        *(
            (f'{{"question": "q", "weight": {number}}}', "line 2 of .*")
            for number in ("NaN", "Infinity", "-Infinity", "1e999", "[NaN]")
        ),
    ],
)
def test_a_bad_line_is_named_before_any_work(store, tmp_path, line, told):
    questions = write_lines(tmp_path / "q.jsonl", *QUESTIONS[:1])
    questions.write_text(questions.read_text() + line + "\n")
    sentence = refused_batch(store, questions, tmp_path / "out")
    assert re.search(told, sentence)
    assert not (tmp_path / "out").exists()


def test_questions_and_answers_of_other_formats_are_refused(store, home, questions, out, tmp_path):
    assert "cannot be read" in refused_batch(store, tmp_path / "missing", out)
    (tmp_path / "blank").write_text("\n\n")
    assert "holds no questions" in refused_batch(store, tmp_path / "blank", out)
    (tmp_path / "latin").write_bytes(b'{"question": "caf\xe9"}\n')
    assert "not UTF-8" in refused_batch(store, tmp_path / "latin", out)
    before = questions.read_bytes()
    assert "holds the questions" in refused_batch(store, questions, questions)
    for foreign in (b"some notes\n", b"some notes without an end", b'{"id": 1}\n'):
        out.write_bytes(foreign)
        assert "choose another --out" in refused_batch(store, questions, out)
        assert out.read_bytes() == foreign
    assert questions.read_bytes() == before


def test_answers_without_end_are_not_read_whole(out):
    out.write_bytes(b'{"id": 1')
    os.truncate(out, 1 << 34)
    with pytest.raises(ConfigError, match="is not an answer"):
        read_answered(out, {})
    assert out.stat().st_size == 1 << 34


@pytest.mark.parametrize("odd", ["pipe", "/dev/zero", "folder"])
def test_questions_come_from_a_plain_file_alone(store, tmp_path, odd):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    assert "cannot be read" in refused_batch(store, tmp_path / odd, tmp_path / "out.jsonl")


def test_a_question_without_an_end_is_refused(store, monkeypatch):
    monkeypatch.setattr(document_files, "LARGEST", 1 << 20)
    assert "ask a shorter one" in refused(2, "ask", store, "-", stdin="why? " * (1 << 18))


def test_answers_of_other_settings_are_not_mixed(store, questions, out):
    assert batch(questions, out, store).code == 0
    before = out.read_bytes()
    model = str(store.with_name("model"))
    others = (("-s", "dense"), ("-o", "budget=3"), ("--max-new-tokens", "5"), ("--model", model))
    for options in others:
        ran = batch(questions, out, store, *options)
        assert ran.code == 2
        assert "choose another --out" in ran.err
    assert out.read_bytes() == before


def test_answers_with_citations_are_not_mixed_with_those_without(store, questions, out, tmp_path):
    with_them = tmp_path / "with.jsonl"
    assert batch(questions, out, store).code == batch(questions, with_them, store, "--cite").code == 0
    for path, options in ((out, ["--cite"]), (with_them, []), (with_them, ["--only-grounded", "0.5"])):
        assert "choose another --out" in batch(questions, path, store, *options).err
    assert "0 answers" in batch(questions, with_them, store, "--cite").err


def test_answers_by_an_adapter_are_not_mixed_with_the_models_own(tmp_path):
    way = {"selector": "auto", "adapter": "folder"}
    out = tmp_path / "out.jsonl"
    append_answers(out, [{"id": None, "store": "s", "question": "q", "answer": "a", **way}])
    assert len(read_answered(out, way)) == 1
    for other in ({"selector": "auto"}, way | {"adapter": "another"}):
        with pytest.raises(ConfigError, match="was answered with"):
            read_answered(out, other)


def test_half_a_surrogate_pair_is_asked_and_answered_once(store, tmp_path):
    questions, out = tmp_path / "q", tmp_path / "out"
    questions.write_text(r'{"question": "\ud800 x", "id": "\udc00", "note": "\ud800"}' + "\n")
    assert batch(questions, out, store).code == 0
    (line,) = lines_of(out)
    assert (line["question"], line["id"], line["note"]) == ("\ufffd x", "\udc00", "\ud800")
    assert "0 answers, 1 there already" in batch(questions, out, store).err


def test_options_are_checked_before_any_work(store, questions, tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "load", lambda *args: pytest.fail("the model was loaded"))
    args = ["batch", store, "--questions", questions, "--out", tmp_path / "out"]
    assert "unknown selector" in refused(2, *args, "-s", "nonsense")
    assert "has no option" in refused(2, *args, "-o", "bugdet=3")
    assert "is given twice" in refused(2, *args, store)
    assert "there is no folder" in refused_batch(store, questions, tmp_path / "no" / "such" / "out.jsonl")
    ran = run(*args, "-o", "budget=many")
    assert ran.code == 2
    assert not (tmp_path / "out").exists()
