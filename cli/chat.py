"""`offload-decode chat`: a conversation about a store, which can be saved and loaded.

The file of a conversation is JSON: `format` and `version`; `store`, the digest of its store; `model`, for
readers; and `turns`, each with `question`, `answer` and the answer's token ids (`tokens`).
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from offload_decode.cli import client, output
from offload_decode.cli import options as opts
from offload_decode.cli.ask import cited_text, held, show, tell_checked, tell_cut, tell_grounded, tell_notes
from offload_decode.cli.client import AnswerOptions, Server, ServerAddress
from offload_decode.cli.collections import DocumentChoice, open_collection
from offload_decode.cli.errors import sentence
from offload_decode.cli.limits import AskOptions, check_options, open_engine
from offload_decode.cli.options import From, on_this_machine, with_groups
from offload_decode.cli.output import Progress
from offload_decode.cli.together import Together, TogetherChoice, refuse_others
from offload_decode.common import files
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from offload_decode.collections.together import Talk
    from offload_decode.engine.citations import Watch
    from offload_decode.engine.conversation import Sampler
    from offload_decode.engine.engine import Engine

HELP = """\
/help        show this
/reset       forget the conversation
/save FILE   save the conversation
/load FILE   continue a saved conversation
/quit        leave; so do /exit, Ctrl-D and the end of the input
Everything else is a question. Ctrl-C stops an answer; the part already written stays in the conversation."""

FORMAT, VERSION = "offload-decode conversation", 1
MAX_BYTES = 16 * 2**20
_FIELDS = {"format", "version", "store", "model", "turns"}


@with_groups
def chat(
    stores: Annotated[
        list[Path],
        opts.store_argument(
            "A store made by `prefill`; with --together several, or a collection made by `collect`.", None
        ),
    ],
    options: AskOptions,
    address: Annotated[ServerAddress | None, From(client.server_address)],
    together: TogetherChoice,
    max_new_tokens: opts.MaxNewTokens = 256,
    temperature: opts.Temperature = 0.0,
    top_p: opts.TopP = 1.0,
    seed: opts.Seed = 0,
    cites: opts.Cite = False,
    check: opts.Check = False,
    only_grounded: opts.OnlyGrounded = None,
) -> None:
    """Hold a conversation about a store.

    Each line is a question, and every answer sees the turns before it. /help lists the commands: /reset,
    /save FILE, /load FILE, /quit. Ctrl-C stops an answer and the conversation continues. With --together, the
    first question chooses the documents of a collection for all that follow; /reset begins anew.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the conversation
    refuse_others(together, address is not None, False, only_grounded is not None, check)
    config = options.config
    drawn = temperature, top_p, seed
    wanted = AnswerOptions(config.selector, config.options, max_new_tokens, *drawn, cites, check)
    if together.together is not None:
        with open_collection(stores, None, DocumentChoice(), Progress) as asked:
            together.check(stores, asked)
            check_options(options)
            asked_together = Together(stores, asked, together, options, cites, only_grounded)
            joint = JointTranscript(asked_together, max_new_tokens, wanted.sampler)
            _Chat(joint, at_terminal, only_grounded).run(None)
        return
    together.check(stores, None)
    store = on_this_machine(stores[0])
    if address is not None:
        client.check_server_options(options)
        with Server(address) as server:
            served = server.served(str(store))
            remote = RemoteTranscript(server, served.name, wanted)
            _Chat(remote, at_terminal, only_grounded).run(served.tokens)
        return
    if at_terminal:
        output.note(f"Opening {store} and loading its model …")
    engine = open_engine(store, options, only_grounded)
    engine.records = check
    transcript = Transcript(engine, max_new_tokens, wanted.sampler, cites)
    _Chat(transcript, at_terminal, only_grounded).run(engine.prefix.length)


@dataclass
class Turn:
    """A question, and the token ids of its answer so far."""

    question: str
    tokens: list[int] = field(default_factory=list)


