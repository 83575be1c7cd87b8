"""A tiny model on disk and a store that it prefilled, made by the commands themselves."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from offload_decode.cli import compiling
from offload_decode.cli.main import app
from offload_decode.engine import engine
from offload_decode.engine.crossover import decide
from offload_decode.evals import answering
from offload_decode.evals.side_by_side import WayAnswer
from offload_decode.prefill_jobs.on_ray import asking
from tests.processes import apart
from tests.tiny import saved_model

# Each invocation would read the signatures of all commands anew, which takes longer than most of them do.
typer.testing._get_command = cache(typer.main.get_command)

# Which command of this process first compiles a loop is chance: test_startup uses processes of its own.
compiling.announce_compiling = lambda: None

PROGRAM = (sys.executable, "-c", "from offload_decode.cli.main import console; console()")
"""The command line in a process of its own; arguments follow."""
MAIN = PROGRAM[-1]
"""The program of `PROGRAM`, for `tests.processes.apart`."""

TEXT = "".join(f"Fact {n}: the colour of thing {n} is number {n * n}.\n" for n in range(12))


@dataclass(frozen=True)
class Ran:
    """What a command printed and how it ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def crossover(monkeypatch):
    """Lets a command attend to everything where that is faster, which it is in all stores here."""
    monkeypatch.setattr(engine, "decide", decide)


@pytest.fixture(autouse=True)
def _searches(monkeypatch):
    """Commands search the stores of tests, few as their tokens are."""
    monkeypatch.setattr(engine, "decide", lambda *_: None)


def run(*args: str | Path, stdin: str | bytes | None = None) -> Ran:
    """Run a command in this process; an exception that leaves it fails the test."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert "Traceback" not in result.stderr
    return Ran(result.exit_code, result.stdout, result.stderr)


def imported(*args: str | Path) -> tuple[str, set[str]]:
    """What a command prints in a process of its own, and the modules that it imports."""
    ran = apart(
        f"import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{MAIN}", *args
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, set(ran.stderr.splitlines()[-1].split())


def done(*args: str | Path, stdin: str | bytes | None = None) -> Ran:
    """Run a command that must succeed."""
    ran = run(*args, stdin=stdin)
    assert ran.code == 0, ran.err
    return ran


def json_of(*args: str | Path) -> Any:
    """What a command that must succeed prints with --json."""
    return json.loads(done(*args, "--json").out)


def refused(code: int, *args: str | Path, stdin: str | bytes | None = None) -> str:
    """Run a command that must fail with one sentence, which is returned."""
    ran = run(*args, stdin=stdin)
    assert (ran.code, ran.out) == (code, ""), ran
    assert ran.err.startswith("error: "), ran.err
    assert ran.err.count("\n") == 1, ran.err
    return ran.err.strip()


def batch(questions: Path, out: Path, *given: str | Path) -> Ran:
    """Run `batch` with the stores and options that are given."""
    return run("batch", "--questions", questions, "--out", out, "--max-new-tokens", "4", *given)


def write_lines(path: Path, *objects: dict[str, Any]) -> Path:
    """A JSONL file."""
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def flip(file: Path, at: int) -> None:
    """Change one bit of a byte."""
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/`, `corpus.txt` and `store.kv`: for reading only."""
    folder = tmp_path_factory.mktemp("home")
    saved_model(folder / "model")
    (folder / "corpus.txt").write_text(TEXT)
    done("prefill", folder / "corpus.txt", "--model", folder / "model", "--out", folder / "store.kv")
    return folder


@pytest.fixture
def store(home: Path) -> Path:
    """The store itself: for reading only."""
    return home / "store.kv"


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a copy of the store that a test may spoil."""
    return lambda name: Path(shutil.copytree(store, tmp_path / name))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a test has a command write lines."""
    return tmp_path / "out.jsonl"


@pytest.fixture
def questions(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The `QUESTIONS` of a test's module, in a file."""
    return write_lines(tmp_path / "questions.jsonl", *request.module.QUESTIONS)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of evaluations have two tokens."""
    real = answering.reply

    def reply(engine: object, way: str, question: str, most: int, begun: str = "") -> WayAnswer:
        return real(engine, way, question, 2, begun)  # type: ignore[arg-type]

    monkeypatch.setattr(answering, "reply", reply)


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three short documents; for reading only."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("alpha", "beta", "gamma"):
        (folder / f"{name}.txt").write_text(f"The word of this document is {name}. " * 4)
    return folder


@pytest.fixture(scope="session")
def collection(home: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection of them; for reading only."""
    out = tmp_path_factory.mktemp("collections") / "texts"
    ran = done("collect", texts, "--model", home / "model", "--out", out)
    assert "3 made; it holds 3 documents" in ran.err
    return out


def by_one_worker(parts, cluster, config, most, cites, check, remote, watch, least):
    """What a cluster of this machine returns: the last question first."""
    stores = tuple(store for one in parts for store in one.stores)
    worker = asking.Asker(stores, remote, config, cluster.caps, most, cites, check, least)
    worker.load()
    for number, one in reversed(list(enumerate(parts))):
        yield number, worker.do(one).result
