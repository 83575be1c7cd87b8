"""`/v1/chat/completions`: the next message of a conversation."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as Part
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as PartLogprobs
from pydantic import Field, StringConstraints

from offload_decode.server.http import answers
from offload_decode.server.http.answers import (
    DONE,
    MOST_TOKENS,
    QUIET_S,
    Answered,
    Body,
    Cited,
    Events,
    Pieces,
    RequestMessage,
    Stream,
    data,
    json_of,
    of_chat,
    pieces_of,
    service_of,
)
from offload_decode.server.http.errors import RESPONSES, known_names
from offload_decode.server.requests import MOST_TOP, Delta, Done, Ended, Prompted, WrongField
from offload_decode.server.service import ChatAsked
from offload_decode.server.tool_calls import as_sent
from offload_decode.types import StepStats

MOST_MESSAGES = 4096
MOST_TOOLS = 128


class TextPart(Body):
    """A part of a message: text, the only kind that the models here read."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """The name of a tool, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a conversation. `content` may be left out where an assistant calls tools."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class PlainText(Body):
    """No format at all."""

    type: Literal["text"]


class AnyObject(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class Schema(Body):
    """A JSON schema, with a name."""

    name: str = ""
    json_schema: dict[str, Any] = Field(alias="schema")


class OfSchema(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: Schema


Format = Annotated[PlainText | AnyObject | OfSchema, Field(discriminator="type")]


class Function(Body):
    """What a tool is called, what it does and, as a JSON schema, what it takes."""

    name: Annotated[str, StringConstraints(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(RequestMessage):
    """What is asked of `/v1/chat/completions`."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    response_format: Format | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None


class ChatAnswer(ChatCompletion):
    """OpenAI's, with what was asked for by `citations`: what the answer attended to, and what it cost."""

    citations: Cited | None = None
    stats: StepStats | None = None


class ChatChunk(ChatCompletionChunk):
    """A part of a `ChatAnswer`."""

    citations: Cited | None = None
    stats: StepStats | None = None


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes = APIRouter(tags=["answers"])

    @routes.post(
        "/v1/chat/completions",
        response_model=ChatAnswer,
        responses={200: {"content": {"text/event-stream": {}}}, **RESPONSES},
    )
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation: whole, or as a stream of chunks."""
        asked = asked_by(request, body)
        starts = [partial(service_of(request).chat, asked)]
        pieces = pieces_of(request, body.model)
        if body.stream:
            events = await answers.started(request, starts)
            chunks = _chunks(body, asked.id, events, pieces)
            return Stream(events, chunks, known_names(service_of(request)))
        (answered,) = await answers.whole(request, starts)
        return json_of(await _answer(body, asked.id, answered, pieces))

    return routes


def asked_by(request: Request, body: ChatBody) -> ChatAsked:
    """The request as the service takes it."""
    settings = service_of(request).settings
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise WrongField("top_logprobs needs logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    chosen = body.tool_choice
    return ChatAsked(
        id=answers.new_id("chatcmpl"),
        model=body.model,
        messages=plain(body.messages),
        generation=body.generation(settings, most, top, _grammar(body.response_format)),
        tools=None if body.tools is None else [tool.model_dump(exclude_unset=True) for tool in body.tools],
        tool_choice=chosen.model_dump() if isinstance(chosen, NamedTool) else chosen,
        n=body.answers,
        selector=body.selector,
        options=body.options,
        deadline_s=body.deadline,
        cite=body.citations,
    )


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the service takes them: what a client left out is not there."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def _grammar(form: Format | None) -> dict[str, Any] | None:
    match form:
        case OfSchema(json_schema=named):
            return {"json_schema": named.json_schema}
        case AnyObject():
            return {"json_object": True}
    return None


async def _answer(body: ChatBody, id: str, answered: Answered, pieces: Pieces) -> ChatAnswer:
    choices = []
    for index, one in sorted(answered.written.items()):
        known = ChoiceLogprobs(content=await of_chat(one.tokens, pieces)) if body.logprobs else None
        message = ChatCompletionMessage(role="assistant", content=one.text, refusal=None)
        if one.calls:
            message.content = one.text or None
            calls = map(ChatCompletionMessageFunctionToolCall.model_validate, map(as_sent, one.calls))
            message.tool_calls = list(calls)
        choices.append(Choice(index=index, message=message, finish_reason=one.finish, logprobs=known))
    return ChatAnswer(
        id=id,
        object="chat.completion",
        created=answers.now(),
        model=body.model,
        choices=choices,
        usage=answers.usage_of([answered.done]),
        **answers.cost(answered.done) if body.citations else {},
    )


async def _chunks(body: ChatBody, id: str, events: Events, pieces: Pieces) -> AsyncIterator[bytes | None]:
    empty: dict[str, Any] = {"usage": None} if body.tells_usage else {}
    chunk = partial(
        ChatChunk, id=id, object="chat.completion.chunk", created=answers.now(), model=body.model, **empty
    )
    called: Counter[int] = Counter()
    async for told in events.each(QUIET_S):
        match told and told.event:
            case None:
                yield None
            case Prompted():
                for index in range(body.answers):
                    opening = ChoiceDelta(role="assistant", content="")
                    yield data(chunk(choices=[Part(index=index, delta=opening, finish_reason=None)]))
            case Delta(index, text, tokens, calls) if text or calls or (body.logprobs and tokens):
                known = PartLogprobs(content=await of_chat(tokens, pieces)) if body.logprobs else None
                more = ChoiceDelta(content=text)
                if calls:
                    more.tool_calls = [
                        ChoiceDeltaToolCall.model_validate({"index": number, **as_sent(call)})
                        for number, call in enumerate(calls, called[index])
                    ]
                    called[index] += len(calls)
                yield data(chunk(choices=[Part(index=index, delta=more, finish_reason=None, logprobs=known)]))
            case Ended(index, finish):
                yield data(chunk(choices=[Part(index=index, delta=ChoiceDelta(), finish_reason=finish)]))
            case Done() as done:
                last: dict[str, Any] = answers.cost(done) if body.citations else {}
                if body.tells_usage:
                    last["usage"] = answers.usage_of([done])
                if last:
                    yield data(chunk(choices=[], **last))
    yield DONE