@dataclass
class Transcript:
    """An engine, and the questions and answers after the stored tokens."""

    engine: Engine
    max_new_tokens: int
    sampler: Sampler
    cites: bool = False
    turns: list[Turn] = field(default_factory=list)
    _watch: Watch | None = field(default=None, init=False, repr=False)

    def answer(self, question: str) -> Iterator[str]:
        """Ask a question and yield the answer piece by piece.

        If interrupted, the conversation keeps the part generated; nothing if the question was still running.
        """
        with self.engine.watched() if self.cites else nullcontext() as self._watch:
            logits = self.engine.ask(question)
            turn = Turn(question)
            self.turns.append(turn)

            def generated() -> Iterator[int]:
                for token in self.engine.generate(logits, self.max_new_tokens, self.sampler):
                    turn.tokens.append(token)
                    yield token

            yield from self.engine.pieces(generated())

    @property
    def grounded(self) -> float | None:
        """How likely the last answer stands in the text."""
        return self.engine.grounded

    @property
    def checked(self) -> Mapping[str, Any] | None:
        """How far a second pass agrees with the last answer, where that is asked for."""
        from offload_decode.engine.second_pass import checked

        return asdict(checked(self.engine, self.engine.record)) if self.engine.records else None

    @property
    def cited(self) -> str | None:
        """What the last answer attended to, where that is asked for."""
        return None if self._watch is None else cited_text(self.engine.cited(self._watch))

    def tell_cut(self) -> None:
        """Say whether the last answer was cut by its length."""
        tell_cut(self.engine.finish, self.max_new_tokens, self.engine.most_new(1))

    @property
    def length(self) -> int:
        return self.engine.length - self.engine.prefix.length

    def reset(self) -> None:
        self.engine.crop(self.engine.prefix.length)
        self.turns = []

    def save(self, file: Path) -> None:
        """Write the turns to `file`; raises `ConfigError` if it cannot, or if the file is something else."""
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
                and question == files.without_surrogates(question)
                and not others
                and all(type(token) is int and token in known for token in tokens)
            ):
                turn = Turn(question, tokens)
                if self._text(turn) == answer:
                    return turn
        raise _changed(file)

    def _text(self, turn: Turn) -> str:
        return self.engine.decode(turn.tokens).strip()


@dataclass
class RemoteTranscript:
    """A conversation that is sent whole with each question: the server caches what it has run."""

    server: Server
    name: str
    wanted: AnswerOptions
    turns: list[dict[str, str]] = field(default_factory=list)  # messages
    finish: str = ""
    grounded: float | None = None
    checked: Mapping[str, Any] | None = None
    cited: str | None = None
    notes: Sequence[str] = ()

    def answer(self, question: str) -> Iterator[str]:
        """Ask a question and yield the answer; if interrupted, the part that arrived stays."""
        answer, message = client.ServerAnswer(), {"role": "assistant", "content": ""}
        messages = [*self.turns, *client.conversation(question)]
        for piece in self.server.stream(self.name, messages, self.wanted, answer):
            if not message["content"]:
                self.turns = [*messages, message]
            message["content"] = answer.text
            yield piece
        self.finish, self.grounded, self.checked = answer.finish, answer.grounded, answer.checked
        self.notes = list(answer.notes(self.wanted))
        self.cited = cited_text(answer.cited) if self.wanted.cite else None

    def tell_cut(self) -> None:
        """Say whether the last answer was cut by its length, and what the server remarks."""
        tell_cut(self.finish, self.wanted.max_new_tokens)
        tell_notes(self.notes)

    def reset(self) -> None:
        self.turns = []

    def save(self, file: Path) -> None:
        """Raises `ConfigError`: a saved conversation needs the tokens, which only the server has."""
        raise ConfigError("with a server, nothing is saved or loaded: chat without --server for that")

    load = save

    @property
    def length(self) -> int:
        """Tokens of the turns: 0, as only the server counts them."""
        return 0


