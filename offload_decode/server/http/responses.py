"""`/v1/responses`: OpenAI's newer form of a chat; and its answer as it grows, and its stream of events, in
openai's own types.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from openai.types import responses as openai
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_reasoning_item import Content as Thought
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import BaseModel, Field, StringConstraints, Tag, model_validator

from offload_decode.server.http.answers import (
    MOST_TOKENS,
    AppService,
    AskBody,
    Body,
    Cost,
    Short,
    by_type,
    cost,
    log_once,
    make,
    new_id,
)
from offload_decode.server.http.chat import (
    MOST_MESSAGES,
    MOST_TOOLS,
    SYSTEM,
    Effort,
    Format,
    Function,
    RefusalPart,
    json_grammar,
    template_options,
    warned,
)
from offload_decode.server.http.errors import STREAMED, Refusal
from offload_decode.server.http.streaming import Reply, respond
from offload_decode.server.messages import answer_object, call_object
from offload_decode.server.prefix_cache import RecentlyUsed
from offload_decode.server.requests import Delta, Done, Ended, Event, Settings, ToolCall, WrongField
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


class OtherKind(BaseModel):
    """A tool or an item of a type that is not read here, such as `web_search`. It is passed over."""

    type: Short

    @model_validator(mode="after")
    def _log(self) -> OtherKind:
        log_once(
            f"a {self.type:.80}",
            "tools and items of the type %.80r are not known here, and are passed over",
            self.type,
        )
        return self


Other = Annotated[OtherKind, Tag("rest")]
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
    tool_choice: Literal["none", "auto", "required"] | openai.ToolChoiceFunctionParam | None = None
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
        reply = ResponseReply(body, keep, warned(service, body.model) if system else {})
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
    form = None if body.text is None else body.text.format
    grammar = json_grammar(form, "text.format")
    functions = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in _functions(body)]
    chosen: Any = body.tool_choice
    if isinstance(chosen, dict):
        chosen = {"type": "function", "function": {"name": chosen["name"]}}
    return ChatRequest(
        **body.ask_options(settings, new_id("chatcmpl"), max_tokens=body.max_output_tokens, grammar=grammar),
        messages=[*system, *messages],
        tools=[{"type": "function", "function": function} for function in functions] or None,
        tool_choice=chosen,
        parallel_calls=body.parallel_tool_calls is not False,
        template_options=template_options(None if body.reasoning is None else body.reasoning.effort),
        separate_reasoning=True,
    )


def _echoed(body: ResponsesBody) -> dict[str, Any]:
    """What an answer says of its request."""
    names = {"model", "instructions", "previous_response_id", "max_output_tokens", "temperature", "top_p"}
    form = None if body.text is None else body.text.format
    return {
        **body.model_dump(include=names),
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"strict": False, "parameters": None, **tool.model_dump()} for tool in _functions(body)],
        "text": {"format": _echoed_format(form)},
    }


def _echoed_format(form: Format | None) -> dict[str, Any]:
    if form is None or form.type != "json_schema":
        return {"type": "text" if form is None else form.type}
    return {"type": form.type, "name": form.name, "schema": form.schema_given}


class ResponseReply(Reply):
    """As the model's reasoning, a message, if there is a text, and the tool calls. Each event of the
    service makes some of the stream's. `keep` takes the id of the response
    and, as a chat's message, the whole answer.
    """

    def __init__(
        self, body: ResponsesBody, keep: Callable[[str, dict[str, Any]], None], warnings: dict[str, Any]
    ):
        self._body, self._keep = body, keep
        self._number = 0
        self._message: str | None = None  # the id of the message that is being written
        self._thought: str | None = None  # of the reasoning ahead of it
        self._text = ""
        self._calls: list[ToolCall] = []
        self._finish = "stop"
        self._object = ResponseObject(
            id=new_id("resp"),
            object="response",
            created_at=time.time(),
            status="in_progress",
            error=None,
            incomplete_details=None,
            output=[],
            usage=None,
            **_echoed(body),
            **warnings,
        )

    def begin(self) -> Iterator[BaseModel]:
        now = self._object.model_copy()
        yield self._event(openai.ResponseCreatedEvent, response=now)
        yield self._event(openai.ResponseInProgressEvent, response=now)

    def collect(self, part: int, event: Event) -> None:
        list(self._add(event))

    async def chunks(self, part: int, event: Event) -> AsyncIterator[BaseModel]:
        for one in self._add(event):
            yield one

    async def whole(self) -> BaseModel:
        return self._object

    def failed(self, refusal: Refusal) -> BaseModel:
        self._object.status = "failed"
        self._object.error = openai.ResponseError(code="server_error", message=refusal.error.error.message)
        return self._event(openai.ResponseFailedEvent, response=self._object)

    def _add(self, event: Event) -> Iterator[BaseModel]:
        match event:
            case Delta(_, text, _, calls, thought):
                if thought:
                    yield from self._think(thought)
                if text or calls:
                    yield from self._end_thought()
                if text:
                    yield from self._begin_message()
                    self._text += text
                    yield self._of_message(openai.ResponseTextDeltaEvent, delta=text, logprobs=[])
                for call in calls:
                    yield from self._end_message()
                    yield from self._call(call)
            case Ended(_, finish):
                self._finish = finish
                yield from self._end_thought()
                if not self._object.output:
                    yield from self._begin_message()
                yield from self._end_message()
            case Done() as done:
                yield self._complete(done)

    def _think(self, text: str) -> Iterator[BaseModel]:
        if self._thought is None:
            self._thought, self._text = new_id("rs"), ""
            item = openai.ResponseReasoningItem(
                id=self._thought, type="reasoning", summary=[], status="in_progress"
            )
            yield self._event(openai.ResponseOutputItemAddedEvent, item=item, output_index=self._index)
        self._text += text
        yield self._of_thought(openai.ResponseReasoningTextDeltaEvent, delta=text)

    def _end_thought(self) -> Iterator[BaseModel]:
        if self._thought is not None:
            yield self._of_thought(openai.ResponseReasoningTextDoneEvent, text=self._text)
            content = Thought(type="reasoning_text", text=self._text)
            yield self._done(
                openai.ResponseReasoningItem(
                    id=self._thought, type="reasoning", summary=[], content=[content], status="completed"
                )
            )
            self._thought = None

    def _begin_message(self) -> Iterator[BaseModel]:
        if self._message is None:
            self._message, self._text = new_id("msg"), ""
            item = self._item([], "in_progress")
            yield self._event(openai.ResponseOutputItemAddedEvent, item=item, output_index=self._index)
            yield self._of_message(openai.ResponseContentPartAddedEvent, part=self._part())

    def _end_message(self) -> Iterator[BaseModel]:
        if self._message is not None:
            yield self._of_message(openai.ResponseTextDoneEvent, text=self._text, logprobs=[])
            yield self._of_message(openai.ResponseContentPartDoneEvent, part=self._part())
            yield self._done(
                self._item([self._part()], "incomplete" if self._finish == "length" else "completed")
            )
            self._message = None

    def _call(self, call: ToolCall) -> Iterator[BaseModel]:
        self._calls.append(call)
        item = make(
            openai.ResponseFunctionToolCall,
            "type",
            id=new_id("fc"),
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )
        begun = item.model_copy(update={"arguments": "", "status": "in_progress"})
        place = {"item_id": item.id, "output_index": self._index}
        yield self._event(openai.ResponseOutputItemAddedEvent, item=begun, output_index=self._index)
        yield self._event(openai.ResponseFunctionCallArgumentsDeltaEvent, delta=call.arguments, **place)
        yield self._event(openai.ResponseFunctionCallArgumentsDoneEvent, arguments=call.arguments, **place)
        yield self._done(item)

    def _done(self, item: openai.ResponseOutputItem) -> BaseModel:
        self._object.output.append(item)
        return self._event(openai.ResponseOutputItemDoneEvent, item=item, output_index=self._index - 1)

    def _complete(self, done: Done) -> BaseModel:
        used = done.usage
        self._object.usage = openai.ResponseUsage(
            input_tokens=used.prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=used.cached, cache_write_tokens=0),
            output_tokens=used.completion,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=used.prompt + used.completion,
        )
        for name, value in cost(self._body, done).items():
            setattr(self._object, name, value)
        self._keep(self._object.id, answer_object(self._object.output_text, self._calls))
        if self._finish == "length":
            self._object.status = "incomplete"
            self._object.incomplete_details = IncompleteDetails(reason="max_output_tokens")
            return self._event(openai.ResponseIncompleteEvent, response=self._object)
        self._object.status = "completed"
        return self._event(openai.ResponseCompletedEvent, response=self._object)

    @property
    def _index(self) -> int:
        """Where in the output the item stands that is being written."""
        return len(self._object.output)

    def _item(self, content: list[Any], status: Any) -> openai.ResponseOutputMessage:
        return openai.ResponseOutputMessage(
            id=self._message or "", type="message", role="assistant", content=content, status=status
        )

    def _part(self) -> openai.ResponseOutputText:
        return openai.ResponseOutputText(type="output_text", text=self._text, annotations=[])

    def _event(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        """The next event, under the next number."""
        self._number += 1
        return make(kind, "type", sequence_number=self._number - 1, **fields)

    def _of_thought(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        place = {"item_id": self._thought, "output_index": self._index, "content_index": 0}
        return self._event(kind, **place, **fields)

    def _of_message(self, kind: type[BaseModel], **fields: Any) -> BaseModel:
        place = {"item_id": self._message, "output_index": self._index, "content_index": 0}
        return self._event(kind, **fields, **place)
