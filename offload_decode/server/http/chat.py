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

from offload_decode.server.http.answers import (
    MOST_TOKENS,
    MOST_TOP,
    AnswerBody,
    Body,
    Cost,
    Pieces,
    chat_logprobs,
    cost,
    json_of,
    new_id,
    now,
    pieces_of,
    service_of,
    started,
    usage_of,
    whole,
)
from offload_decode.server.http.errors import STREAMED, known_names
from offload_decode.server.http.streaming import DONE, QUIET_S, Events, Stream, sse
from offload_decode.server.messages import call_object
from offload_decode.server.requests import AnsweredRequest, Delta, Done, Ended, Prompted, Settings, WrongField
from offload_decode.server.service import ChatRequest

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


class ChatBody(AnswerBody):
    """What is asked of `/v1/chat/completions`."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    max_completion_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    response_format: Format | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None


class ChatAnswer(ChatCompletion, Cost):
    """OpenAI's answer, with its citations and cost."""


class ChatChunk(ChatCompletionChunk, Cost):
    """A part of a `ChatAnswer`."""


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes = APIRouter(tags=["answers"])

    @routes.post("/v1/chat/completions", response_model=ChatAnswer, responses=STREAMED)
    async def chat(request: Request, body: ChatBody) -> Response:
        """Answer a conversation: whole, or as a stream of chunks."""
        asked = chat_request(service_of(request).settings, body)
        starts = [partial(service_of(request).chat, asked)]
        pieces = pieces_of(request, body.model)
        if body.stream:
            events = await started(request, starts)
            chunks = _chunks(body, asked.id, events, pieces)
            return Stream(events, chunks, known_names(service_of(request)))
        (answered,) = await whole(request, starts)
        return json_of(await _answer(body, asked.id, answered, pieces))

    return routes


def chat_request(settings: Settings, body: ChatBody) -> ChatRequest:
    """The request as the service takes it."""
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise WrongField("top_logprobs needs logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    chosen = body.tool_choice
    return ChatRequest(
        **body.asked(settings, new_id("chatcmpl"), most, top, _grammar(body.response_format)),
        messages=plain(body.messages),
        tools=None if body.tools is None else [tool.model_dump(exclude_unset=True) for tool in body.tools],
        tool_choice=chosen.model_dump() if isinstance(chosen, NamedTool) else chosen,
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


async def _answer(body: ChatBody, id: str, answered: AnsweredRequest, pieces: Pieces) -> ChatAnswer:
    choices = []
    for index, one in sorted(answered.answers.items()):
        known = ChoiceLogprobs(content=await chat_logprobs(one.tokens, pieces)) if body.logprobs else None
        message = ChatCompletionMessage(role="assistant", content=one.text, refusal=None)
        if one.calls:
            message.content = one.text or None
            message.tool_calls = [
                ChatCompletionMessageFunctionToolCall.model_validate(call_object(call)) for call in one.calls
            ]
        choices.append(Choice(index=index, message=message, finish_reason=one.finish, logprobs=known))
    return ChatAnswer(
        id=id,
        object="chat.completion",
        created=now(),
        model=body.model,
        choices=choices,
        usage=usage_of([answered.done]),
        **cost(answered.done) if body.citations else {},
    )


async def _chunks(body: ChatBody, id: str, events: Events, pieces: Pieces) -> AsyncIterator[bytes | None]:
    chunk = body.chunk(partial(ChatChunk, object="chat.completion.chunk"), id)

    def part(index: int, delta: ChoiceDelta, finish: Any = None, **logprobs: Any) -> bytes:
        return sse(chunk(choices=[Part(index=index, delta=delta, finish_reason=finish, **logprobs)]))

    n_calls: Counter[int] = Counter()  # of each answer so far
    async for event in events.each(QUIET_S):
        match event and event.event:
            case None:
                yield None
            case Prompted():
                for index in range(body.answers):
                    yield part(index, ChoiceDelta(role="assistant", content=""))
            case Delta(index, text, tokens, calls) if text or calls or (body.logprobs and tokens):
                known = PartLogprobs(content=await chat_logprobs(tokens, pieces)) if body.logprobs else None
                delta = ChoiceDelta(content=text)
                if calls:
                    delta.tool_calls = [
                        ChoiceDeltaToolCall.model_validate({"index": number, **call_object(call)})
                        for number, call in enumerate(calls, n_calls[index])
                    ]
                    n_calls[index] += len(calls)
                yield part(index, delta, logprobs=known)
            case Ended(index, finish):
                yield part(index, ChoiceDelta(), finish)
            case Done() as done:
                if last := body.last_fields([done]):
                    yield sse(chunk(choices=[], **last))
    yield DONE
