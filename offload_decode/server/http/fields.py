"""What requests share: the fields that say how an answer is written, bounded before anything else sees them.

Fields that this server does not know are accepted, as OpenAI's clients expect, and named once in the log.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from offload_decode.server.requests import Generation
from offload_decode.server.settings import Settings

LOG = logging.getLogger("offload_decode.server")

MOST_ANSWERS = 16
MOST_TOKENS = 1 << 24
MOST_IDS = 1 << 20
_MOST_NAMES = 256
_IGNORED = frozenset(
    {"user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier"}
)
_noted: set[str] = set(_IGNORED)

Name = Annotated[str, StringConstraints(min_length=1, max_length=512)]
Short = Annotated[str, StringConstraints(max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Ids = Annotated[list[TokenId], Field(min_length=1, max_length=MOST_IDS, fail_fast=True)]
"""Ids of tokens. Lists of a request fail with their first wrong member: a body may hold millions of them, and
pydantic takes a kilobyte to tell of each.
"""
Bias = Annotated[float, Field(ge=-100, le=100)]
Option = (
    Annotated[str, StringConstraints(max_length=256)]
    | bool
    | int
    | Annotated[float, Field(allow_inf_nan=False)]
)


class Body(BaseModel):
    """A request body. What it does not know is named in the log the first time it is seen."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _note_unknown(self) -> Body:
        for name in self.__pydantic_extra__ or {}:
            if name not in _noted and len(_noted) < _MOST_NAMES:
                _noted.add(name)
                LOG.info("the field %.80r of a request is not known here, and is ignored", name)
        return self


class StreamOptions(Body):
    """`include_usage`: a last chunk says how many tokens there were."""

    include_usage: bool = False


class Asks(Body):
    """Who is asked, and how: the fields of every request for an answer.

    `selector` and `options` choose which stored tokens are attended to, as `-s` and `-o` do; `deadline` is in
    seconds; `citations` adds which documents and passages the answer attended to.
    """

    model: Name
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    selector: Annotated[str, StringConstraints(max_length=64)] | None = None
    options: dict[Annotated[str, StringConstraints(max_length=64)], Option] = Field({}, max_length=64)
    deadline: float | None = Field(None, ge=0.001, le=86_400)
    citations: bool = False


class Written(Asks):
    """How an answer is written: the fields that chat and completions share."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(None, ge=0, le=MOST_TOKENS)
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stop: Short | Annotated[list[Short], Field(max_length=16)] | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")], Bias] | None = Field(
        None, max_length=1024
    )
    ignore_eos: bool = False

    @property
    def answers(self) -> int:
        """How many are wanted."""
        return self.n or 1

    @property
    def tells_usage(self) -> bool:
        """A stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def generation(self, settings: Settings, most: int | None, top: int | None, grammar: Any) -> Generation:
        """With the server's own values where the request names none; `most`, `top` and `grammar` as
        `Generation` has them.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Generation(
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
