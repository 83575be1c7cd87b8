"""The answer of `/v1/responses` as it grows, and the events that tell of it, in openai's own types."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseCreatedEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from offload_decode.server.http.answers import QUIET_S, Cited, Events, cost, data, new_id
from offload_decode.server.http.errors import refused
from offload_decode.server.requests import Delta, Done, Ended, Event, ToolCall, Usage
from offload_decode.server.tool_calls import as_sent
from offload_decode.types import StepStats


class ReplyObject(Response):
    """OpenAI's, with what was asked for by `citations`: what the answer attended to, and what it cost."""

    citations: Cited | None = None
    stats: StepStats | None = None


class Reply:
    """One answer. Each event of the service makes some of the stream's; `object` is the answer so far: of a
    message, if anything was said, and the calls that were made.

    echoed: what the answer says of the request.
    """

    def __init__(self, echoed: Mapping[str, Any], cite: bool):
        self._cite = cite
        self._number = 0
        self._message: str | None = None  # the id of the message that is being written
        self._text = ""
        self._all = ""
        self._calls: list[ToolCall] = []
        self._finish = "stop"
        self.object = ReplyObject(
            id=new_id("resp"),
            object="response",
            created_at=time.time(),
            status="in_progress",
            error=None,
            incomplete_details=None,
            output=[],
            usage=None,
            **echoed,
        )

    @property
    def id(self) -> str:
        """Of the response."""
        return self.object.id

    def said(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        calls = {"tool_calls": [as_sent(call) for call in self._calls]} if self._calls else {}
        return {"role": "assistant", "content": self._all, **calls}

    def begin(self) -> Iterator[BaseModel]:
        """The first events."""
        now = self.object.model_copy()
        yield ResponseCreatedEvent(type="response.created", response=now, **self._next())
        yield ResponseInProgressEvent(type="response.in_progress", response=now, **self._next())

    def add(self, event: Event) -> Iterator[BaseModel]:
        """What comes of an event."""
        match event:
            case Delta(_, text, _, calls):
                if text:
                    yield from self._more(text)
                for call in calls:
                    yield from self._closed()
                    yield from self._called(call)
            case Ended(_, finish):
                self._finish = finish
                if not self.object.output:
                    yield from self._opened()
                yield from self._closed()
            case Done() as done:
                yield self._whole(done)

    def failed(self, message: str) -> BaseModel:
        """The last event where the answer fails."""
        self.object.status = "failed"
        self.object.error = ResponseError(code="server_error", message=message)
        return ResponseFailedEvent(type="response.failed", response=self.object, **self._next())

    def _more(self, text: str) -> Iterator[BaseModel]:
        yield from self._opened()
        self._text += text
        self._all += text
        yield ResponseTextDeltaEvent(
            type="response.output_text.delta", delta=text, logprobs=[], content_index=0, **self._place()
        )

    def _opened(self) -> Iterator[BaseModel]:
        if self._message is not None:
            return
        self._message, self._text = new_id("msg"), ""
        item = self._item([], "in_progress")
        yield ResponseOutputItemAddedEvent(
            type="response.output_item.added", item=item, output_index=self._index, **self._next()
        )
        yield ResponseContentPartAddedEvent(
            type="response.content_part.added", part=_part(""), content_index=0, **self._place()
        )

    def _closed(self) -> Iterator[BaseModel]:
        if self._message is None:
            return
        part = _part(self._text)
        item = self._item([part], "incomplete" if self._finish == "length" else "completed")
        yield ResponseTextDoneEvent(
            type="response.output_text.done",
            text=self._text,
            logprobs=[],
            content_index=0,
            **self._place(),
        )
        yield ResponseContentPartDoneEvent(
            type="response.content_part.done", part=part, content_index=0, **self._place()
        )
        yield self._done(item)
        self._message = None

    def _called(self, call: ToolCall) -> Iterator[BaseModel]:
        self._calls.append(call)
        item = ResponseFunctionToolCall(
            id=new_id("fc"),
            type="function_call",
            call_id=call.id,
            name=call.name,
            arguments="",
            status="in_progress",
        )
        place: dict[str, Any] = {"item_id": item.id, "output_index": self._index}
        yield ResponseOutputItemAddedEvent(
            type="response.output_item.added", item=item, output_index=self._index, **self._next()
        )
        yield ResponseFunctionCallArgumentsDeltaEvent(
            type="response.function_call_arguments.delta", delta=call.arguments, **place, **self._next()
        )
        yield ResponseFunctionCallArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            arguments=call.arguments,
            **place,
            **self._next(),
        )
        yield self._done(item.model_copy(update={"arguments": call.arguments, "status": "completed"}))

    def _done(self, item: ResponseOutputMessage | ResponseFunctionToolCall) -> BaseModel:
        index = self._index
        self.object.output.append(item)
        return ResponseOutputItemDoneEvent(
            type="response.output_item.done", item=item, output_index=index, **self._next()
        )

    def _whole(self, done: Done) -> BaseModel:
        self.object.usage = _usage(done.usage)
        if self._cite:
            for name, value in cost(done).items():
                setattr(self.object, name, value)
        if self._finish == "length":
            self.object.status = "incomplete"
            self.object.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return ResponseIncompleteEvent(type="response.incomplete", response=self.object, **self._next())
        self.object.status = "completed"
        return ResponseCompletedEvent(type="response.completed", response=self.object, **self._next())

    @property
    def _index(self) -> int:
        """Where in the output the item stands that is being written."""
        return len(self.object.output)

    def _item(self, content: list[Any], status: Any) -> ResponseOutputMessage:
        return ResponseOutputMessage(
            id=self._message or "", type="message", role="assistant", content=content, status=status
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": self._index, **self._next()}

    def _next(self) -> dict[str, Any]:
        self._number += 1
        return {"sequence_number": self._number - 1}


def _part(text: str) -> ResponseOutputText:
    return ResponseOutputText(type="output_text", text=text, annotations=[])


def _usage(own: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=own.prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=own.cached, cache_write_tokens=0),
        output_tokens=own.completion,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=own.prompt + own.completion,
    )


async def told(
    reply: Reply, events: Events, names: Mapping[str, str], keep: Callable[[], None]
) -> AsyncIterator[bytes | None]:
    """The stream: an error ends it with an event of its own. `keep` is called when the answer is whole."""
    for event in reply.begin():
        yield _sent(event)
    try:
        async for happened in events.each(QUIET_S):
            if happened is None:
                yield None
                continue
            for event in reply.add(happened.event):
                yield _sent(event)
    except Exception as error:  # noqa: BLE001 - the status has been sent: the stream itself must tell
        yield _sent(reply.failed(refused(error, names).body.error.message))
    else:
        keep()


def _sent(event: BaseModel) -> bytes:
    return data(event, event=event.type)  # type: ignore[attr-defined]  # all of them have it
