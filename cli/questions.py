"""The two files of a batch: questions in, answers out, both with one JSON object per line."""

import itertools
import json
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_decode.cli.output import json_line
from offload_decode.common import files
from offload_decode.common.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs.documents.files import read_plain

# Fields of an answer's line that say how it was answered, those that only some have among them.
_SETTINGS = (
    *("selector", "options", "max_new_tokens", "model", "adapter", "weights"),
    *("cite", "check", "only_grounded", "together", "join"),
)
# Fields that an answer adds: a question's own field of that name would be lost.
_RESERVED = ("answer", "grounded", "tokens", "finish", "citations", "checked", *_SETTINGS, "joined")
_FIRST = '{"id": '
_LONGEST = 16 << 20  # bytes of an answer's line, which is read whole


@dataclass(frozen=True)
class Question:
    """One line of the questions file; `extra` holds the fields that its answers repeat."""

    line: int
    text: str
    id: Any
    store: str | None
    extra: dict[str, Any]

    def key(self, store: str) -> str:
        return _key(store, self.id, self.text)


def read_questions(path: Path) -> list[Question]:
    """Raises `ConfigError` with the number of the first line that cannot be used."""
    try:
        lines = read_plain(os.fspath(path), follow=True).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: give a JSONL file") from error
    except OSError as error:
        raise ConfigError(f"the questions {path} cannot be read: {error.strerror}") from error
    except CorpusError as error:
        reason = f"because {error}: give a JSONL file"
        raise ConfigError(f"the questions {path} cannot be read, {reason}") from error
    questions = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise ConfigError(f'{path} holds no questions: give it lines like {{"question": "…"}}')
    return questions


def among(stores: Sequence[str]) -> Callable[[Question], Sequence[str]]:
    """A function that gives a question's stores: the one that it names, or all `stores`. Raises `ConfigError`
    for a store that is given twice, and the function for one that is not among them.
    """
    if len(set(stores)) < len(stores):
        repeated = next(store for store in stores if stores.count(store) > 1)
        raise ConfigError(f"the store {repeated} is given twice")
    return lambda question: stores if question.store is None else [_named(question, stores)]


def assign(
    questions: Sequence[Question], stores: Sequence[str], chosen: Callable[[Question], Sequence[str]]
) -> dict[str, list[Question]]:
    """The questions for each store, by `chosen`. Raises `ConfigError` for repetitions."""
    asked: dict[str, list[Question]] = {store: [] for store in stores}
    seen: dict[str, int] = {}
    for question in questions:
        for store in chosen(question):
            first, line = seen.setdefault(question.key(store), question.line), question.line
            if first != line:
                raise ConfigError(f"line {line} of the questions repeats line {first}: give each an id")
            asked[store].append(question)
    return asked


def check_out(path: Path) -> None:
    """`ConfigError` unless `path` is, or can be, a regular file: earlier answers are read from it first."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        folder = Path(os.path.realpath(path)).parent  # a link may lead to a file not made yet
        if not folder.is_dir():
            named = folder if path.is_symlink() else path.parent
            why = f"there is no folder {named} for --out: make it first, or choose another"
            raise ConfigError(why) from None
        writable = os.access(folder, os.W_OK)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the answers {path} cannot be written ({reason}): choose another --out") from error
    else:
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a folder: give --out a file in it, such as {path}/answers.jsonl")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{path} is not a regular file: choose another --out")
        writable = os.access(path, os.R_OK | os.W_OK)
    if not writable:
        raise ConfigError(f"the answers {path} cannot be written (Permission denied): choose another --out")


def read_answered(path: Path, settings: dict[str, Any]) -> set[str]:
    """The keys of the answers of earlier runs; an incomplete last line is cut off the file.

    Raises `ConfigError` if the file is not one of answers, or of answers with other `settings`.
    """
    if not path.exists():
        return set()
    answered: set[str] = set()
    whole = 0  # bytes of complete lines
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST)
            if not line.endswith(b"\n"):
                break
            whole += len(line)
            if line.strip():
                answered.add(_answered(path, number, line, settings))
    if line:
        begin = _FIRST.encode()
        if len(line) == _LONGEST or not (line.startswith(begin) or begin.startswith(line)):
            raise _not_answers(path, number)
        os.truncate(path, whole)
    return answered


def append_answers(path: Path, answers: Iterable[dict[str, Any]]) -> None:
    """Append lines to the file and flush them to the disk."""
    fresh = not path.exists()
    lines = "".join(json_line(answer) + "\n" for answer in answers)
    with path.open("a", encoding="utf-8") as file:
        file.write(lines)
    files.sync_files([path])
    if fresh:
        files.sync_folders([path.parent])


def _question(path: Path, number: int, line: str) -> Question:
    where = f"line {number} of {path}"
    try:
        fields = files.parse(line)
    except json.JSONDecodeError as error:
        problem = f'({error.msg} at column {error.colno}): each line is like {{"question": "…"}}'
        raise ConfigError(f"{where} is not JSON {problem}") from error
    except ValueError as error:  # NaN, a number of too many digits, or too many brackets
        raise ConfigError(f"{where} cannot be read ({error}): make it simpler") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("question"), str):
        raise ConfigError(f'{where} has no text in "question": each line is like {{"question": "…"}}')
    text, store = files.without_surrogates(fields.pop("question")), fields.pop("store", None)
    if not text.strip():
        raise ConfigError(f"{where} asks nothing: its question is empty")
    if not isinstance(store, str | None):
        raise ConfigError(f'{where} has a "store" that is neither a name nor a path')
    if lost := [name for name in _RESERVED if name in fields]:
        raise ConfigError(f'{where} has a field "{lost[0]}", which its answer will have too: rename it')
    return Question(number, text, fields.pop("id", None), store, fields)


def _named(question: Question, stores: Sequence[str]) -> str:
    wanted = question.store or ""
    found = [store for store in stores if wanted in (store, Path(store).name)]
    found = found or [store for store in stores if os.path.abspath(store) == os.path.abspath(wanted)]
    if len(found) != 1:
        problem = "several of those given have that name" if found else "it is not among those given"
        raise ConfigError(f"line {question.line} of the questions asks the store {wanted}, but {problem}")
    return found[0]


def _answered(path: Path, number: int, line: bytes, settings: dict[str, Any]) -> str:
    try:
        fields = files.parse(line)
        key = _key(fields["store"], fields["id"], fields["question"])
        before = {name: fields[name] for name in _SETTINGS if name in fields}
        if not before:
            raise KeyError("settings")
    except (ValueError, KeyError, TypeError) as error:
        raise _not_answers(path, number) from error
    if before != settings:
        raise ConfigError(
            f"line {number} of {path} was answered with {json.dumps(before)}, not {json.dumps(settings)}: "
            "choose another --out, or give the same settings"
        )
    return key


def _not_answers(path: Path, number: int) -> ConfigError:
    return ConfigError(f"line {number} of {path} is not an answer of this command: choose another --out")


def _key(store: str, given_id: Any, text: str) -> str:
    return json.dumps([store, given_id, text], sort_keys=True)
