"""The answer of `/v1/responses` as it grows, and its stream of events, in openai's own types."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, get_args

from openai.types import responses as openai
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel

from offload_decode.server.http.answers import Cost, cost, new_id
from offload_decode.server.http.errors import refused
from offload_decode.server.http.streaming import QUIET_S, Events, sse
from offload_decode.server.messages import answer_object
from offload_decode.server.requests import Delta, Done, Ended, Event, ToolCall, Usage


class ReplyObject(openai.Response, Cost):
    """OpenAI's answer, with its citations and cost."""


class Reply:
    """One answer. Each event of the service makes some of the stream's; `object` is the answer so far: a
    message, if there is a text, and the tool calls.

    echoed: the fields of the request that are repeated in the answer.
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

    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        return answer_object(self._all, self._calls)

    def begin(self) -> Iterator[BaseModel]:
        """The first events."""
        now = self.object.model_copy()
        yield self._event(openai.ResponseCreatedEvent, response=now)
        yield self._event(openai.ResponseInProgressEvent, response=now)

    def add(self, event: Event) -> Iterator[BaseModel]:
        """The stream's events that follow from one of the service."""
        match event:
            case Delta(_, text, _, calls):
                if text:
                    yield from self._write(text)
                for call in calls:
                    yield from self._end_message()
                    yield from self._call(call)
            case Ended(_, finish):
                self._finish = finish
                if not self.object.output:
                    yield from self._begin_message()
                yield from self._end_message()
            case Done() as done:
                yield self._complete(done)

    def failed(self, message: str) -> BaseModel:
        """The last event where the answer fails."""
        self.object.status = "failed"
        self.object.error = openai.ResponseError(code="server_error", message=message)
        return self._event(openai.ResponseFailedEvent, response=self.object)

    def _write(self, text: str) -> Iterator[BaseModel]:
        yield from self._begin_message()
        self._text += text
        self._all += text
        yield self._of_message(openai.ResponseTextDeltaEvent, delta=text, logprobs=[])

    def _begin_message(self) -> Iterator[BaseModel]:
        if self._message is not None:
            return
        self._message, self._text = new_id("msg"), ""
        item = self._item([], "in_progress")
        yield self._event(openai.ResponseOutputItemAddedEvent, item=item, output_index=self._index)
        yield self._of_message(openai.ResponseContentPartAddedEvent, part=_part(""))

    def _end_message(self) -> Iterator[BaseModel]:
        if self._message is None:
            return
        part = _part(self._text)
        yield self._of_message(openai.ResponseTextDoneEvent, text=self._text, logprobs=[])
        yield self._of_message(openai.ResponseContentPartDoneEvent, part=part)
        yield self._done(self._item([part], "incomplete" if self._finish == "length" else "completed"))
        self._message = None

    def _call(self, call: ToolCall) -> Iterator[BaseModel]:
        self._calls.append(call)
        item = openai.ResponseFunctionToolCall(
            id=new_id("fc"),
            type="function_call",
            call_id=call.id,
            name=call.name,
            arguments="",
            status="in_progress",
        )
        index = self._index
        place: dict[str, Any] = {"item_id": item.id, "output_index": index}
        yield self._event(openai.ResponseOutputItemAddedEvent, item=item, output_index=index)
        yield self._event(openai.ResponseFunctionCallArgumentsDeltaEvent, delta=call.arguments, **place)
        yield self._event(openai.ResponseFunctionCallArgumentsDoneEvent, arguments=call.arguments, **place)
        yield self._done(item.model_copy(update={"arguments": call.arguments, "status": "completed"}))

    def _done(self, item: openai.ResponseOutputMessage | openai.ResponseFunctionToolCall) -> BaseModel:
        index = self._index
        self.object.output.append(item)
        return self._event(openai.ResponseOutputItemDoneEvent, item=item, output_index=index)

    def _complete(self, done: Done) -> BaseModel:
        self.object.usage = _usage(done.usage)
        if self._cite:
            for name, value in cost(done).items():
                setattr(self.object, name, value)
        if self._finish == "length":
            self.object.status = "incomplete"
            self.object.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return self._event(openai.ResponseIncompleteEvent, response=self.object)
        self.object.status = "completed"
        return self._event(openai.ResponseCompletedEvent, response=self.object)

    @property
    def _index(self) -> int:
        """Where in the output the item stands that is being written."""
        return len(self.object.output)

    def _item(self, content: list[Any], status: Any) -> openai.ResponseOutputMessage:
        return openai.ResponseOutputMessage(
            id=self._message or "", type="message", role="assistant", content=content, status=status
        )

    def _event(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        """The next event, under the next number; a kind has one `type`."""
        self._number += 1
        (name,) = get_args(kind.model_fields["type"].annotation)
        return kind(type=name, sequence_number=self._number - 1, **fields)

    def _of_message(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        place = {"item_id": self._message, "output_index": self._index, "content_index": 0}
        return self._event(kind, **fields, **place)


def _part(text: str) -> openai.ResponseOutputText:
    return openai.ResponseOutputText(type="output_text", text=text, annotations=[])


def _usage(own: Usage) -> openai.ResponseUsage:
    return openai.ResponseUsage(
        input_tokens=own.prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=own.cached, cache_write_tokens=0),
        output_tokens=own.completion,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
        total_tokens=own.prompt + own.completion,
    )


async def streamed(
    reply: Reply, events: Events, names: Mapping[str, str], keep: Callable[[], None]
) -> AsyncIterator[bytes | None]:
    """The stream: an error ends it with an event of its own. `keep` is called when the answer is whole."""
    for event in reply.begin():
        yield _sent(event)
    try:
        async for each in events.each(QUIET_S):
            if each is None:
                yield None
                continue
            for event in reply.add(each.event):
                yield _sent(event)
    except Exception as error:  # noqa: BLE001 - the status has been sent: the error goes into the stream
        yield _sent(reply.failed(refused(error, names).body.error.message))
    else:
        keep()


def _sent(event: BaseModel) -> bytes:
    return sse(event, event=event.type)  # type: ignore[attr-defined]  # all of them have it
