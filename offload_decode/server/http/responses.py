"""`/v1/responses`: OpenAI's newer form of a chat; and its answer as it grows, and its stream of events, in
openai's own types.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from openai.types import responses as openai
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Content as Thought
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, Field, StringConstraints, Tag

from offload_decode.server.http.answers import (
    MOST_TOKENS,
    AppService,
    AskBody,
    Body,
    Cost,
    Other,
    OtherKind,
    by_type,
    cost,
    make,
    new_id,
)
from offload_decode.server.http.blocks import BlockReply, Kind
from offload_decode.server.http.chat import (
    MOST_MESSAGES,
    SYSTEM,
    Effort,
    Format,
    RefusalPart,
    json_grammar,
    template_options,
    warned,
)
from offload_decode.server.http.errors import STREAMED, Refusal
from offload_decode.server.http.streaming import respond
from offload_decode.server.http.tools import MOST_TOOLS, Function, ToolChoice, tools_asked
from offload_decode.server.messages import answer_object, call_object
from offload_decode.server.prefix_cache import RecentlyUsed
from offload_decode.server.requests import Done, Settings, ToolCall, WrongField
from offload_decode.server.service import ChatRequest

MOST_BYTES = 64 << 20
"""Of the conversations that clients may continue by the id of a response."""
Conversations = RecentlyUsed[str, str]
"""Messages, as JSON, by the id of the response that ends them."""


class ContentPart(Body):
    """A part of a message: text, the only kind that the models here read."""

    type: Literal["input_text", "output_text", "text"]
    text: str


AnyPart = Annotated[
    Annotated[RefusalPart, Tag("listed")] | Annotated[ContentPart, Tag("rest")], by_type("refusal")
]
Content = str | Annotated[list[AnyPart], Field(fail_fast=True)]


class Item(Body):
    """A message, a call that the model made, or what came of one. Items of other types are passed over."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class Reasoning(Body):
    """How much the model thinks before it answers."""

    effort: Effort | None = None


class TextConfig(Body):
    """What the text of the answer must be."""

    format: Format | None = None


class FlatTool(Function):
    """A function that the model may call; its name stands beside its type here."""

    type: Literal["function"]


AnyItem = Annotated[
    Annotated[Item, Tag("listed")] | Other,
    by_type(None, "message", "function_call", "function_call_output"),
]
AnyTool = Annotated[Annotated[FlatTool, Tag("listed")] | Other, by_type("function")]


class ResponsesBody(AskBody):
    """What is asked of `/v1/responses`."""

    input: str | Annotated[list[AnyItem], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=-1, le=MOST_TOKENS)
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)


class ResponseObject(openai.Response, Cost):
    """OpenAI's answer, with its citations and cost."""


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes, conversations = APIRouter(tags=["answers"]), Conversations(MOST_BYTES, len)

    @routes.post("/v1/responses", response_model=ResponseObject, responses=STREAMED)
    async def respond_to(request: Request, service: AppService, body: ResponsesBody) -> Response:
        """Answer a conversation: whole, or as a stream of events."""
        messages = [*_before(body, conversations), *_messages(body)]
        if not 0 < len(messages) <= MOST_MESSAGES:
            limits = f"must be 1 to {MOST_MESSAGES:,} messages: here are {len(messages):,}"
            raise WrongField(f"input, with what was said before, {limits}", "input")

        def keep(id: str, answer: dict[str, Any]) -> None:
            if body.store is not False:
                conversations.keep(id, json.dumps([*messages, answer]))

        asked = _chat_request(service.settings, body, messages)
        system = any(message["role"] in SYSTEM for message in asked.messages)
        reply = ResponseReply(body, asked, keep, warned(service, body) if system else [])
        return await respond(request, [partial(service.chat, asked)], reply, body.stream)

    return routes


