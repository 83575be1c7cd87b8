"""`--check`: the same second pass however one asks."""

import pytest

from tests.cli.conftest import batch, json_of, lines_of, refused, run, write_lines
from tests.server.http.conftest import running, service, url

__all__ = ["running", "service", "url"]

QUESTION = "What is the colour of thing 3?"
FEW = ("--max-new-tokens", "4", "-s", "topk", "-o", "budget=4", "-o", "crossover=no")


def test_every_command_says_the_same(store, tmp_path):
    told = json_of("ask", store, QUESTION, *FEW, "--check")["checked"]
    assert 0 <= told["same"] <= told["tokens"] <= 4
    assert told["difference"] > 1e-3, "four stored tokens are not all of them"
    line = f"checked: {told['same']} of {told['tokens']} tokens stay the likeliest with dense attention"
    assert line in run("ask", store, QUESTION, *FEW, "--check").err
    assert line in run("chat", store, *FEW, "--check", stdin=QUESTION + "\n").err
    questions, out = write_lines(tmp_path / "questions.jsonl", {"question": QUESTION}), tmp_path / "out.jsonl"
    assert batch(questions, out, store, *FEW, "--check").code == 0
    [answer] = lines_of(out)
    assert answer["check"] is True
    assert answer["checked"] == {**told, "difference": pytest.approx(told["difference"], abs=1e-4)}
    unchecked = tmp_path / "unchecked.jsonl"
    assert batch(questions, unchecked, store, *FEW).code == 0
    assert "was answered with" in batch(questions, unchecked, store, *FEW, "--check").err


def test_nothing_is_said_where_it_is_not_asked_for(store):
    assert "checked" not in json_of("ask", store, QUESTION, *FEW)
    assert "checked" not in run("ask", store, QUESTION, *FEW).err


def test_a_server_is_asked_for_it(url, service):
    ran = run("ask", "book", "Who?", "--server", url, "--check")
    assert "checked: 2 of 3 tokens stay the likeliest" in ran.err
    assert service.tickets[-1].asked.check is True
    told = json_of("ask", "book", "Who?", "--server", url, "--check")
    assert told["checked"] == {"tokens": 3, "same": 2, "difference": 0.25}
    assert "checked" not in json_of("ask", "book", "Who?", "--server", url)


def test_that_a_server_does_not_know_of_it_is_told(url, service):
    service.checked = None
    for ran in (
        run("ask", "book", "Who?", "--server", url, "--check"),
        run("chat", "book", "--server", url, "--check", stdin="Who?\n"),
    ):
        assert "The answer was not checked: the server runs a release that does not know --check." in ran.err
    assert len(json_of("ask", "book", "Who?", "--server", url, "--check")["warnings"]) == 1
    assert "not checked" not in run("ask", "book", "Who?", "--server", url).err


@pytest.mark.parametrize("other", [("--together", "1"), ("--workers", "ray")])
def test_what_cannot_be_checked_is_refused(store, other):
    assert "--check do not go together" in refused(2, "ask", store, QUESTION, "--check", *other)
