"""`/v1/messages`: Anthropic's form of a chat; its answer, and its stream of events. And how many tokens a
conversation has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.sse import format_sse_event
from pydantic import BaseModel

from offload_decode.common.files import parse
from offload_decode.server.http.answers import AppService, Cost, cost, new_id
from offload_decode.server.http.anthropic_body import (
    Conversation,
    MessagesBody,
    TextBlock,
    ToolUse,
    chat_request,
)
from offload_decode.server.http.blocks import BlockReply, Kind
from offload_decode.server.http.errors import ANTHROPIC_RESPONSES, MESSAGES, STREAMED, Refusal
from offload_decode.server.http.streaming import respond
from offload_decode.server.requests import (
    TEMPLATE_OPTIONS,
    Done,
    Emit,
    Prompted,
    ToolCall,
    Usage,
    WrongField,
)
from offload_decode.server.scheduler import Ticket
from offload_decode.server.service import ChatRequest, Service


class Thought(BaseModel):
    """What the model thought ahead of its answer; nothing is signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class Used(BaseModel):
    """Tokens. What was read from the store or the prefix cache is not among the `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(Cost):
    """Anthropic's answer, with its citations and cost."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | Thought | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: Used


class Counted(BaseModel):
    """Tokens of a request, stored ones included."""

    input_tokens: int


class StreamEvent(Cost, extra="allow"):
    """Of a stream: its type, and what events of this type have."""

    type: str


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter(tags=["answers"])

    @routes.post(MESSAGES, response_model=MessageAnswer, responses={**STREAMED, **ANTHROPIC_RESPONSES})
    async def answer(request: Request, service: AppService, body: MessagesBody) -> Response:
        """Answer a conversation in Anthropic's form: whole, or as a stream of events."""
        conversation = Conversation(body)
        asked = chat_request(service.settings, body, conversation)
        reply = MessageReply(body, conversation.warnings(service))
        return await respond(request, [partial(_begin, service, asked, reply)], reply, body.stream)

    @routes.post(f"{MESSAGES}/count_tokens", responses=ANTHROPIC_RESPONSES)
    def count(service: AppService, body: MessagesBody) -> Counted:
        """How many tokens a conversation has, with what is stored ahead of it: as `usage` of its answer."""
        conversation = Conversation(body)
        tools = conversation.tools["tools"] if conversation.tools["tool_choice"] != "none" else None
        ids = service.tokenize(body.model, messages=conversation.messages, tools=tools)
        stored = service.stored_tokens(chat_request(service.settings, body, conversation))
        return Counted(input_tokens=sum(stored) + len(stored) * len(ids))

    return routes


def _begin(service: Service, asked: ChatRequest, reply: MessageReply, emit: Emit) -> Ticket:
    """Agents say how much a model thinks with every request: where a store was made with another opening, it
    is answered as that has it.
    """
    try:
        return service.chat(asked, emit)
    except WrongField as error:
        if error.param != TEMPLATE_OPTIONS:
            raise
        reply.warnings.append(f"the model thinks as it does by default, because {error}")
        return service.chat(replace(asked, template_options={}), emit)


class MessageReply(BlockReply):
    """As a message of blocks. `warnings`: what is not done as it was asked for."""

    ping = format_sse_event(data_str='{"type": "ping"}', event="ping")

    def __init__(self, body: MessagesBody, warnings: list[str]):
        super().__init__()
        self._body, self.warnings = body, warnings
        self._message = MessageAnswer(
            id=new_id("msg"),
            type="message",
            role="assistant",
            model=body.model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=_used(Usage(0, 0)),
        )

    def failed(self, refusal: Refusal) -> BaseModel:
        return refusal.anthropic

    async def whole(self) -> BaseModel:
        return self._message

    def prompted(self, event: Prompted) -> Iterator[BaseModel]:
        self._message.usage = _used(event.usage)
        if self.warnings:
            self._message.warnings = self.warnings
        yield _event("message_start", message=self._message)

    def opened(self, kind: Kind) -> Iterator[BaseModel]:
        yield self._of_block("start", content_block=_block(kind, ""))

    def grown(self, kind: Kind, more: str) -> Iterator[BaseModel]:
        name = "thinking" if kind == "reasoning" else "text"
        yield self._of_block("delta", delta={"type": f"{name}_delta", name: more})

    def closed(self, kind: Kind, text: str) -> Iterator[BaseModel]:
        yield self._of_block("stop")
        self._message.content.append(_block(kind, text))

    def called(self, call: ToolCall) -> Iterator[BaseModel]:
        block = ToolUse(type="tool_use", id=call.id, name=call.name, input=parse(call.arguments))
        yield self._of_block("start", content_block=block.model_copy(update={"input": {}}))
        yield self._of_block("delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
        yield self._of_block("stop")
        self._message.content.append(block)

    def done(self, event: Done) -> Iterator[BaseModel]:
        ended = "end_turn" if self.stop is None else "stop_sequence"
        reasons = {"stop": ended, "length": "max_tokens", "tool_calls": "tool_use"}
        told = {"stop_reason": reasons[self.finish], "stop_sequence": self.stop}
        more = self.grounded | cost(self._body, event, self.warnings if event.notes else ())
        self._message = self._message.model_copy(update={**told, "usage": _used(event.usage), **more})
        yield _event("message_delta", delta=told, usage=self._message.usage, **more)
        yield _event("message_stop")

    def _of_block(self, what: str, **fields: Any) -> BaseModel:
        return _event(f"content_block_{what}", index=len(self._message.content), **fields)


def _event(type: str, **fields: Any) -> BaseModel:
    return StreamEvent.model_validate({"type": type, **fields})


def _block(kind: Kind, text: str) -> TextBlock | Thought:
    if kind == "reasoning":
        return Thought(type="thinking", thinking=text, signature="")
    return TextBlock(type="text", text=text)


def _used(usage: Usage) -> Used:
    return Used(
        input_tokens=usage.prompt - usage.cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=usage.cached,
        output_tokens=usage.completion,
    )
