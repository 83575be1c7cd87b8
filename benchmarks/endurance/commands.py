"""What is done: commands of the command line, each in a folder that another one has left, and what it leaves
there when nothing happens to it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from offload_decode.collections.collection import HEADER
from offload_decode.collections.journal import DOCUMENTS
from offload_decode.collections.words import WORDS
from tests.prefill_jobs import killing
from tests.prefill_jobs.killing import Ran, Runner

Arguments = Callable[[Path], list[str]]

MODEL = "demo"
QUESTIONS = ("What is the text about?", "Which words are there?", "What comes last?")
_VOCABULARY = ("corpus", "key", "value", "store", "index", "question")


@dataclass(frozen=True)
class Command:
    """A command in a folder: `begins` names the one in whose folder it begins, if not in an empty one;
    `check` says of what it left whether a byte of it is another, None where nothing can.
    """

    name: str
    begins: str
    arguments: Arguments
    check: Arguments | None


def inputs(folder: Path, words: int, rng: random.Random) -> None:
    """Texts, questions and a folder of documents, made of some words."""

    def text(count: int) -> str:
        return " ".join(rng.choices(_VOCABULARY, k=count))

    (folder / "documents").mkdir(parents=True)
    (folder / "corpus.txt").write_text(text(words))
    (folder / "more.txt").write_text(text(words // 4))
    for number in range(5):
        (folder / "documents" / f"{number}.txt").write_text(text(words // 8))
    lines = [json.dumps({"id": number, "question": each}) for number, each in enumerate(QUESTIONS)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")


def commands(given: Path, kinds: Sequence[str]) -> list[Command]:
    """Every command with the inputs in `given`, each behind the one that it begins with."""

    def prefill(folder: Path) -> list[str]:
        return killing.prefill(given / "corpus.txt", MODEL, folder / "a.kv", "-o", "chunk=64")

    def index(kind: str) -> Command:
        return Command(
            f"index {kind}", "prefill", lambda folder: killing.index(folder / "a.kv", kind), verify
        )

    def verify(folder: Path) -> list[str]:
        return ["verify", str(folder / "a.kv")]

    def push(folder: Path) -> list[str]:
        return ["push", str(folder / "a.kv"), f"file://{folder}/bucket/a.kv"]

    def pull(folder: Path, name: str = "b.kv") -> list[str]:
        return ["pull", f"file://{folder}/bucket/a.kv", str(folder / name)]

    def batch(folder: Path, *asked: str) -> list[str]:
        to = ["--questions", f"{given}/questions.jsonl", "--out", f"{folder}/answers.jsonl"]
        return ["batch", *asked, *to, "--max-new-tokens", "8", "--batch-size", "1"]

    indexed = f"index {kinds[0]}"
    return [
        Command("prefill", "", prefill, verify),
        *map(index, kinds),
        Command(
            "append", indexed, lambda folder: ["append", f"{folder}/a.kv", str(given / "more.txt")], verify
        ),
        Command("push", indexed, push, lambda folder: pull(folder, "checked.kv")),
        Command("pull", "push", pull, lambda folder: ["verify", str(folder / "b.kv")]),
        Command("batch", indexed, lambda folder: batch(folder, f"{folder}/a.kv"), None),
        Command(
            "collect",
            "",
            lambda folder: ["collect", f"{given}/documents", "--model", MODEL, "--out", f"{folder}/shelf"],
            lambda folder: ["verify", f"{folder}/shelf"],
        ),
        Command(
            "batch of a collection", "collect", lambda folder: batch(folder, f"{folder}/shelf", "--all"), None
        ),
    ]


class Home:
    """A folder for every command, with what it leaves when nothing happens to it.

    whole: those files; alone: how the command ran then. By the command's name.
    """

    def __init__(self, runner: Runner, folder: Path) -> None:
        self._runner, self.folder = runner, folder
        self.whole: dict[str, dict[str, str]] = {"": {}}
        self.alone: dict[str, Ran] = {}

    def add(self, command: Command) -> None:
        """Run a command behind the one that it begins with: twice, as the first time takes longer."""
        folder = self.of(command.name)
        for _ in range(2):
            shutil.rmtree(folder, ignore_errors=True)
            self.begin(command, folder)
            self.alone[command.name] = ran = self._runner.run(command.arguments(folder))
            if ran.code:
                raise RuntimeError(f"{command.name} fails where nothing happens to it: {ran.err}")
        self.whole[command.name] = left(folder, folder)

    def of(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")

    def begin(self, command: Command, folder: Path) -> None:
        """Put into `folder` what the command begins with."""
        if command.begins:
            shutil.copytree(self.of(command.begins), folder, dirs_exist_ok=True)
        folder.mkdir(parents=True, exist_ok=True)

    def made(self, command: Command) -> list[str]:
        """The files that the command made, or changed, with something in them."""
        before, root = self.whole[command.begins], self.of(command.name)
        after = self.whole[command.name].items()
        return [name for name, sha256 in after if before.get(name) != sha256 and (root / name).stat().st_size]

    def covered(self, command: Command) -> list[str]:
        """Those of them for which `check` answers: it cannot know what a collection says of itself."""
        return [name for name in self.made(command) if Path(name).name not in (HEADER, DOCUMENTS)]


def left(folder: Path, named: Path) -> dict[str, str]:
    """SHA-256 of every file under `folder`, which commands called `named`, by path: of what it says, where
    chance decides on its bytes.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(_said(file, named)).hexdigest() for file in files}


def _said(file: Path, named: Path) -> bytes:
    data = file.read_bytes()
    if file.name == WORDS:
        with closing(sqlite3.connect(":memory:")) as words:
            words.deserialize(data)
            return repr(list(words.execute("SELECT rowid, text FROM words ORDER BY rowid"))).encode()
    if file.suffix == ".jsonl":  # lines in the order of their questions or documents
        return b"\n".join(sorted(data.replace(str(named).encode(), b"").splitlines()))
    return data
