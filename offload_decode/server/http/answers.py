"""What the routes that answer share: the fields of a request, bounded before anything else sees them, and
replies with their usage and cost as OpenAI's API has them.
"""

from __future__ import annotations

import json
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar, cast, get_args
from uuid import uuid4

from anyio.to_thread import run_sync
from fastapi import Depends, Request
from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag, model_validator

from offload_decode.common.files import without_surrogates
from offload_decode.server.http.streaming import DONE, Reply
from offload_decode.server.requests import (
    AnsweredRequest,
    Done,
    Ended,
    Event,
    Generation,
    Join,
    Joined,
    Scored,
    Settings,
    WrittenAnswer,
    WrongField,
)
from offload_decode.server.service import Service
from offload_decode.types import Checked, CitedDocument, StepStats

LOG = logging.getLogger("offload_decode.server")

MOST_ANSWERS = 16
MOST_TOGETHER = 64
MOST_TOKENS = 1 << 24
MOST_IDS = 1 << 20
MOST_TOP = 20
"""Log-probabilities that are told in a token's place."""
LEAST_LOGPROB = -9999.0
"""Of a token that cannot come, as OpenAI has it: JSON knows no infinity."""
_MOST_NAMES = 256
_logged = {"user", "metadata", "store", "service_tier", "safety_identifier"}
"""What was logged, and the fields of OpenAI's API that need no line in the log."""

