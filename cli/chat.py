"""`offload-decode chat`: a conversation about a store."""

from __future__ import annotations

import io
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.ask import show
from offload_decode.cli.client import (
    Manner,
    Reached,
    Received,
    Server,
    asked,
    check_left_to_server,
    reaching,
)
from offload_decode.cli.errors import sentence
from offload_decode.cli.limits import Asking, asking, open_engine
from offload_decode.cli.options import From, MaxNewTokens, Seed, Store, Temperature, TopP, with_groups
from offload_decode.cli.transcript import Transcript, Turn
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HELP = """\
/help        show this
/reset       forget the conversation
/save FILE   save the conversation
/load FILE   go on with a conversation that was saved
/quit        leave; so do /exit, Ctrl-D and the end of the input
Everything else is a question. Ctrl-C stops an answer; what is written of it stays in the conversation."""


@with_groups
def chat(
    store: Store,
    how: Annotated[Asking, From(asking)],
    reached: Annotated[Reached | None, From(reaching)],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
) -> None:
    """Hold a conversation about a store.

    Each line is a question, and every answer sees the turns before it. /help lists the commands: /reset,
    /save FILE, /load FILE, /quit. Ctrl-C stops an answer and the conversation goes on.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the conversation
    if reached is not None:
        check_left_to_server(how)
        manner = Manner(how.config.selector, how.config.options, max_new_tokens, temperature, top_p, seed)
        _chat_with_server(reached, str(store), manner, at_terminal)
        return
    if at_terminal:
        output.note(f"Opening {store} and loading its model …")

    from offload_decode.engine.sampler import Sampler

    sampler = Sampler(temperature, top_p, seed)
    engine = open_engine(store, how)
    transcript = Transcript(engine)
    answer = partial(transcript.answer, max_new_tokens=max_new_tokens, sampler=sampler)
    _talk(_Chat(transcript, answer, at_terminal), engine.prefix.length)


def _chat_with_server(reached: Reached, store: str, manner: Manner, at_terminal: bool) -> None:
    with Server(reached) as server:
        served = server.served(store)
        transcript = RemoteTranscript(server, served.name, manner)
        _talk(_Chat(transcript, transcript.answer, at_terminal), served.tokens)


class RemoteTranscript:
    """A conversation whose turns are kept here and sent whole: the server remembers what it ran."""

    def __init__(self, server: Server, name: str, manner: Manner):
        self.server, self.name, self.manner = server, name, manner
        self.messages: list[dict[str, str]] = []
        self.turns: list[Turn] = []

    def answer(self, question: str) -> Iterator[str]:
        """Put a question and yield the answer; interrupted, what has come of it stays."""
        received, said = Received(), {"role": "assistant", "content": ""}
        messages = [*self.messages, *asked(question)]
        for piece in self.server.stream(self.name, messages, self.manner, received):
            if not said["content"]:
                self.messages = [*messages, said]
                self.turns.append(Turn(question))
            said["content"] = received.text
            yield piece

    def reset(self) -> None:
        """Forget every turn."""
        self.messages, self.turns = [], []

    def save(self, file: Path) -> None:
        """Raises `ConfigError`: what is saved are tokens, and the server keeps them."""
        raise ConfigError("a conversation with a server cannot be saved: chat without --server for that")

    def load(self, file: Path) -> None:
        """Raises `ConfigError`, as `save` does."""
        raise ConfigError("a conversation cannot be loaded into a server: chat without --server for that")

    @property
    def length(self) -> int:
        """Tokens of the turns, which the server alone counts."""
        return 0


def _talk(chat: _Chat, stored: int) -> None:
    if chat.at_terminal:
        import readline  # noqa: F401  # editing and history for input()

        output.note(f"{stored:,} tokens are ready. Ask something; /help lists the commands.")
    chat.run()


class _Chat:
    """Reads lines until there are no more. At a terminal an error ends a line, elsewhere the command."""

    def __init__(
        self,
        transcript: Transcript | RemoteTranscript,
        answer: Callable[[str], Iterator[str]],
        at_terminal: bool,
    ):
        self.transcript = transcript
        self.answer = answer
        self.at_terminal = at_terminal

    def run(self) -> None:
        while (line := self._line()) is not None:
            turns = len(self.transcript.turns)
            try:
                if self._leaves(line):
                    return
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
                answered = len(self.transcript.turns) > turns
                kept = "what was written stays in the conversation" if answered else "nothing was changed"
                output.note(f"\nStopped: {kept}.")
            except OffloadDecodeError as error:
                if not self.at_terminal:
                    raise
                output.note(f"error: {sentence(error)}")

    def _line(self) -> str | None:
        """The next line; None at the end of the input."""
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

    def _leaves(self, line: str) -> bool:
        """Do what a line says; whether it ends the session."""
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
                output.note(f"{command} stands alone on its line")
            case _ if command.startswith("/"):
                output.note(f"There is no command {command}: /help lists those that there are.")
            case _ if line:
                show(self.answer(line))
        return False

    def _size(self) -> str:
        turns, tokens = len(self.transcript.turns), self.transcript.length
        return f"{output.count(turns, 'turn')} ({output.count(tokens, 'token')})"
