"""A conversation: its commands, what it remembers, and how it is stopped, saved and loaded."""

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_decode import Engine
from offload_decode.cli import chat
from offload_decode.cli.chat import Transcript
from offload_decode.engine.conversation import Sampler
from tests.cli.conftest import PROGRAM, Ran, done, refused, run

TURNS = ["one", "two", "three"]


def talk(store: Path, *lines: str) -> Ran:
    return run("chat", store, "--max-new-tokens", "5", stdin="".join(f"{line}\n" for line in lines))


def answers(store: Path) -> list[str]:
    engine = Engine.open(store)
    return ["".join(engine.stream(question, 5)).strip() for question in TURNS]


CUT = "The answer was cut at 5 tokens: --max-new-tokens N allows more.\n"


def test_it_remembers_until_it_is_reset(store):
    one, two, _ = answers(store)
    ran = talk(store, "one", "", "two", "/reset", "one", "/exit", "never")
    assert (ran.code, ran.out, ran.err) == (0, f"{one}\n{two}\n{one}\n", 3 * CUT)


def test_it_goes_on_after_a_line_that_is_not_utf8(store):
    args = ["chat", store, "--max-new-tokens", "2"]
    ran = run(*args, stdin=b"caf\xe9\n/reset\nafter\n")
    assert (ran.code, ran.err) == (0, 2 * CUT.replace("5", "2"))
    assert ran.out == run(*args, stdin="caf\ufffd\n/reset\nafter\n").out


def test_every_answer_cites_what_it_attended_to(store):
    how = "chat", store, "--max-new-tokens", "5", "--cite"
    ran, alone = run(*how, stdin="one\ntwo\n/reset\none\n"), run(*how, stdin="one\n")
    cited = [text for text in ran.err.split(CUT) if text]
    told = done("ask", store, "one", "--max-new-tokens", "5", "--cite").err.removeprefix(CUT)
    assert len(cited) == 3
    assert told.startswith("100%  corpus.txt\n")
    assert cited[0] == cited[2] == alone.err.removeprefix(CUT) == told != cited[1]
    assert talk(store, "one").err == CUT


@pytest.mark.parametrize("last", ["", "/quit", "/exit"])
def test_it_ends_with_its_input_or_when_told(store, last):
    ran = talk(store, *[last] * bool(last))
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_unknown_commands_are_refused_and_not_asked(store):
    ran = talk(store, "/foo", "/foo bar", "/", "/Quit", "/reset now", "/save", "/load ", "/quit")
    assert (ran.code, ran.out) == (0, "")
    told = ran.err.splitlines()
    assert all(
        f"There is no command {name}: /help" in told[n] for n, name in enumerate(["/foo", "/foo", "/"])
    )
    assert "no command /Quit" in told[3]
    assert told[4] == "/reset takes nothing after it"
    assert told[5:] == ["/save needs a file: /save FILE", "/load needs a file: /load FILE"]


def test_help_names_every_command(store):
    ran = talk(store, "/help")
    assert (ran.code, ran.out, ran.err) == (0, "", f"{chat.HELP}\n")
    for command in ("/help", "/reset", "/save FILE", "/load FILE", "/quit"):
        assert command in chat.HELP
        assert command in run("chat", "--help").out


@pytest.mark.parametrize("selector", ["topk", "h2o"])
def test_a_saved_conversation_goes_on_where_it_stopped(store, tmp_path, selector):
    file = tmp_path / "my talk.json"
    ways = ["chat", store, "--max-new-tokens", "5", "-s", selector, "-o", "budget=9"]
    told = done(*ways, stdin=f"one\ntwo\n/save {file}\nthree\n")
    assert "Saved 2 turns" in told.err
    again = done(*ways, stdin=f"other\n/load {file}\nthree\n")
    assert "Loaded 2 turns" in again.err
    assert again.out.splitlines()[-1] == told.out.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "written beside and renamed"


def test_the_saved_file_holds_questions_and_answers_as_text(store, tmp_path):
    talk(store, "one", "two", f"/save {tmp_path / 'c'}")
    saved = json.loads((tmp_path / "c").read_text())
    assert [(turn["question"], turn["answer"]) for turn in saved["turns"]] == list(
        zip(TURNS, answers(store)[:2], strict=False)
    )


def test_an_empty_conversation_is_not_saved(store, tmp_path):
    file = tmp_path / "c"
    assert "nothing to save yet" in refused(2, "chat", store, stdin=f"/save {file}\n")
    assert not file.exists()


def test_only_a_conversation_is_overwritten(store, tmp_path):
    letter, file = tmp_path / "letter.txt", tmp_path / "c"
    letter.write_text("dear friend")
    ran = talk(store, "one", f"/save {letter}")
    assert (ran.code, letter.read_text()) == (2, "dear friend")
    assert "is not a conversation" in ran.err
    assert talk(store, "one", f"/save {file}", "two", f"/save {file}").code == 0
    assert len(json.loads(file.read_text())["turns"]) == 2
    assert "cannot write" in talk(store, "one", f"/save {tmp_path / 'no' / 'c'}").err


