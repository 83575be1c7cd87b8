"""An answer in blocks, as OpenAI's responses and Anthropic's messages have it: the model's reasoning, a text
and calls of tools, one behind the other, each told of as it begins, grows and ends.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Literal

from pydantic import BaseModel

from offload_decode.server.http.answers import grounded
from offload_decode.server.http.streaming import Reply
from offload_decode.server.requests import Delta, Done, Ended, Event, Finish, Prompted, ToolCall

Kind = Literal["reasoning", "text"]


class BlockReply(Reply, ABC):
    """A reply of blocks: what a route tells of each makes the events of its stream. An answer without a word
    has an empty text.
    """

    def __init__(self) -> None:
        self._kind: Kind | None = None  # of the block that is being written
        self._text = ""
        self._empty = True
        self.finish: Finish = "stop"
        self.stop: str | None = None
        self.grounded: dict[str, float] = {}  # the field of `Cost`, where it is known

    def prompted(self, event: Prompted) -> Iterator[BaseModel]:
        """The prompt has run."""
        yield from ()

    @abstractmethod
    def opened(self, kind: Kind) -> Iterator[BaseModel]:
        """A block begins."""

    @abstractmethod
    def grown(self, kind: Kind, more: str) -> Iterator[BaseModel]:
        """There is more of it."""

    @abstractmethod
    def closed(self, kind: Kind, text: str) -> Iterator[BaseModel]:
        """It is whole."""

    @abstractmethod
    def called(self, call: ToolCall) -> Iterator[BaseModel]:
        """A call, which comes whole."""

    @abstractmethod
    def done(self, event: Done) -> Iterator[BaseModel]:
        """The answer is whole."""

    def collect(self, part: int, event: Event) -> None:
        list(self._told(event))

    async def chunks(self, part: int, event: Event) -> AsyncIterator[BaseModel]:
        for one in self._told(event):
            yield one

    def _told(self, event: Event) -> Iterator[BaseModel]:
        match event:
            case Prompted():
                yield from self.prompted(event)
            case Delta(_, text, _, calls, thought):
                yield from self._write("reasoning", thought)
                yield from self._write("text", text)
                for call in calls:
                    yield from self._close()
                    yield from self.called(call)
                    self._empty = False
            case Ended(_, finish, stop, known):
                self.finish, self.stop, self.grounded = finish, stop, grounded([known])
                if self._empty:
                    yield from self._open("text")
                yield from self._close()
            case Done():
                yield from self.done(event)

    def _write(self, kind: Kind, more: str) -> Iterator[BaseModel]:
        if more:
            if self._kind != kind:
                yield from self._close()
                yield from self._open(kind)
            self._text += more
            yield from self.grown(kind, more)

    def _open(self, kind: Kind) -> Iterator[BaseModel]:
        self._kind, self._text, self._empty = kind, "", False
        yield from self.opened(kind)

    def _close(self) -> Iterator[BaseModel]:
        if self._kind is not None:
            yield from self.closed(self._kind, self._text)
            self._kind = None
