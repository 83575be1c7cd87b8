"""`grounded` on the command line: the same however one asks, and what --only-grounded says below it."""

import pytest

from offload_decode.cli.output import NOT_IN_TEXT
from offload_decode.engine import grounded, joint
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.grounded import Weights
from offload_decode.prefill_jobs import joined
from offload_decode.prefill_jobs.on_ray import asking
from tests.cli.conftest import batch, by_one_worker, done, json_of, lines_of, refused, run, write_lines
from tests.server.http.conftest import running, service, url

__all__ = ["running", "service", "url"]

QUESTION = "What is the colour of thing 3?"
ASK = (QUESTION, "--max-new-tokens", "4")


@pytest.fixture
def measured(store, monkeypatch):
    """A store whose model is one that was measured."""
    monkeypatch.setattr(grounded, "kind_of", lambda config: "any")
    monkeypatch.setitem(grounded.WEIGHTS, "any", Weights(-0.5, 3.0, 1.0))
    return store


def test_every_command_tells_the_same_number(measured, tmp_path):
    told = json_of("ask", measured, *ASK)["grounded"]
    assert 0 < told < 1
    line = f"grounded {told:.2f}"
    assert line in run("ask", measured, *ASK).err.splitlines()
    assert line in run("chat", measured, *ASK[1:], stdin=QUESTION + "\n").err.splitlines()
    questions, out = write_lines(tmp_path / "questions.jsonl", {"question": QUESTION}), tmp_path / "out.jsonl"
    assert batch(questions, out, measured).code == 0
    assert lines_of(out)[0]["grounded"] == pytest.approx(told, abs=1e-4)


def test_below_the_threshold_the_answer_is_not_in_the_text(measured, tmp_path):
    told = json_of("ask", measured, *ASK)
    for least, said in ((told["grounded"], told["answer"]), (1.0, NOT_IN_TEXT)):
        only = ("--only-grounded", str(least))
        assert run("ask", measured, *ASK, *only).out.strip() == said
        assert run("chat", measured, *ASK[1:], *only, stdin=QUESTION + "\n").out.strip() == said
        shown = json_of("ask", measured, *ASK, *only)
        assert (shown["answer"], shown["grounded"]) == (said, told["grounded"])
    questions, out = write_lines(tmp_path / "questions.jsonl", {"question": QUESTION}), tmp_path / "out.jsonl"
    assert batch(questions, out, measured, "--only-grounded", "1").code == 0
    assert [one["answer"] for one in lines_of(out)] == [NOT_IN_TEXT]
    assert lines_of(out)[0]["only_grounded"] == 1.0


def test_joined_answers_are_grounded_too(measured, home, texts, tmp_path, monkeypatch):
    other = tmp_path / "other.kv"
    done("prefill", texts, "--model", home / "model", "--out", other)
    both = (measured, other, QUESTION, *ASK[1:], "--together", "2")
    told = json_of("ask", *both)
    assert 0 < told["grounded"] < 1
    assert f"grounded {told['grounded']:.2f}" in run("ask", *both).err.splitlines()
    assert json_of("ask", *both, "--only-grounded", "1")["answer"] == NOT_IN_TEXT
    shown, withheld = (run("ask", *both, "--cite", *only) for only in ((), ("--only-grounded", "1")))
    assert withheld.out.strip() == NOT_IN_TEXT
    carried = [line for line in shown.err.splitlines() if line not in withheld.err.splitlines()]
    assert " ".join(shown.out.split()) in " ".join(carried)  # only there, word for word
    for limit, value in (("HEARD", 1e-9), ("SURE", 1e-9), ("DOUBTED", 1.0)):
        monkeypatch.setattr(joint, limit, value)
    assert json_of("ask", *both)["joined"]["dissents"]
    assert json_of("ask", *both, "--only-grounded", "1")["joined"]["dissents"] == []
    assert json_of("ask", *both, "--cite")["joined"]["carried"]
    assert "carried" not in json_of("ask", *both, "--cite", "--only-grounded", "1")["joined"]
    assert "otherwise" not in run("ask", *both, "--only-grounded", "1").err
    chat = "chat", measured, other, *ASK[1:], "--together", "2"
    ran = run(*chat, "--only-grounded", "1", stdin=QUESTION + "\n")
    assert ran.out.strip() == NOT_IN_TEXT
    assert f"grounded {told['grounded']:.2f}" in ran.err.splitlines()
    cited = run(*chat, "--only-grounded", "1", "--cite", stdin=QUESTION + "\n")
    assert (cited.out, cited.err) == (withheld.out, withheld.err)
    questions, out = write_lines(tmp_path / "questions.jsonl", {"question": QUESTION}), tmp_path / "out.jsonl"
    assert batch(questions, out, measured, other, "--together", "2", "--only-grounded", "1").code == 0
    assert [one["answer"] for one in lines_of(out)] == [NOT_IN_TEXT]
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    there, how = tmp_path / "there.jsonl", ("--together", "2", "--only-grounded", "1", "--workers", "ray")
    assert batch(questions, there, measured, other, *how).code == 0
    assert [one["joined"]["dissents"] for one in lines_of(there)] == [[]]
    exact = json_of("ask", *both, "--join", "exact")
    assert 0 < exact["grounded"] < 1
    assert "--join read and --only-grounded" in refused(
        2, "ask", *both, "--join", "read", "--only-grounded", "1"
    )


def test_of_a_model_that_was_not_measured_there_is_no_number(store):
    assert json_of("ask", store, *ASK)["grounded"] is None
    assert "grounded" not in run("ask", store, *ASK).err


def test_a_model_that_was_not_measured_is_refused_before_it_answers(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Conversation, "run", lambda *_, **__: pytest.fail("a token was run"))
    only = "--only-grounded", "0.5"
    alone, exact = ("--together", "1"), ("--together", "1", "--join", "exact")
    commands = ("ask", store, *ASK), ("chat", store, *ASK[1:])
    monkeypatch.setattr(joined, "prefill_texts", lambda *_, **__: pytest.fail("a token was prefilled"))
    for command in (*commands, *((*own, *way) for own in commands for way in (alone, exact))):
        told = run(*command, *only, stdin=QUESTION + "\n")
        assert (told.code, "was not measured for this model" in told.err) == (2, True)
    questions, out = write_lines(tmp_path / "questions.jsonl", {"question": QUESTION}), tmp_path / "out.jsonl"
    assert "was not measured for this model" in batch(questions, out, store, *only).err
    monkeypatch.setattr(asking, "answer_on_ray", by_one_worker)
    told = batch(questions, out, store, *alone, *only, "--workers", "ray")
    assert (told.code, "was not measured for this model" in told.err) == (2, True)


def test_a_server_tells_it(url, service):
    service.grounded = 0.25
    ran = run("ask", "book", "Who?", "--server", url)
    assert (ran.out, ran.err) == ("Who?\n", "grounded 0.25\n")
    assert run("ask", "book", "Who?", "--server", url, "--only-grounded", "0.5").out == f"{NOT_IN_TEXT}\n"
    told = json_of("ask", "book", "Who?", "--server", url, "--only-grounded", "0.2")
    assert (told["answer"], told["grounded"]) == ("Who?", 0.25)


@pytest.mark.parametrize("least", ["2", "-0.1", "nan", "much"])
def test_a_threshold_is_a_share(store, least):
    assert "is no share" in refused(2, "ask", store, *ASK, f"--only-grounded={least}")
