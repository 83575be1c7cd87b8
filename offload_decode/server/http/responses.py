"""`/v1/responses`: OpenAI's newer form of a chat, translated to `/v1/chat/completions` and back."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field, StringConstraints

from offload_decode.server.http.answers import MOST_TOKENS, AskBody, Body, json_of, read, service_of, started
from offload_decode.server.http.chat import (
    MOST_MESSAGES,
    MOST_TOOLS,
    AnyObject,
    ChatBody,
    NamedFunction,
    PlainText,
    chat_request,
)
from offload_decode.server.http.errors import STREAMED, known_names
from offload_decode.server.http.response_events import Reply, ReplyObject, streamed
from offload_decode.server.http.streaming import Stream
from offload_decode.server.prefix_cache import RecentlyUsed
from offload_decode.server.requests import WrongField

MOST_BYTES = 64 << 20
"""Of the conversations that clients may continue by the id of a response."""
Conversations = RecentlyUsed[str, str]
"""Messages, as JSON, by the id of the response that ends them."""


class ContentPart(Body):
    """A part of a message: text, the only kind that the models here read."""

    type: Literal["input_text", "output_text", "text"]
    text: str


Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class Item(Body):
    """A message, a call that the model made, or what came of one. Reasoning is passed over."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


class NamedSchema(Body):
    """JSON of a schema, which stands beside its type here."""

    type: Literal["json_schema"]
    name: str = ""
    json_schema: dict[str, Any] = Field(alias="schema")


class TextConfig(Body):
    """What the text of the answer must be."""

    format: Annotated[PlainText | AnyObject | NamedSchema, Field(discriminator="type")] | None = None


class FlatTool(Body):
    """A function that the model may call; its name stands beside its type here."""

    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class FlatNamedTool(NamedFunction):
    """The tool that must be called."""

    type: Literal["function"]


class ResponsesBody(AskBody):
    """What is asked of `/v1/responses`."""

    input: str | Annotated[list[Item], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: Annotated[str, StringConstraints(max_length=128)] | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    text: TextConfig | None = None
    tools: list[FlatTool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | FlatNamedTool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16)


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes, conversations = APIRouter(tags=["answers"]), Conversations(MOST_BYTES, len)

    @routes.post("/v1/responses", response_model=ReplyObject, responses=STREAMED)
    async def respond(request: Request, body: ResponsesBody) -> Response:
        """Answer a conversation: whole, or as a stream of events."""
        messages = [*_before(body, conversations), *_messages(body)]
        if not 0 < len(messages) <= MOST_MESSAGES:
            limits = f"must be 1 to {MOST_MESSAGES:,} messages: here are {len(messages):,}"
            raise WrongField(f"input, with what was said before, {limits}", "input")
        asked = chat_request(service_of(request).settings, _chat_body(body, messages))
        reply = Reply(_echoed(body), body.citations)

        def keep() -> None:
            if body.store is not False:
                conversations.keep(reply.id, json.dumps([*messages, reply.message()]))

        starts = [partial(service_of(request).chat, asked)]
        if body.stream:
            events = await started(request, starts)
            names = known_names(service_of(request))
            return Stream(events, streamed(reply, events, names, keep), names)
        await read(request, starts, lambda _, event: [*reply.add(event)])
        keep()
        return json_of(reply.object)

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


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    """What is new in this request, as messages of a chat."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}]
    return [message for number, item in enumerate(body.input) for message in _message(number, item)]


def _message(number: int, item: Item) -> Iterator[dict[str, Any]]:
    match item.type:
        case "message" if item.role is not None:
            yield {"role": item.role, "content": _text(item.content)}
        case "function_call" if item.name is not None and item.arguments is not None:
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id or "", "type": "function", "function": function}
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            yield {"role": "tool", "tool_call_id": item.call_id or "", "content": _text(item.output)}
        case "reasoning":
            pass
        case _:
            place = f"input[{number}]"
            raise WrongField(f"{place} is a {item.type} that lacks what makes one", place)


def _text(content: str | list[ContentPart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


def _chat_body(body: ResponsesBody, messages: Sequence[dict[str, Any]]) -> ChatBody:
    """The same request, of `/v1/chat/completions`. Instructions are of this turn alone, as OpenAI has it."""
    told = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    given: dict[str, Any] = body.model_dump(
        include={"model", "temperature", "top_p", "selector", "options", "deadline", "citations"}
    )
    form = None if body.text is None else body.text.format
    if isinstance(form, NamedSchema):
        given["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.json_schema},
        }
    elif form is not None:
        given["response_format"] = form.model_dump()
    if body.tools:
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, FlatNamedTool):
        given["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice.name}}
    else:
        given["tool_choice"] = body.tool_choice
    return ChatBody.model_validate(
        {"messages": [*told, *messages], "max_completion_tokens": body.max_output_tokens, **given}
    )


def _echoed(body: ResponsesBody) -> dict[str, Any]:
    """What an answer says of its request."""
    form = None if body.text is None or body.text.format is None else body.text.format
    return {
        "model": body.model,
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "max_output_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "metadata": body.metadata or {},
        "parallel_tool_calls": True,
        "tool_choice": body.tool_choice.model_dump()
        if isinstance(body.tool_choice, FlatNamedTool)
        else body.tool_choice or "auto",
        "tools": [{"strict": False, "parameters": None, **tool.model_dump()} for tool in body.tools or []],
        "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True)},
    }
