"""`/v1/chat/completions`: the next message of a conversation."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal
from unicodedata import normalize

from fastapi import APIRouter, Request, Response
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
)
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as Part
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaFunctionCall, ChoiceDeltaToolCall
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as PartLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from pydantic import BaseModel, Field, Tag

from offload_decode.server.http.answers import (
    MOST_TOKENS,
    MOST_TOP,
    AnswerBody,
    AnswerReply,
    AppService,
    AskBody,
    Body,
    Cost,
    Option,
    OptionName,
    by_type,
    finite,
    new_id,
)
from offload_decode.server.http.errors import STREAMED
from offload_decode.server.http.streaming import respond
from offload_decode.server.http.tools import (
    MOST_TOOLS,
    ByName,
    Function,
    NamedTool,
    Tool,
    ToolChoice,
    tools_asked,
)
from offload_decode.server.messages import answer_object, call_object
from offload_decode.server.requests import (
    Delta,
    Ended,
    Event,
    Finish,
    Prompted,
    Scored,
    Settings,
    WrittenAnswer,
    WrongField,
)
from offload_decode.server.service import ChatRequest, Service

MOST_MESSAGES = 4096
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SYSTEM = ("system", "developer")  # the roles of instructions
BEHIND = (
    "the system message stands behind the stored corpus, ahead of the user's: nothing can precede a corpus"
)
_BESIDE = {"name", "description", "strict", "schema"}  # what OpenAI has beside a schema


class TextPart(Body):
    """A part of a message: text, the only kind that the models here read."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant said in place of an answer."""

    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[
    Annotated[RefusalPart, Tag("listed")] | Annotated[TextPart, Tag("rest")], by_type("refusal")
]


class CalledFunction(Body):
    """The name of a tool, and its arguments, an object or the JSON of one; empty where there were none."""

    name: str
    arguments: str | dict[str, Any] | None


class ToolCall(Body):
    """A call that an assistant made."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a conversation. `content` may be left out by an assistant and by tools. `function_call`,
    and the role `function` of what came of it, are OpenAI's older form of calls.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, fail_fast=True)
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Format(Body):
    """No format at all, some JSON object, or JSON of a schema. The schema stands in `json_schema.schema`, as
    OpenAI has it, or where other servers have it: in `schema`, or itself in `json_schema`.
    """

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    json_schema: dict[str, Any] | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def schema_given(self) -> dict[str, Any] | None:
        """The schema, wherever it stands."""
        if self.schema_ is not None or self.json_schema is None:
            return self.schema_
        own = self.json_schema.get("schema")
        if isinstance(own, dict):
            return own
        return {key: value for key, value in self.json_schema.items() if key not in _BESIDE} or None


class ChatBody(AnswerBody):
    """What is asked of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=-1, le=MOST_TOKENS)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    response_format: Format | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: ToolChoice | None = None
    functions: list[Function] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    function_call: Literal["none", "auto"] | ByName | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[OptionName, Option] | None = Field(None, max_length=64)
    separate_reasoning: bool = True

    @property
    def older(self) -> bool:
        """Whether calls are asked for in OpenAI's older form, and told in it: one, as `function_call`."""
        return self.functions is not None and self.tools is None


class ChatAnswer(ChatCompletion, Cost):
    """OpenAI's answer, with its citations and cost."""


class ChatChunk(ChatCompletionChunk, Cost):
    """A part of a `ChatAnswer`."""


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes = APIRouter(tags=["answers"])

    @routes.post("/v1/chat/completions", response_model=ChatAnswer, responses=STREAMED)
    async def chat(request: Request, service: AppService, body: ChatBody) -> Response:
        """Answer a conversation: whole, or as a stream of chunks."""
        asked = chat_request(service.settings, body)
        reply = ChatReply(service, body, asked.id)
        return await respond(request, [partial(service.chat, asked)], reply, body.stream)

    return routes