@pytest.fixture
def saved(store: Path, tmp_path: Path) -> Path:
    file = tmp_path / "saved.json"
    assert talk(store, "one", f"/save {file}").code == 0
    return file


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.update(store="0" * 64), "about another store"),
        (lambda c: c.update(version=2), "by another release"),
        (lambda c: c.update(version=True, format="x"), "is not a conversation"),
        (lambda c: c.update(more=1), "was changed"),
        (lambda c: c.update(turns={}), "was changed"),
        (lambda c: c.update(model=7), "was changed"),
        (lambda c: c["turns"].append("one"), "was changed"),
        (lambda c: c["turns"][0].update(tokens=[10**9]), "was changed"),
        (lambda c: c["turns"][0].update(tokens=[-1]), "was changed"),
        (lambda c: c["turns"][0].update(tokens=[True]), "was changed"),
        (lambda c: c["turns"][0].update(tokens=[1.0]), "was changed"),
        (lambda c: c["turns"][0].update(answer="what it never said"), "was changed"),
        (lambda c: c["turns"][0].update(question=" "), "was changed"),
        (lambda c: c["turns"][0].update(question="\ud800"), "was changed"),
        (lambda c: c["turns"][0].pop("question"), "was changed"),
    ],
)
def test_a_changed_file_is_refused(store, saved, change, told):
    content = json.loads(saved.read_text())
    change(content)
    saved.write_text(json.dumps(content))
    assert told in refused(2, "chat", store, stdin=f"/load {saved}\n")


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[]", b"null", b"[" * 100_000, b"1" * 10_000])
def test_a_file_that_is_no_conversation_is_refused(store, tmp_path, content):
    (tmp_path / "c").write_bytes(content)
    assert "is not a conversation" in refused(2, "chat", store, stdin=f"/load {tmp_path / 'c'}\n")


def test_loading_a_pipe_a_device_or_a_huge_file_is_refused(store, saved, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        assert "is not a file" in refused(2, "chat", store, stdin=f"/load {path}\n")
    assert "cannot read" in refused(2, "chat", store, stdin=f"/load {tmp_path / 'no'}\n")
    assert "cannot read" in refused(2, "chat", store, stdin="/load nul\0here\n")
    monkeypatch.setattr(chat, "MAX_BYTES", saved.stat().st_size - 1)
    assert "is larger than any conversation" in refused(2, "chat", store, stdin=f"/load {saved}\n")


def at_terminal(monkeypatch: pytest.MonkeyPatch, talk: Transcript, *lines: str | BaseException) -> None:
    """Hold `talk` as at a terminal where `lines` are typed; an exception is what a key raises."""
    typed: Iterator[str | BaseException] = iter(lines)

    def typing(prompt: str) -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typing)
    chat._Chat(talk, at_terminal=True).run(stored=0)


def test_ctrl_c_keeps_the_part_already_written(store, monkeypatch, capsys):
    talk = Transcript(Engine.open(store), 5, Sampler())
    generate = Engine.generate

    def stopped(self: Engine, *args: object) -> Iterator[int]:
        for number, token in enumerate(generate(self, *args)):
            if number == 2:
                raise KeyboardInterrupt
            yield token

    with monkeypatch.context() as pressed:
        pressed.setattr(Engine, "generate", stopped)
        at_terminal(monkeypatch, talk, "one")
    assert "Stopped: the written part stays in the conversation." in capsys.readouterr().err
    (turn,) = talk.turns
    assert len(turn.tokens) == 2
    at_terminal(monkeypatch, talk, "two")
    by_hand = Engine.open(store)
    by_hand.ask("one")
    by_hand.extend(turn.tokens)
    assert capsys.readouterr().out.strip() == "".join(by_hand.stream("two", 5)).strip()


def test_ctrl_c_before_the_answer_takes_the_question_back(store, monkeypatch, capsys):
    talk = Transcript(Engine.open(store), 5, Sampler())

    def stopped(self: Engine, question: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as pressed:
        pressed.setattr(Engine, "ask", stopped)
        at_terminal(monkeypatch, talk, KeyboardInterrupt(), "one")
    err = capsys.readouterr().err
    assert "/quit or Ctrl-D leaves." in err
    assert "Stopped: nothing was changed." in err
    assert talk.turns == []
    assert talk.engine.length == talk.engine.prefix.length


def test_an_error_at_a_terminal_keeps_the_conversation(store, saved, monkeypatch, capsys):
    talk = Transcript(Engine.open(store), 5, Sampler())
    at_terminal(monkeypatch, talk, "one", f"/load {saved.parent / 'no'}", "two")
    captured = capsys.readouterr()
    assert any(line.startswith("error: cannot read") for line in captured.err.splitlines())
    assert captured.out.split("\n")[:2] == answers(store)[:2]
    assert len(talk.turns) == 2


@pytest.mark.slow
def test_ctrl_c_at_a_real_terminal_stops_the_answer_and_not_the_session(store, tmp_path):
    control, terminal = pty.openpty()
    talking = subprocess.Popen(
        [*PROGRAM, "chat", str(store), "--max-new-tokens", "100000"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = ""

    def until(text: str) -> None:
        nonlocal shown
        deadline = time.monotonic() + 120
        while text not in shown:
            assert time.monotonic() < deadline, shown
            shown += os.read(control, 4096).decode("utf-8", "replace")
        shown = shown.partition(text)[2]

    until("Opening")
    until("/help lists the commands.")
    os.write(control, b"one\n")
    until("one")
    time.sleep(1)
    talking.send_signal(signal.SIGINT)
    until("Stopped")
    os.write(control, f"/save {tmp_path / 'c'}\n".encode())
    until("Saved 1 turn")
    until("> ")  # only then is Ctrl-D the end of the input
    os.write(control, b"\x04")
    assert talking.wait(30) == 0
    assert len(json.loads((tmp_path / "c").read_text())["turns"][0]["tokens"]) > 1
