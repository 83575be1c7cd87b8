"""Numbers for people, and progress that keeps off stdout and falls silent when told to."""

import io
import json
import sys

import pytest

from offload_decode.cli import output
from offload_decode.cli.output import Progress


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (999_700, "1,000 kB"),
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (5.5e9, "5.5 GB"),
        (2e15, "2,000 TB"),
    ],
)
def test_sizes(amount, shown):
    assert output.size(amount) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")]
)
def test_durations(seconds, shown):
    assert output.duration(seconds) == shown


def test_tables_align_their_columns():
    assert output.table([["kind", "size"], ["a", "1,000"]]).splitlines() == ["kind   size", "a     1,000"]


EVIL = "a\x1b[31m\x9b2J\u202eb\rc\x00\x7f"
SPELLED = r"a\x1b[31m\x9b2J\u202eb\x0dc\x00\x7f"


def test_control_characters_are_escaped(capsys):
    assert output.shown(f"{EVIL}\n\tnaïve 漢字 🙂") == f"{SPELLED}\n\tnaïve 漢字 🙂"
    assert output.one_line("a\nb\tc") == r"a\x0ab\x09c"
    output.answer(output.table([[EVIL, "1"], ["b\n2", "2"]]))
    output.answer(output.facts([("name", f"{EVIL}\n")]))
    output.note(EVIL)
    told = capsys.readouterr()
    padding = " " * (len(SPELLED) - 6)
    assert told.out.splitlines() == [f"{SPELLED}  1", rf"b\x0a2{padding}  2", rf"name  {SPELLED}\x0a"]
    assert told.err == f"{SPELLED}\n"


def test_generated_text_is_escaped_on_a_terminal_only(monkeypatch):
    for stream, expected in ((io.StringIO(), EVIL), (_Terminal(), SPELLED)):
        monkeypatch.setattr(sys, "stdout", stream)
        output.generated(EVIL)
        assert stream.getvalue() == expected


def test_json_escapes_control_characters(capsys):
    value = {"name": EVIL, "half": "\ud800", "nan": float("nan"), "of": (1.5, [float("inf")]), "é": "é"}
    output.answer_json(value)
    out = capsys.readouterr().out
    assert not output._COMMANDS.search(out)
    assert "é" in out
    assert json.loads(out) == value | {"nan": None, "of": [1.5, [None]]}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _count(steps: Progress) -> None:
    for done in (0, 50, 100):
        steps("prefill", done, 100)
    steps("publish", 0, 1)


def test_without_a_terminal_progress_is_a_line_every_few_seconds(monkeypatch, capsys):
    clock = iter([0.0, 5.0, 20.0, 21.0]).__next__
    monkeypatch.setattr(output.time, "monotonic", clock)
    with Progress() as steps:
        _count(steps)
    assert capsys.readouterr() == ("", "prefill: 100 of 100 tokens, 5 tokens/s, 0.0 s left\n")


@pytest.mark.parametrize("first", [0, 3000])
def test_what_is_left_of_a_dense_prefill_grows_with_its_square(first):
    """Each chunk takes as long as all before it are many; the mean so far would promise half of it."""
    spent = lambda done: 0.004 * (done - first) + 1e-6 * (done**2 - first**2)  # noqa: E731
    pace = output._Pace(first, grows=True, began=7.0)
    for done in range(first + 512, 6000, 512):
        left = pace.left(done, 16000, 7.0 + spent(done))
    assert left == pytest.approx(spent(16000) - spent(done), rel=0.01)


def test_what_is_left_of_other_stages_follows_their_mean_after_the_first_step():
    """Which compiles loops: an index of 48 heads would have promised 17 minutes, and took half a one."""
    pace = output._Pace(0, grows=False, began=0.0)
    assert pace.left(0, 100, 0.0) is None
    assert pace.left(10, 100, 30.0) is None
    assert pace.left(20, 100, 33.0) == pytest.approx(24.0)
    assert pace.left(30, 100, 36.0) == pytest.approx(21.0)
    uneven = output._Pace(0, grows=True, began=0.0)  # it grew faster at first: no time is below zero
    steps = (5, 1.0), (10, 9.0), (20, 10.0), (30, 11.0)
    assert [uneven.left(done, 100, now) for done, now in steps][-1] > 0
    assert output._Pace(0, grows=False, began=0.0).left(1, 1, 2.0) == 0.0


def test_on_a_terminal_progress_is_a_transient_bar(monkeypatch, capsys):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress() as steps:
        _count(steps)
        steps("prefill", 100, 100)
    assert "100 of 100 tokens" in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_quiet_is_silent(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(quiet=True) as steps:
        _count(steps)
    assert terminal.getvalue() == ""


def test_progress_escapes_names(capsys, monkeypatch):
    monkeypatch.setattr(output, "PLAIN_EVERY_S", 0.0)
    with Progress() as steps:
        steps("prefill", 1, 2, f"1 of 2, {EVIL}")
    assert f"1 of 2, {SPELLED}:" in capsys.readouterr().err