def _before(body: ResponsesBody, conversations: Conversations) -> list[dict[str, Any]]:
    if body.previous_response_id is None:
        return []
    found = conversations.find(body.previous_response_id)
    if found is None:
        message = f"{body.previous_response_id!r} is not remembered: send the whole conversation"
        raise WrongField(message, "previous_response_id")
    messages: list[dict[str, Any]] = json.loads(found)
    return messages


def _messages(body: ResponsesBody) -> Iterator[dict[str, Any]]:
    """What is new in this request, as messages of a chat."""
    items = [Item(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for number, item in enumerate(items):
        if isinstance(item, OtherKind):
            continue
        match item.type:
            case "message" if item.role is not None:
                yield {"role": item.role, "content": _text(item.content)}
            case "function_call" if item.name is not None and item.arguments is not None:
                call = call_object(ToolCall(item.call_id or "", item.name, item.arguments))
                yield {"role": "assistant", "content": None, "tool_calls": [call]}
            case "function_call_output":
                yield {"role": "tool", "tool_call_id": item.call_id or "", "content": _text(item.output)}
            case _:
                place = f"input[{number}]"
                raise WrongField(f"{place} is a {item.type} that lacks what makes one", place)


def _text(content: Content | None) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, ContentPart) else part.refusal for part in content or [])


def _functions(body: ResponsesBody) -> list[FlatTool]:
    return [tool for tool in body.tools or () if isinstance(tool, FlatTool)]