@dataclass
class JointTranscript:
    """A conversation with the stores that are chosen for its first question."""

    together: Together
    max_new_tokens: int
    sampler: Sampler
    talk: Talk | None = None
    checked: Mapping[str, Any] | None = None  # is told of one store alone
    _held: ExitStack = field(default_factory=ExitStack)

    def answer(self, question: str) -> Iterator[str]:
        """Ask a question and yield the answer; if interrupted, the part that is written stays."""
        if self.talk is None:
            self.talk = self._held.enter_context(self.together.opened(question))
        return self.talk.stream(question, self.max_new_tokens, self.sampler)

    @property
    def grounded(self) -> float | None:
        """How grounded the last answer is, where that is known."""
        return None if self.talk is None else self.talk.joint.grounded

    @property
    def cited(self) -> str | None:
        """What the last answer's documents attended to, and where its words came from, where that is asked
        for.
        """
        if self.talk is None or not self.together.cites:
            return None
        return "\n".join(filter(None, (self.talk.carried(), cited_text(self.talk.joint.citations()))))

    @property
    def turns(self) -> range:
        """The questions that were put: one whose run was stopped is none."""
        return range(0 if self.talk is None else self.talk.joint.asked)

    def tell_cut(self) -> None:
        """Say whether the last answer was cut by its length, and what it was joined from."""
        assert self.talk is not None, "a question was answered"
        tell_cut(self.talk.joint.finish, self.max_new_tokens, self.talk.joint.most_new(1))
        tell_notes(self.talk.notes())

    def reset(self) -> None:
        self._held.close()
        self.talk = None

    def save(self, file: Path) -> None:
        """Raises `ConfigError`: a saved conversation is about one store."""
        raise ConfigError("with --together, nothing is saved or loaded: chat about one store for that")

    load = save

    @property
    def length(self) -> int:
        """Tokens of the turns: 0, as no file has them."""
        return 0


@dataclass
class _Chat:
    """Reads and answers lines. An error ends only its line at a terminal, and the command elsewhere."""

    transcript: Transcript | RemoteTranscript | JointTranscript
    at_terminal: bool
    least: float | None = None

    def run(self, stored: int | None) -> None:
        if self.at_terminal:
            import readline  # noqa: F401  # editing and history for input()

            ready = "" if stored is None else f"{stored:,} tokens are ready. "
            output.note(f"{ready}Ask something; /help lists the commands.")
        while (line := self._line()) is not None:
            turns = len(self.transcript.turns)
            try:
                if self._execute(line):
                    return
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
                answered = len(self.transcript.turns) > turns
                effect = "the written part stays in the conversation" if answered else "nothing was changed"
                output.note(f"\nStopped: {effect}.")
            except OffloadDecodeError as error:
                if not self.at_terminal:
                    raise
                output.note(f"error: {sentence(error)}")

    def _line(self) -> str | None:
        while True:
            try:
                return input("> " if self.at_terminal else "").strip()
            except EOFError:
                if self.at_terminal:
                    output.note("")
                return None
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
                output.note("\n/quit or Ctrl-D leaves.")

    def _execute(self, line: str) -> bool:
        """Run a command or answer a question; whether the session ends."""
        command, _, rest = line.partition(" ")
        file = Path(os.path.expanduser(rest.strip()))
        match command, bool(rest.strip()):
            case (("/quit" | "/exit"), False):
                return True
            case "/help", False:
                output.note(HELP)
            case "/reset", False:
                self.transcript.reset()
            case "/save", True:
                self.transcript.save(file)
                output.note(f"Saved {self._size()} to {file}.")
            case "/load", True:
                self.transcript.load(file)
                output.note(f"Loaded {self._size()} from {file}.")
            case (("/save" | "/load"), False):
                output.note(f"{command} needs a file: {command} FILE")
            case (("/quit" | "/exit" | "/help" | "/reset"), True):
                output.note(f"{command} takes nothing after it")
            case _ if command.startswith("/"):
                output.note(f"There is no command {command}: /help lists them.")
            case _ if line:
                show(held(self.transcript.answer(line), lambda: self.transcript.grounded, self.least))
                tell_grounded(self.transcript.grounded)
                tell_checked(self.transcript.checked)
                self.transcript.tell_cut()
                if (cited := self.transcript.cited) is not None:
                    output.note(cited)
        return False

    def _size(self) -> str:
        turns, tokens = len(self.transcript.turns), self.transcript.length
        return f"{output.count(turns, 'turn')} ({output.count(tokens, 'token')})"


def _answered(engine: Engine, tokens: list[int]) -> None:
    """Run an answer's tokens as they were generated; the last one goes into the next question's pass."""
    earlier, last = tokens[:-1], tokens[-1:]
    for run in [[token] for token in earlier] if engine.selector.remembers else [earlier]:
        if run:
            engine.extend(run)
    engine.pending = last


def _read(file: Path) -> dict[str, Any]:
    try:
        with open(files.open_plain(file, follow=True), "rb") as source:
            data = source.read(MAX_BYTES + 1)
    except files.NotPlain as error:
        raise ConfigError(f"{file} is not a file: give one that /save wrote") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {_reason(error)}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than any conversation: give a file that /save wrote")
    try:
        saved = files.parse(data)
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
