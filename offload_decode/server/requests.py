"""What is asked of the scheduler, and what it tells of it while it runs: frozen types that every part
shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload_decode.types import CitedDocument, StepStats

MOST_TOP = 20
"""Log-probabilities that are told in a token's place."""


@dataclass(frozen=True)
class Generation:
    """How an answer is written.

    max_tokens: None for as many as there is room for. temperature: 0 takes the likeliest token.
    top_logprobs: None for no log-probabilities; 0 for those of the tokens that were taken; k for the k
    likeliest too. stop: strings that end the answer and are not part of it. logit_bias: added to the logit
    of a token id. grammar: what `server.grammar` holds an answer to (`{"json_schema": …}`, `{"json_object":
    true}`, `{"regex": …}`, `{"lark": …}`), None for nothing. ignore_end: go on past end tokens.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Mapping[str, Any] | None = None
    ignore_end: bool = False


@dataclass(frozen=True)
class Request:
    """A prompt and how it is to be answered.

    model: a name of the catalog. tokens: what follows the stored ones, question and earlier turns, all of
    it. n: answers. prompt_logprobs: None, or as `top_logprobs`, for the tokens of the prompt. selector,
    options: None for the server's own. deadline_s: seconds from submission on. cite: keep what the answer
    attended to. raw: keep white space around an answer.
    shown: special tokens that are part of an answer's text, as these texts.
    """

    id: str
    model: str
    tokens: tuple[int, ...]
    generation: Generation = Generation()
    n: int = 1
    prompt_logprobs: int | None = None
    selector: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    deadline_s: float | None = None
    cite: bool = False
    raw: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability (natural log, under the model's distribution at temperature 1), and
    the likeliest ones in its place, best first. `logprob` is None where none was asked for, and for a first
    token that nothing is known before.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request: `prompt` counts the stored ones too, `cached` those of it that were not run:
    stored, or remembered from an earlier turn.
    """

    prompt: int
    cached: int
    completion: int = 0


@dataclass(frozen=True)
class Prompted:
    """The prompt has run. `scores` are those of `Request.tokens`, where they were asked for."""

    usage: Usage
    scores: tuple[Scored, ...] | None = None


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool; its arguments as the JSON of an object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """More of answer `index`: `text` may be empty, or go with several tokens. `calls` come whole; their own
    text is not in `text`.
    """

    index: int
    text: str
    tokens: tuple[Scored, ...]
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class Ended:
    """Answer `index` is whole."""

    index: int
    finish: Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Done:
    """All answers are whole: nothing more comes. `stats` is this request's part of what its passes cost."""

    usage: Usage
    stats: StepStats
    citations: tuple[CitedDocument, ...] | None = None


@dataclass(frozen=True)
class Failed:
    """The request ends here with an error: nothing more comes."""

    error: Exception


Event = Prompted | Delta | Ended | Done | Failed
"""Of a request: `Prompted` once, then each answer's `Delta`s and its `Ended`, then `Done`; or `Failed` at
any point.
"""

Emit = Callable[[Event], None]
"""Is told the events of a request in their order; it must not block."""
