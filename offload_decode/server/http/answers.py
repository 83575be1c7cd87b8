"""What the routes that answer share: the fields of a request, bounded before anything else sees them; how
requests are begun and their events collected; and log-probabilities, usage and cost as OpenAI's API has them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar, cast
from uuid import uuid4

from anyio.to_thread import run_sync
from fastapi import Request, Response
from openai.types import CompletionUsage
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from offload_decode.server.http.streaming import QUIET_S, Events, Start, while_connected
from offload_decode.server.requests import AnsweredRequest, Done, Event, Generation, Scored, Settings
from offload_decode.server.service import Service
from offload_decode.types import CitedDocument, StepStats

LOG = logging.getLogger("offload_decode.server")

MOST_ANSWERS = 16
MOST_TOKENS = 1 << 24
MOST_IDS = 1 << 20
MOST_TOP = 20
"""Log-probabilities that are told in a token's place."""
LEAST_LOGPROB = -9999.0
"""Of a token that cannot come, as OpenAI has it: JSON knows no infinity."""
_MOST_NAMES = 256
_unknown_fields = {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
"""Those that were logged, and those of OpenAI's API that need no line in the log."""

C = TypeVar("C")
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Short = Annotated[str, StringConstraints(max_length=1024)]
OptionName = Annotated[str, StringConstraints(max_length=64)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
"""Ids of tokens. Lists of a request fail with their first wrong member: a body may hold millions of them, and
pydantic takes a kilobyte for each error.
"""
BiasedToken = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Text = Annotated[str, StringConstraints(max_length=256)]
Option = Text | bool | int | Annotated[float, Field(allow_inf_nan=False)]


class Body(BaseModel):
    """A request body. Unknown fields are accepted, as OpenAI's clients expect, and logged once."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _log_unknown(self) -> Body:
        for name in self.__pydantic_extra__ or {}:
            if name not in _unknown_fields and len(_unknown_fields) < _MOST_NAMES:
                _unknown_fields.add(name)
                LOG.info("the field %.80r of a request is not known here, and is ignored", name)
        return self


class StreamOptions(Body):
    """`include_usage`: a last chunk has the numbers of tokens."""

    include_usage: bool = False


class AskBody(Body):
    """Who is asked, and how: the fields of every request for an answer.

    `selector` and `options` choose which stored tokens are attended to, as `-s` and `-o` do; `deadline` is in
    seconds; `citations` adds which documents and passages the answer attended to.
    """

    model: Name
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    selector: OptionName | None = None
    options: dict[OptionName, Option] = Field({}, max_length=64)
    deadline: float | None = Field(None, ge=0.001, le=86_400)
    citations: bool = False


class AnswerBody(AskBody):
    """How an answer is written: the fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Short | Annotated[list[Short], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[BiasedToken, Bias] | None = Field(None, max_length=1024)
    ignore_eos: bool = False

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return self.n or 1

    @property
    def streams_usage(self) -> bool:
        """A stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def asked(
        self, settings: Settings, id: str, most: int | None, top: int | None, grammar: Any
    ) -> dict[str, Any]:
        """The fields of `AskOptions`; `most`, `top` and `grammar` as `Generation` has them."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        generation = Generation(
            max_tokens=most,
            temperature=settings.temperature if self.temperature is None else self.temperature,
            top_p=settings.top_p if self.top_p is None else self.top_p,
            seed=None if self.seed is None else self.seed % 2**63,
            stop=tuple(filter(None, stop)),
            top_logprobs=top,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            grammar=grammar,
            ignore_end=self.ignore_eos,
        )
        return {
            "id": id,
            "model": self.model,
            "generation": generation,
            "n": self.answers,
            "selector": self.selector,
            "options": self.options,
            "deadline_s": self.deadline,
            "cite": self.citations,
        }

    def chunk(self, kind: Callable[..., C], id: str) -> Callable[..., C]:
        """Makes the chunks of a stream, which have these fields in common."""
        fields: dict[str, Any] = {"id": id, "created": now(), "model": self.model}
        return partial(kind, **fields, **({"usage": None} if self.streams_usage else {}))

    def last_fields(self, done: Sequence[Done]) -> dict[str, Any]:
        """The fields of a stream's last chunk, none where the client asked for none."""
        fields = cost(done[0]) if self.citations else {}
        return fields | ({"usage": usage_of(done)} if self.streams_usage else {})


class Cost(BaseModel):
    """What was asked for by `citations`: what an answer attended to, and what it cost."""

    citations: list[CitedDocument] | None = None
    stats: StepStats | None = None


def service_of(request: Request) -> Service:
    """The service behind the app."""
    return cast(Service, request.app.state.service)


def new_id(kind: str) -> str:
    """An id that no other answer has, such as `chatcmpl-…`."""
    return f"{kind}-{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def json_of(answer: BaseModel) -> Response:
    """A whole answer: fields that were never set are left out."""
    return Response(answer.model_dump_json(exclude_unset=True, by_alias=True), media_type="application/json")


async def started(request: Request, starts: Sequence[Start]) -> Events:
    """Begin requests whose answers are streamed. Raises what makes one fail at once, so that the status can
    say so.
    """
    events = Events()

    async def begin() -> None:
        await events.begin(starts)
        await events.first(QUIET_S)

    await while_connected(request, events, begin)
    return events


async def read(request: Request, starts: Sequence[Start], take: Callable[[int, Event], object]) -> None:
    """Begin requests, and hand over the events of each, by its number, until they are done."""
    events = Events()

    async def follow() -> None:
        await events.begin(starts)
        async for event in events.each():
            if event is not None:
                take(*event)

    await while_connected(request, events, follow)


async def whole(request: Request, starts: Sequence[Start]) -> list[AnsweredRequest]:
    """Begin requests, and wait for all of their answers."""
    answered = [AnsweredRequest() for _ in starts]
    await read(request, starts, lambda part, event: answered[part].add(event))
    return answered


def usage_of(done: Iterable[Done | None]) -> CompletionUsage:
    """Of all requests together, as OpenAI's API has it."""
    each = [one.usage for one in done if one is not None]
    prompt, completion = sum(one.prompt for one in each), sum(one.completion for one in each)
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(one.cached for one in each)),
    )


