"""What is asked of `/v1/messages`: a conversation in Anthropic's form, read as a chat."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from offload_decode.server.http.answers import MOST_TOKENS, AskBody, Body, Other, Short, by_type, new_id
from offload_decode.server.http.chat import (
    MOST_MESSAGES,
    Effort,
    Format,
    json_grammar,
    template_options,
    warned,
)
from offload_decode.server.http.tools import MOST_TOOLS, Function, FunctionName, NamedTool, tools_asked
from offload_decode.server.messages import SEPARATOR, call_object
from offload_decode.server.requests import Settings, ToolCall
from offload_decode.server.service import ChatRequest, Service

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""The first line of Claude Code's system message, another one in each request: with it, nothing of a prompt 
would be found in the prefix cache.
"""
_THOUGHTS = {"thinking", "redacted_thinking"}  # of earlier answers, which no chat template wants


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str


AnyText = Annotated[Annotated[TextBlock, Tag("listed")] | Other, by_type("text")]
Texts = str | Annotated[list[AnyText], Field(fail_fast=True)]
"""A text, or blocks of which the texts are read."""


class Source(Body):
    """Where a document is: a text is in `data`, several are in `content`. No file is read."""

    type: Short
    data: str | None = None
    content: Texts | None = None


class Document(Body):
    """A document, or what a search found."""

    type: Literal["document", "search_result"]
    title: str | None = None
    source: Source | Short | None = None
    content: Texts | None = None

    @property
    def texts(self) -> Texts | None:
        """Its text; None where it has none that is read."""
        if not isinstance(self.source, Source):
            return self.content
        return self.source.data if self.source.type == "text" else self.source.content


AnyPassage = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[Document, Tag("listed")] | Other,
    by_type("document", "search_result", own=("text",)),
]


class ToolUse(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[AnyPassage], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[Document, Tag("listed")]
    | Annotated[ToolUse, Tag("tool_use")]
    | Annotated[ToolResult, Tag("tool_result")]
    | Other,
    by_type("document", "search_result", own=("text", "tool_use", "tool_result")),
]


class Message(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(fail_fast=True)]


class ClientTool(Body):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]


AnyTool = Annotated[Annotated[ClientTool, Tag("listed")] | Other, by_type(None, "custom")]


class Choice(Body):
    """Whether a tool is called: as the model likes, one of them, the one of this name, or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers: not where the type is `disabled`."""

    type: Short


class OutputConfig(Body):
    """How much the model thinks, and the schema of an answer that is JSON."""

    effort: Effort | None = None
    format: Format | None = None


class MessagesBody(AskBody):
    """What is asked of `/v1/messages`, and what is counted."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    system: Texts | None = None
    max_tokens: int | None = Field(None, ge=1, le=MOST_TOKENS)
    stop_sequences: Annotated[list[Short], Field(max_length=16)] | None = None
    tools: list[AnyTool] | None = Field(None, max_length=MOST_TOOLS, fail_fast=True)
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class Conversation:
    """Messages and tools of a request, as a chat has them. `left_out`: the types of what is not read."""

    def __init__(self, body: MessagesBody):
        self._body, self.left_out = body, set[str]()
        self.messages = [*self._system(body.system)]
        for message in body.messages:
            self.messages += self._message(message)
        functions = []
        for tool in body.tools or ():
            if isinstance(tool, ClientTool):
                function = {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                }
                functions.append(Function.model_validate(function))
            else:
                self.left_out.add(tool.type)
        chosen: Any = None if body.tool_choice is None else body.tool_choice.type
        if body.tool_choice is not None and chosen == "tool":
            chosen = NamedTool(type="function", name=body.tool_choice.name)
        self.tools = tools_asked(functions, chosen)

    def warnings(self, service: Service) -> list[str]:
        """What is not done as it was asked for."""
        system = any(message["role"] == "system" for message in self.messages)
        found: list[str] = warned(service, self._body) if system else []
        if left := self.left_out - _THOUGHTS:
            found = [*found, f"left out, as it is not read here: {', '.join(sorted(left))}"]
        return found

    def _system(self, system: Texts | None) -> Iterator[dict[str, Any]]:
        texts = [system] if isinstance(system, str) else self._texts(system or ())
        if text := SEPARATOR.join(filter(None, (_BILLING.sub("", text) for text in texts))):
            yield {"role": "system", "content": text}

    def _message(self, message: Message) -> Iterator[dict[str, Any]]:
        """Results of tools come first, as messages of their own."""
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            return
        results = [block for block in message.content if isinstance(block, ToolResult)]
        for result in results:
            text = self._text(result.content)
            if result.is_error:
                text = f"Error: {text}"
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
        uses = [block for block in message.content if isinstance(block, ToolUse)]
        calls = [ToolCall(use.id, use.name, json.dumps(use.input, ensure_ascii=False)) for use in uses]
        rest = [block for block in message.content if not isinstance(block, ToolResult | ToolUse)]
        if calls or rest or not results:
            # What the assistant wrote is one text; what a client puts into blocks of its own are several.
            text = self._text(rest, "" if message.role == "assistant" else SEPARATOR)
            more = {"tool_calls": [*map(call_object, calls)]} if calls else {}
            yield {"role": message.role, "content": text, **more}

    def _text(self, content: str | Sequence[Any] | None, between: str = SEPARATOR) -> str:
        return content if isinstance(content, str) else between.join(self._texts(content or ()))

    def _texts(self, blocks: Sequence[Any]) -> Iterator[str]:
        for block in blocks:
            if isinstance(block, TextBlock):
                yield block.text
            elif isinstance(block, Document) and block.texts is not None:
                heading = f"Document: {block.title}\n" if block.title else ""
                yield heading + self._text(block.texts)
            else:
                self.left_out.add(block.type)


def chat_request(settings: Settings, body: MessagesBody, conversation: Conversation) -> ChatRequest:
    """The request as the service takes it. Raises `WrongField`."""
    config, field = body.output_config or OutputConfig(), "output_config.format"
    thinks = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    choice = body.tool_choice
    return ChatRequest(
        **body.ask_options(
            settings,
            new_id("msg"),
            max_tokens=body.max_tokens,
            stop=tuple(filter(None, body.stop_sequences or ())),
            grammar=json_grammar(config.format, field),
            grammar_field=field,
        ),
        messages=conversation.messages,
        **conversation.tools,
        parallel_calls=choice is None or not choice.disable_parallel_tool_use,
        template_options={**template_options(config.effort), **thinks},
        separate_reasoning=True,
    )