def chat_request(settings: Settings, body: ChatBody) -> ChatRequest:
    """The request as the service takes it."""
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise WrongField("max_tokens: 0 leaves no room for an answer: give 1 or more", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise WrongField("top_logprobs needs logprobs: true", "top_logprobs")
    top = (body.top_logprobs or 0) if body.logprobs else None
    grammar = json_grammar(body.response_format)
    return ChatRequest(
        **body.ask_options(settings, new_id("chatcmpl"), max_tokens=most, top_logprobs=top, grammar=grammar),
        messages=plain(body.messages),
        **_tools(body),
        parallel_calls=body.parallel_tool_calls is not False and not body.older,
        template_options={**template_options(body.reasoning_effort), **(body.chat_template_kwargs or {})},
        separate_reasoning=body.separate_reasoning,
    )


def _tools(body: ChatBody) -> dict[str, Any]:
    if not body.older:
        return tools_asked([tool.function for tool in body.tools or ()], body.tool_choice)
    chosen = body.function_call
    if isinstance(chosen, ByName):
        return tools_asked(body.functions or (), NamedTool(type="function", name=chosen.name))
    return tools_asked(body.functions or (), chosen)


def template_options(effort: str | None) -> dict[str, Any]:
    """An effort as chat templates know it: some have a variable for it, some one that turns thinking off."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the service takes them: what a client left out is not there."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def json_grammar(form: Format | None, param: str = "response_format") -> dict[str, Any] | None:
    """A `response_format` as `Generation.grammar`. Raises `WrongField`."""
    if form is None:
        return None
    schema = form.schema_given
    if form.type == "text" and schema is not None:
        raise WrongField("a schema needs the type 'json_schema', not 'text'", param)
    if form.type == "json_schema" and schema is None:
        raise WrongField("there is no schema: give it as json_schema.schema", param)
    if schema is not None:
        return {"json_schema": schema}
    return {"json_object": True} if form.type == "json_object" else None


def warned(service: Service, body: AskBody) -> list[str]:
    """The `warnings` of an answer to a chat with a system message."""
    # A model's own name stands for the stores that answer together.
    asked = [body.model, *(body.together if isinstance(body.together, list) else ())]
    names = {normalize("NFC", name) for name in asked}
    stored = any(one.path for one in service.catalog.entries() if one.name in names)
    return [BEHIND] if stored else []


class ChatReply(AnswerReply):
    """As a message, which the model writes."""

    answer, part = ChatAnswer, ChatChunk

    def __init__(self, service: Service, body: ChatBody, id: str):
        super().__init__(service, body, id)
        self._answers, self._logprobs, self._older = body.answers, bool(body.logprobs), body.older
        self._n_calls: Counter[int] = Counter()  # of each answer so far
        system = any(message.role in SYSTEM for message in body.messages)
        self._warnings = warned(service, body) if system else []

    async def choice(self, part: int, index: int, one: WrittenAnswer) -> Choice:
        known = ChoiceLogprobs(content=await self._scores(one.tokens)) if self._logprobs else None
        written = {"refusal": None, **answer_object(one.text, () if self._older else one.calls)}
        if one.calls and not one.text:
            written["content"] = None
        if one.calls and self._older:
            written["function_call"] = call_object(one.calls[0])["function"]
        if one.reasoning:
            written["reasoning_content"] = one.reasoning
        message = ChatCompletionMessage.model_validate(written)
        return Choice(index=index, message=message, finish_reason=self._finish(one.finish), logprobs=known)

    async def choices(self, part: int, event: Event) -> AsyncIterator[Part]:
        match event:
            case Prompted():
                for index in range(self._answers):
                    delta = ChoiceDelta(role="assistant", content="")
                    yield Part(index=index, delta=delta, finish_reason=None)
            case Delta(index, text, tokens, calls, thought) if (
                text or calls or thought or (self._logprobs and tokens)
            ):
                known = PartLogprobs(content=await self._scores(tokens)) if self._logprobs else None
                delta = ChoiceDelta(content=None if thought and not text else text)
                if thought:
                    delta = ChoiceDelta.model_validate(
                        {**delta.model_dump(exclude_unset=True), "reasoning_content": thought}
                    )
                if calls and self._older:
                    if not self._n_calls[index]:
                        delta.function_call = ChoiceDeltaFunctionCall(**call_object(calls[0])["function"])
                elif calls:
                    delta.tool_calls = [
                        ChoiceDeltaToolCall.model_validate({"index": number, **call_object(call)})
                        for number, call in enumerate(calls, self._n_calls[index])
                    ]
                self._n_calls[index] += len(calls)
                yield Part(index=index, delta=delta, finish_reason=None, logprobs=known)
            case Ended(index, finish):
                yield Part(index=index, delta=ChoiceDelta(), finish_reason=self._finish(finish))

    def nothing(self) -> list[BaseModel]:
        return [Part(index=0, delta=ChoiceDelta(), finish_reason=None)]

    def _finish(self, finish: Finish) -> Finish | Literal["function_call"]:
        return "function_call" if self._older and finish == "tool_calls" else finish

    async def _scores(self, tokens: Sequence[Scored]) -> list[ChatCompletionTokenLogprob]:
        """Each token with its bytes, and the likeliest ones in its place."""
        texts = await self.texts(tokens)

        def of(token: int, logprob: float | None) -> dict[str, Any]:
            text = texts[token]
            return {"token": text, "bytes": list(text.encode()), "logprob": finite(logprob)}

        return [
            ChatCompletionTokenLogprob(
                **of(one.token, one.logprob), top_logprobs=[TopLogprob(**of(*each)) for each in one.top]
            )
            for one in tokens
        ]