def cost(done: Done | None) -> dict[str, Any]:
    """The fields of `Cost`."""
    assert done is not None, "the last event"
    return {"stats": done.stats, "citations": list(done.citations or ())}


Pieces = Callable[[Sequence[int]], Awaitable[Sequence[str]]]
"""Ids of tokens to the text of each."""


def pieces_of(request: Request, model: str) -> Pieces:
    """The texts of a model's tokens, one by one."""
    service = service_of(request)
    return lambda tokens: run_sync(service.pieces, model, tokens)


async def chat_logprobs(tokens: Sequence[Scored], pieces: Pieces) -> list[ChatCompletionTokenLogprob]:
    """Each token with its bytes, and the likeliest ones in its place."""
    texts = await _texts(tokens, pieces)

    def of(token: int, logprob: float | None) -> TopLogprob:
        return TopLogprob(token=texts[token], bytes=list(texts[token].encode()), logprob=_finite(logprob))

    return [
        ChatCompletionTokenLogprob(
            **of(one.token, one.logprob).model_dump(), top_logprobs=[of(*each) for each in one.top]
        )
        for one in tokens
    ]


async def completion_logprobs(tokens: Sequence[Scored], pieces: Pieces, offset: int = 0) -> Logprobs:
    """Parallel lists. The first token of all has no log-probability, and is None in both lists of them.
    `offset`: where in the text the first of these tokens begins.

    The token itself is among the likeliest in its place, whether it is one of them or not.
    """
    texts = await _texts(tokens, pieces)
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(texts[one.token])
    known = [None if one.logprob is None else _finite(one.logprob) for one in tokens]
    return Logprobs.model_construct(
        text_offset=offsets,
        tokens=[texts[one.token] for one in tokens],
        token_logprobs=cast(list[float], known),
        top_logprobs=cast(list[dict[str, float]], [_top(one, texts) for one in tokens]),
    )


def _top(one: Scored, texts: dict[int, str]) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        likeliest.setdefault(texts[token], _finite(logprob))  # of tokens that look alike, the likeliest
    return likeliest


async def _texts(tokens: Sequence[Scored], pieces: Pieces) -> dict[int, str]:
    ids = list(dict.fromkeys(id for one in tokens for id in (one.token, *(token for token, _ in one.top))))
    return dict(zip(ids, await pieces(ids), strict=True))


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