def _chat_request(settings: Settings, body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatRequest:
    """The same, of a chat. Instructions are of this turn alone, as OpenAI has it."""
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    form, field = None if body.text is None else body.text.format, "text.format"
    how = {"grammar": json_grammar(form, field), "grammar_field": field}
    return ChatRequest(
        **body.ask_options(settings, new_id("chatcmpl"), max_tokens=body.max_output_tokens, **how),
        messages=[*system, *messages],
        **tools_asked(_functions(body), body.tool_choice),
        parallel_calls=body.parallel_tool_calls is not False,
        template_options=template_options(None if body.reasoning is None else body.reasoning.effort),
        separate_reasoning=True,
    )


def _echoed(body: ResponsesBody, asked: ChatRequest) -> dict[str, Any]:
    """What an answer says of its request."""
    chosen: Any = asked.tool_choice or "auto"
    if not isinstance(chosen, str):
        chosen = {"type": "function", "name": chosen["function"]["name"]}
    names = {"model", "instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p"}
    form = None if body.text is None else body.text.format
    return {
        **body.model_dump(include=names),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": chosen,
        "tools": [{"strict": False, "parameters": None, **tool.model_dump()} for tool in _functions(body)],
        "text": {"format": _echoed_format(form)},
    }


def _echoed_format(form: Format | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {"type": form.type, "name": form.name, "schema": form.schema_given}


class ResponseReply(BlockReply):
    """As the model's reasoning, a message and the tool calls, each an item of the output. `keep` takes the id
    of the response and, as a chat's message, the whole answer.
    """

    def __init__(
        self,
        body: ResponsesBody,
        asked: ChatRequest,
        keep: Callable[[str, dict[str, Any]], None],
        warnings: list[str],
    ):
        super().__init__()
        self._body, self._keep, self._warnings = body, keep, warnings
        self._number = 0
        self._id = ""  # of the item that is being written
        self._calls: list[ToolCall] = []
        self._object = ResponseObject(
            id=new_id("resp"),
            object="response",
            created_at=time.time(),
            status="in_progress",
            error=None,
            incomplete_details=None,
            output=[],
            usage=None,
            **_echoed(body, asked),
        )
        if warnings:
            self._object.warnings = warnings

    def begin(self) -> Iterator[BaseModel]:
        now = self._object.model_copy()
        yield self._event(openai.ResponseCreatedEvent, response=now)
        yield self._event(openai.ResponseInProgressEvent, response=now)

    async def whole(self) -> BaseModel:
        return self._object

    def failed(self, refusal: Refusal) -> BaseModel:
        self._object.status = "failed"
        self._object.error = openai.ResponseError(code="server_error", message=refusal.error.error.message)
        return self._event(openai.ResponseFailedEvent, response=self._object)

    def opened(self, kind: Kind) -> Iterator[BaseModel]:
        if kind == "reasoning":
            self._id = new_id("rs")
            yield self._added(self._thought([], "in_progress"))
        else:
            self._id = new_id("msg")
            yield self._added(self._message([], "in_progress"))
            yield self._of_item(openai.ResponseContentPartAddedEvent, part=_part(""))

    def grown(self, kind: Kind, more: str) -> Iterator[BaseModel]:
        if kind == "reasoning":
            yield self._of_item(openai.ResponseReasoningTextDeltaEvent, delta=more)
        else:
            yield self._of_item(openai.ResponseTextDeltaEvent, delta=more, logprobs=[])

    def closed(self, kind: Kind, text: str) -> Iterator[BaseModel]:
        if kind == "reasoning":
            yield self._of_item(openai.ResponseReasoningTextDoneEvent, text=text)
            yield self._done(self._thought([Thought(type="reasoning_text", text=text)], "completed"))
        else:
            yield self._of_item(openai.ResponseTextDoneEvent, text=text, logprobs=[])
            yield self._of_item(openai.ResponseContentPartDoneEvent, part=_part(text))
            status = "incomplete" if self.finish == "length" else "completed"
            yield self._done(self._message([_part(text)], status))

    def called(self, call: ToolCall) -> Iterator[BaseModel]:
        self._calls.append(call)
        self._id = new_id("fc")
        item = make(
            openai.ResponseFunctionToolCall,
            "type",
            id=self._id,
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        place = {"item_id": self._id, "output_index": self._index}
        yield self._added(item.model_copy(update={"arguments": "", "status": "in_progress"}))
        yield self._event(openai.ResponseFunctionCallArgumentsDeltaEvent, delta=call.arguments, **place)
        yield self._event(openai.ResponseFunctionCallArgumentsDoneEvent, arguments=call.arguments, **place)
        yield self._done(item)

    def done(self, event: Done) -> Iterator[BaseModel]:
        used = event.usage
        self._object.usage = openai.ResponseUsage(
            input_tokens=used.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=used.cached, cache_write_tokens=0),
            output_tokens=used.completion,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=used.prompt + used.completion,
        )
        for name, value in (self.grounded | cost(self._body, event, self._warnings)).items():
            setattr(self._object, name, value)
        self._keep(self._object.id, answer_object(self._object.output_text, self._calls))
        if self.finish == "length":
            self._object.status = "incomplete"
            self._object.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            yield self._event(openai.ResponseIncompleteEvent, response=self._object)
        else:
            self._object.status = "completed"
            yield self._event(openai.ResponseCompletedEvent, response=self._object)

    @property
    def _index(self) -> int:
        """Where in the output the item stands that is being written."""
        return len(self._object.output)

    def _thought(self, content: list[Thought], status: Any) -> openai.ResponseReasoningItem:
        return openai.ResponseReasoningItem(
            id=self._id, type="reasoning", summary=[], content=content, status=status
        )

    def _message(self, content: list[Any], status: Any) -> openai.ResponseOutputMessage:
        return openai.ResponseOutputMessage(
            id=self._id, type="message", role="assistant", content=content, status=status
        )

    def _added(self, item: openai.ResponseOutputItem) -> BaseModel:
        return self._event(openai.ResponseOutputItemAddedEvent, item=item, output_index=self._index)

    def _done(self, item: openai.ResponseOutputItem) -> BaseModel:
        self._object.output.append(item)
        return self._event(openai.ResponseOutputItemDoneEvent, item=item, output_index=self._index - 1)

    def _event(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        """The next event, under the next number."""
        self._number += 1
        return make(kind, "type", sequence_number=self._number - 1, **fields)

    def _of_item(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        place = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return self._event(kind, **fields, **place)


def _part(text: str) -> openai.ResponseOutputText:
    return openai.ResponseOutputText(type="output_text", text=text, annotations=[])
