"""`offload-decode chat`: a conversation about a store."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import client, output
from offload_decode.cli.ask import show
from offload_decode.cli.client import AnswerOptions, Server, ServerAddress
from offload_decode.cli.errors import sentence
from offload_decode.cli.limits import AskOptions, open_engine
from offload_decode.cli.options import From, MaxNewTokens, Seed, Store, Temperature, TopP, with_groups
from offload_decode.cli.transcript import Transcript, Turn
from offload_decode.common.errors import ConfigError, OffloadDecodeError

if TYPE_CHECKING:
    from collections.abc import Iterator

HELP = """\
/help        show this
/reset       forget the conversation
/save FILE   save the conversation
/load FILE   continue a saved conversation
/quit        leave; so do /exit, Ctrl-D and the end of the input
Everything else is a question. Ctrl-C stops an answer; the part already written stays in the conversation."""


@with_groups
def chat(
    store: Store,
    options: AskOptions,
    address: Annotated[ServerAddress | None, From(client.server_address)],
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
) -> None:
    """Hold a conversation about a store.

    Each line is a question, and every answer sees the turns before it. /help lists the commands: /reset,
    /save FILE, /load FILE, /quit. Ctrl-C stops an answer and the conversation continues.
    """
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the conversation
    config = options.config
    wanted = AnswerOptions(config.selector, config.options, max_new_tokens, temperature, top_p, seed)
    if address is not None:
        client.check_server_options(options)
        with Server(address) as server:
            served = server.served(str(store))
            remote = RemoteTranscript(server, served.name, wanted)
            _Chat(remote, at_terminal).run(served.tokens)
        return
    if at_terminal:
        output.note(f"Opening {store} and loading its model …")
    engine = open_engine(store, options)
    _Chat(Transcript(engine, max_new_tokens, wanted.sampler), at_terminal).run(engine.prefix.length)


class RemoteTranscript:
    """A conversation that is sent whole with each question: the server caches what it has run."""

    def __init__(self, server: Server, name: str, wanted: AnswerOptions):
        self.server, self.name, self.wanted = server, name, wanted
        self.messages: list[dict[str, str]] = []
        self.turns: list[Turn] = []

    def answer(self, question: str) -> Iterator[str]:
        """Ask a question and yield the answer; if interrupted, the part that arrived stays."""
        answer, message = client.ServerAnswer(), {"role": "assistant", "content": ""}
        messages = [*self.messages, *client.conversation(question)]
        for piece in self.server.stream(self.name, messages, self.wanted, answer):
            if not message["content"]:
                self.messages = [*messages, message]
                self.turns.append(Turn(question))
            message["content"] = answer.text
            yield piece

    def reset(self) -> None:
        """Forget every turn."""
        self.messages, self.turns = [], []

    def save(self, file: Path) -> None:
        """Raises `ConfigError`: a saved conversation needs the tokens, which only the server has."""
        raise ConfigError("with a server, nothing is saved or loaded: chat without --server for that")

    load = save

    @property
    def length(self) -> int:
        """Tokens of the turns: 0, as only the server counts them."""
        return 0


class _Chat:
    """Reads and answers lines. An error ends only its line at a terminal, and the command elsewhere."""

    def __init__(self, transcript: Transcript | RemoteTranscript, at_terminal: bool):
        self.transcript = transcript
        self.at_terminal = at_terminal

    def run(self, stored: int) -> None:
        if self.at_terminal:
            import readline  # noqa: F401  # editing and history for input()

            output.note(f"{stored:,} tokens are ready. Ask something; /help lists the commands.")
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
                show(self.transcript.answer(line))
        return False

    def _size(self) -> str:
        turns, tokens = len(self.transcript.turns), self.transcript.length
        return f"{output.count(turns, 'turn')} ({output.count(tokens, 'token')})"
