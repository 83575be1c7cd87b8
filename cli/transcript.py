"""A conversation with a store: its turns, saving and loading.

The file is JSON: `format` and `version`; `store`, the digest of its store; `model`, for
readers; and `turns`, each with `question`, `answer` and the answer's token ids (`tokens`).
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_decode.cli.options import without_surrogates
from offload_decode.common.errors import ConfigError
from offload_decode.common.files import parse

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.engine.sampler import Sampler

FORMAT, VERSION = "offload-decode conversation", 1
MAX_BYTES = 16 * 2**20
_FIELDS = {"format", "version", "store", "model", "turns"}


@dataclass
class Turn:
    """A question, and the token ids of its answer so far."""

    question: str
    tokens: list[int] = field(default_factory=list)


class Transcript:
    """An engine, and the questions and answers after the stored tokens."""

    def __init__(self, engine: Engine, max_new_tokens: int, sampler: Sampler):
        self.engine, self.max_new_tokens, self.sampler = engine, max_new_tokens, sampler
        self.turns: list[Turn] = []

    def answer(self, question: str) -> Iterator[str]:
        """Ask a question and yield the answer piece by piece.

        If interrupted, the conversation keeps the part generated; nothing if the question was still running.
        """
        logits = self.engine.ask(question)
        turn = Turn(question)
        self.turns.append(turn)

        def generated() -> Iterator[int]:
            for token in self.engine.generate(logits, self.max_new_tokens, self.sampler):
                turn.tokens.append(token)
                yield token

        return self.engine.pieces(generated())

    @property
    def length(self) -> int:
        """Tokens of all turns."""
        return self.engine.length - self.engine.prefix.length

    def reset(self) -> None:
        """Forget every turn."""
        self.engine.crop(self.engine.prefix.length)
        self.turns = []

    def save(self, file: Path) -> None:
        """Write the turns to `file`; raises `ConfigError` if it cannot, or if the file is something else."""
        from offload_decode.common import files

        if not self.turns:
            raise ConfigError("there is nothing to save yet: ask a question first")
        if os.path.lexists(file):
            _read(file)  # only a conversation is overwritten
        saved = {
            "format": FORMAT,
            "version": VERSION,
            "store": self.engine.store.store_digest,
            "model": self.engine.loaded.model_id,
            "turns": [{**asdict(turn), "answer": self._text(turn)} for turn in self.turns],
        }
        data = json.dumps(saved, ensure_ascii=False, indent=1).encode("utf-8", "replace")
        if len(data) > MAX_BYTES:
            raise ConfigError(f"the conversation is longer than the {MAX_BYTES >> 20} MiB that can be saved")
        try:
            files.write(file, data)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write {file}: {_reason(error)}; choose another file") from error

    def load(self, file: Path) -> None:
        """Replace this conversation by the one in `file`, whose tokens are run again.

        Raises `ConfigError`, and keeps this one, if the file is no conversation, or about another store.
        """
        saved = _read(file)
        if saved["store"] != self.engine.store.store_digest:
            raise ConfigError(
                f"{file} is a conversation about another store, prefilled with {saved['model'][:80]!r}: "
                "open that store to continue it"
            )
        turns = [self._turn(file, written) for written in saved["turns"]]
        replayed = self.engine.fork()
        replayed.crop(replayed.prefix.length)
        for turn in turns:
            replayed.ask(turn.question)
            _answered(replayed, turn.tokens)
        self.engine, self.turns = replayed, turns

    def _turn(self, file: Path, written: Any) -> Turn:
        known = range(self.engine.loaded.model.get_input_embeddings().num_embeddings)
        match written:
            case {"question": str(question), "answer": str(answer), "tokens": list(tokens), **others} if (
                question.strip()
                and question == without_surrogates(question)
                and not others
                and all(type(token) is int and token in known for token in tokens)
            ):
                turn = Turn(question, tokens)
                if self._text(turn) == answer:
                    return turn
        raise _changed(file)

    def _text(self, turn: Turn) -> str:
        return self.engine.decode(turn.tokens).strip()


def _answered(engine: Engine, tokens: list[int]) -> None:
    """Run an answer's tokens as they were generated; the last one goes into the next question's pass.

    One by one if the selector keeps state across passes; else in one pass.
    """
    earlier, last = tokens[:-1], tokens[-1:]
    for run in [[token] for token in earlier] if engine.selector.remembers else [earlier]:
        if run:
            engine.extend(run)
    engine.pending = last


def _read(file: Path) -> dict[str, Any]:
    """The contents of a conversation file, its turns not yet checked."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer must not block
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ConfigError(f"{file} is not a file: give one that /save wrote")
            with open(handle, "rb", closefd=False) as source:
                data = source.read(MAX_BYTES + 1)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {_reason(error)}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than any conversation: give a file that /save wrote")
    try:
        saved = parse(data)
    except ValueError:
        saved = None
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ConfigError(f"{file} is not a conversation: give a file that /save wrote")
    if saved.get("version") != VERSION:
        raise ConfigError(f"{file} was saved by another release, which this one cannot read")
    kinds = {"store": str, "model": str, "turns": list}
    if saved.keys() != _FIELDS or not all(isinstance(saved[name], kind) for name, kind in kinds.items()):
        raise _changed(file)
    return saved


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)


def _changed(file: Path) -> ConfigError:
    return ConfigError(f"{file} was changed after it was saved: it cannot be loaded")