M = TypeVar("M", bound=BaseModel)
Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Names = Annotated[list[Name], Field(min_length=1, max_length=MOST_TOGETHER, fail_fast=True)]
Together = Annotated[
    Annotated[int, Field(ge=1, le=MOST_TOGETHER), Tag("count")] | Annotated[Names, Tag("names")],
    Discriminator(lambda given: "names" if isinstance(given, list) else "count"),
]
"""Told apart beforehand, so that a list is refused as a list."""
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
    """A part of a request body. Unknown fields are accepted, as OpenAI's clients expect, and logged once."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _log_unknown(self) -> Body:
        for name in self.__pydantic_extra__ or {}:
            log_once(name, "the field %.80r of a request is not known here, and is ignored", name)
        return self


class WholeBody(Body):
    """A request body. Its texts are mended here, once for all of its parts."""

    @model_validator(mode="before")
    @classmethod
    def _mend_halves(cls, given: Any) -> Any:
        try:
            return _without_surrogates(given)
        except RecursionError as error:
            raise ValueError("its brackets are nested too deeply") from error


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {_without_surrogates(name): _without_surrogates(one) for name, one in value.items()}
    return [*map(_without_surrogates, value)] if isinstance(value, list) else value


def log_once(what: str, sentence: str, *fields: object) -> None:
    """Log what a request says that is not known here, where `what` was not logged before."""
    if what not in _logged and len(_logged) < _MOST_NAMES:
        _logged.add(what)
        LOG.info(sentence, *fields)


def by_type(*types: str | None, own: Sequence[str] = ()) -> Discriminator:
    """Tells members of a list by their `type`: whether it is `listed` among these, one that is told by itself
    (`own`), or one of the `rest`.
    """

    def kind(member: Any) -> str:
        type = member.get("type") if isinstance(member, dict) else getattr(member, "type", None)
        return "listed" if type in types else str(type) if type in own else "rest"

    return Discriminator(kind)


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


class StructuredOutputs(Body):
    """vLLM's form of what an answer is held to: one of these."""

    schema_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[Short] | None = Field(None, min_length=1, max_length=1024, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    def grammars(self, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Those that are given: the field of each, which stands in `place` for `{}`, and the grammar."""
        if self.structural_tag is not None:
            ways = "give a schema, a regular expression, choices or a grammar"
            raise WrongField(f"structural tags are not taken: {ways}", place.format("structural_tag"))
        if self.schema_ is not None:
            field = place.format("json")
            yield field, {"json_schema": _parsed(self.schema_, field)}
        if self.regex is not None:
            yield place.format("regex"), {"regex": self.regex}
        if self.choice is not None:
            written = " | ".join(json.dumps(one, ensure_ascii=False) for one in self.choice)
            yield place.format("choice"), {"lark": f"start: {written}"}
        if self.grammar is not None:
            yield place.format("grammar"), {"gbnf": self.grammar}
        if self.json_object:
            yield place.format("json_object"), {"json_object": True}


class StreamOptions(Body):
    """`include_usage`: a last chunk has the numbers of tokens."""

    include_usage: bool = False


class AskBody(WholeBody):
    """Who is asked, and how: the fields of every request for an answer.

    `selector` and `options` choose which stored tokens are attended to, as `-s` and `-o` do; `deadline` is in
    seconds; `citations` adds which documents and passages the answer attended to, `check` how far it agrees
    with attention to all stored tokens. `together`: how many documents of a collection, or the names of which
    stores, answer a chat as one, in the way of `join`.
    """

    model: Name
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    selector: OptionName | None = None
    options: dict[OptionName, Option] | None = Field(None, max_length=64)
    deadline: float | None = Field(None, ge=0.001, le=86_400)
    citations: bool = False
    check: bool = False
    together: Together | None = None
    join: Join | None = None

    def ask_options(self, settings: Settings, id: str, **more: Any) -> dict[str, Any]:
        """The fields of `AskOptions`; `more` are those of `Generation` that each route names differently."""
        temperature = settings.temperature if self.temperature is None else self.temperature
        top_p = settings.top_p if self.top_p is None else self.top_p
        if top_p == 0:  # the fewest tokens: the likeliest
            temperature, top_p = 0.0, 1.0
        return {
            "id": id,
            "model": self.model,
            "generation": Generation(temperature=temperature, top_p=top_p, **more),
            "selector": self.selector,
            "options": self.options or {},
            "deadline_s": self.deadline,
            "cite": self.citations,
            "check": self.check,
            "together": tuple(self.together) if isinstance(self.together, list) else self.together,
            "join": self.join,
        }


class AnswerBody(AskBody):
    """How an answer is written: the fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(None, ge=-1, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Short | Annotated[list[Short], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[BiasedToken, Bias] | None = Field(None, max_length=1024)
    ignore_eos: bool = False
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[Short] | None = Field(None, min_length=1, max_length=1024, fail_fast=True)
    guided_grammar: str | None = None
    guided_decoding: StructuredOutputs | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return self.n or 1

    def ask_options(self, settings: Settings, id: str, **more: Any) -> dict[str, Any]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        more |= self._held_to(more.get("grammar"))
        more |= {
            "seed": None if self.seed is None else self.seed % 2**63,
            "stop": tuple(filter(None, stop)),
            "logit_bias": {int(token): bias for token, bias in (self.logit_bias or {}).items()},
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "ignore_end": self.ignore_eos,
        }
        return super().ask_options(settings, id, **more) | {"n": self.answers}

    def _held_to(self, form: Mapping[str, Any] | None) -> dict[str, Any]:
        """The answer's grammar with its field: a `response_format`, or what other servers have instead."""
        found = [] if form is None else [("response_format", form)]
        if self.json_schema is not None:
            found.append(("json_schema", {"json_schema": self.json_schema}))
        if self.grammar:  # llama.cpp's own clients send an empty one for none
            found.append(("grammar", {"gbnf": self.grammar}))
        flat = {name: getattr(self, f"guided_{name}") for name in ("json", "regex", "choice", "grammar")}
        for place, own in (
            ("guided_{}", StructuredOutputs.model_validate(flat)),
            ("guided_decoding.{}", self.guided_decoding),
            ("structured_outputs.{}", self.structured_outputs),
        ):
            found += () if own is None else own.grammars(place)
        if len(found) > 1:
            raise WrongField("an answer is held to one format: give one of them", found[-1][0])
        return dict(zip(("grammar_field", "grammar"), found[0], strict=True)) if found else {}


def _parsed(schema: dict[str, Any] | str, field: str) -> Any:
    try:
        return json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as error:
        raise WrongField(f"{field} is no JSON", field) from error


class Cost(BaseModel):
    """What was asked for by `citations`: what an answer attended to, and what it cost. `joined`: who
    answered together. `warnings`: what is approximate in that, and what was not done as it was asked
    for, in whole answers and in the last chunk with usage or cost. `grounded`: how likely an answer stands in
    the text, in the chunk that ends it; of several whole answers, the least. `checked`: what was asked for by
    `check`.
    """

    grounded: float | None = None
    citations: list[CitedDocument] | None = None
    checked: Checked | None = None
    stats: StepStats | None = None
    joined: Joined | None = None
    warnings: list[str] | None = None


async def _service_of(request: Request) -> Service:
    return cast(Service, request.app.state.service)


AppService = Annotated[Service, Depends(_service_of)]
"""A route's parameter: the service behind the app."""


def new_id(kind: str) -> str:
    """An id that no other answer has, such as `chatcmpl-…`."""
    return f"{kind}-{uuid4().hex}"


def make(kind: type[M], field: str, **fields: Any) -> M:
    """A model of openai's whose `field` has one value alone, with this value."""
    (value,) = get_args(kind.model_fields[field].annotation)
    return kind(**{field: value}, **fields)


def cost(body: AskBody, done: Done, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of `Cost`, where they were asked for, or where stores answered together."""
    told = {"stats": done.stats, "citations": list(done.citations or ())} if body.citations else {}
    told |= {} if done.joined is None else {"joined": done.joined}
    told |= {} if done.checked is None else {"checked": done.checked}
    return told | ({"warnings": [*warnings, *done.notes]} if warnings or done.notes else {})


def grounded(answers: Sequence[float | None]) -> dict[str, float]:
    """The field of `Cost` that tells the least of some answers, where there is one."""
    known = [one for one in answers if one is not None]
    return {"grounded": min(known)} if known else {}


def finite(logprob: float | None) -> float:
    """As JSON has it."""
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)


class AnswerReply(Reply, ABC):
    """A reply of choices: as an `answer`, and in chunks of the kind `part`."""

    answer: type[BaseModel]
    part: type[BaseModel]
    end = DONE

    def __init__(self, service: Service, body: AnswerBody, id: str, requests: int = 1):
        self._pieces = partial(service.pieces, body.model)
        self._fields = {"id": id, "created": int(time.time()), "model": body.model}
        self._body, self._requests, self._cost = body, requests, dict[str, Any]()
        self._warnings: list[str] = []
        self._usage = body.stream_options is not None and body.stream_options.include_usage
        self.answered: defaultdict[int, AnsweredRequest] = defaultdict(AnsweredRequest)

    @abstractmethod
    def choices(self, part: int, event: Event) -> AsyncIterator[BaseModel]:
        """Of the chunks that follow from an event, the only choice of each."""

    @abstractmethod
    async def choice(self, part: int, index: int, one: WrittenAnswer) -> BaseModel:
        """Answer `index` of a request as a choice."""

    def collect(self, part: int, event: Event) -> None:
        self.answered[part].add(event)
        if isinstance(event, Done):
            self._cost = cost(self._body, event, self._warnings)  # there are citations of one request alone

    async def chunks(self, part: int, event: Event) -> AsyncIterator[BaseModel]:
        shared = self._fields | ({"usage": None} if self._usage else {})
        ended = grounded([event.grounded]) if isinstance(event, Ended) else {}
        async for choice in self.choices(part, event):
            yield make(self.part, "object", **shared | ended, choices=[choice])
        if isinstance(event, Done):
            self.collect(part, event)
            last = self._cost | ({"usage": self._total()} if self._usage else {})
            if {*last} - {"warnings"} and len(self.answered) == self._requests:
                body = self._body
                asked = self._usage or body.citations or body.check or body.together is not None
                yield make(self.part, "object", **shared | last, choices=[] if asked else self.nothing())

    def nothing(self) -> list[BaseModel]:
        """The choices of a last chunk that nobody asked for: clients read the first of every other one."""
        return []

    async def whole(self) -> BaseModel:
        choices = [
            await self.choice(part, index, one)
            for part, request in sorted(self.answered.items())
            for index, one in sorted(request.answers.items())
        ]
        every = [one.grounded for request in self.answered.values() for one in request.answers.values()]
        fields = self._fields | grounded(every) | self._cost
        return make(self.answer, "object", **fields, choices=choices, usage=self._total())

    async def texts(self, tokens: Sequence[Scored]) -> dict[int, str]:
        """By their ids, the texts of tokens and of the likeliest ones in their places."""
        ids = list({id: None for one in tokens for id in (one.token, *(token for token, _ in one.top))})
        return dict(zip(ids, await run_sync(self._pieces, ids), strict=True))

    def _total(self) -> CompletionUsage:
        """Of all requests together."""
        each = [one.done.usage for one in self.answered.values() if one.done is not None]
        prompt, completion = sum(one.prompt for one in each), sum(one.completion for one in each)
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(one.cached for one in each)),
        )
