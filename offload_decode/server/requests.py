"""The types that all parts of the server share: a request to the scheduler, its events, the server's own
errors, and its settings.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload_decode.common.errors import ConfigError, OffloadDecodeError
from offload_decode.config import EngineConfig
from offload_decode.planning.caps import Caps
from offload_decode.types import Checked, CitedDocument, Passage, StepStats


@dataclass(frozen=True)
class Generation:
    """How an answer is written.

    max_tokens: None for the server's default, below 0 for as many as there is room for. temperature: 0 takes
    the likeliest token. top_logprobs: None for no log-probabilities; 0 for those of the tokens that were
    taken; k for the k likeliest too. stop: strings that end the answer and are not part of it. logit_bias:
    added to the logit of a token id. grammar: what `server.grammar` holds an answer to (`{"json_schema": …}`,
    `{"json_object": true}`, `{"regex": …}`, `{"lark": …}`), None for nothing; grammar_field: where in the
    request it stands. ignore_end: go on past end tokens.
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
    grammar_field: str = "response_format"
    ignore_end: bool = False


Join = Literal["mixture", "product", "pced", "read", "exact"]
"""How several documents become one answer: `collections.together`."""


@dataclass(frozen=True)
class AskOptions:
    """Who is asked, and how, whatever the prompt is.

    model: a name of the catalog. n: answers. selector: None for the server's own. deadline_s: seconds from
    submission on. cite: keep what the answer attended to. check: put it through the model once more, with
    dense attention. together: how many documents of a collection, or
    the names of which stores, answer as one; join: in which way.
    """

    id: str
    model: str
    generation: Generation = Generation()
    n: int = 1
    selector: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    deadline_s: float | None = None
    cite: bool = False
    check: bool = False
    together: int | tuple[str, ...] | None = None
    join: Join | None = None


@dataclass(frozen=True)
class Request(AskOptions):
    """A prompt and how it is to be answered.

    tokens: what follows the stored ones, question and earlier turns, all of it. question: the text that is
    answered, the last turn alone. prompt_logprobs: None, or as `top_logprobs`, for the tokens of the prompt.
    raw: keep white space around an answer. shown: special tokens that are part of an answer's text, as these
    texts. passages: in place of an answer, so many at most that the prompt attends to.
    """

    tokens: tuple[int, ...] = ()
    question: str = ""
    prompt_logprobs: int | None = None
    raw: bool = False
    shown: Mapping[int, str] = field(default_factory=dict)
    passages: int = 0


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
    """More of answer `index`: `text` may be empty; `calls` come whole, without their own text; `reasoning`
    goes before all text.
    """

    index: int
    text: str
    tokens: tuple[Scored, ...]
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


Finish = Literal["stop", "length", "tool_calls"]
"""Why an answer ended."""


@dataclass(frozen=True)
class Ended:
    """Answer `index` is whole. stop: the string of the request that ended it, if one did. grounded: as
    `offload_decode.types.Answer` has it.
    """

    index: int
    finish: Finish
    stop: str | None = None
    grounded: float | None = None


@dataclass(frozen=True)
class JoinedDocument:
    """A document that answered among others. store: what clients call its store. share: what it gave to the
    answer, 0 to 1, where distributions were joined.
    """

    document: str
    store: str
    share: float | None = None


@dataclass(frozen=True)
class JoinedDissent:
    """A document that would have gone on otherwise after so much of the answer: as `engine.joint.Dissent`."""

    document: str
    text: str
    probability: float


@dataclass(frozen=True)
class Joined:
    """How several documents gave one answer; `exact` where they were prefilled as one text."""

    join: Join
    exact: bool
    documents: tuple[JoinedDocument, ...]
    dissents: tuple[JoinedDissent, ...] = ()


@dataclass(frozen=True)
class Done:
    """All answers are whole: nothing more comes. `stats` is this request's part of what its passes cost;
    `notes` say what is approximate in an answer that was `joined`.
    """

    usage: Usage
    stats: StepStats
    citations: tuple[CitedDocument, ...] | None = None
    passages: tuple[Passage, ...] = ()
    joined: Joined | None = None
    notes: tuple[str, ...] = ()
    checked: Checked | None = None


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


@dataclass
class WrittenAnswer:
    """One answer so far."""

    text: str = ""
    tokens: list[Scored] = field(default_factory=list)
    finish: Finish = "stop"
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: str = ""
    grounded: float | None = None


@dataclass
class AnsweredRequest:
    """A request with all of its answers, by their index, collected from its events."""

    answers: dict[int, WrittenAnswer] = field(default_factory=dict)
    scores: tuple[Scored, ...] | None = None
    done: Done | None = None

    def add(self, event: Event) -> None:
        """The next event."""
        match event:
            case Prompted(_, scores):
                self.scores = scores
            case Delta(index, text, tokens, calls, reasoning):
                one = self.answers.setdefault(index, WrittenAnswer())
                one.text += text
                one.tokens += tokens
                one.calls += calls
                one.reasoning += reasoning
            case Ended(index, finish, _, grounded):
                one = self.answers.setdefault(index, WrittenAnswer())
                one.finish, one.grounded = finish, grounded
            case Done():
                self.done = event


# Errors of the server beyond the engine's own; `http.errors` gives each its status.


class Busy(OffloadDecodeError):
    """The queue is full; try again after `retry_s` seconds."""

    def __init__(self, message: str, retry_s: int = 1):
        super().__init__(message)
        self.retry_s = retry_s


class Loading(Busy):
    """What a request needs is being loaded."""


class NoSuchName(OffloadDecodeError):
    """A model, a store or a job of that name is not there."""


class TooLarge(OffloadDecodeError):
    """A body or a prompt beyond the server's limit."""


TEMPLATE_OPTIONS = "chat_template_kwargs"
"""The field of a request for variables of the chat template."""


class WrongField(ConfigError):
    """A field of a request that cannot be used; `param` is its name."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ReadOnly(OffloadDecodeError):
    """This server makes no stores, and deletes none."""


class TimedOut(OffloadDecodeError):
    """The deadline of a request has passed."""


@dataclass(frozen=True)
class Settings:
    """Defaults of requests, and the server's limits. Raises `ConfigError` for what cannot be.

    config: how stores are asked where a request says nothing, and where models run. temperature, top_p,
    max_tokens: of requests that name none. max_running: answers written at the same time; max_waiting:
    requests that wait beyond them, before others are refused. max_prompt: tokens behind the stored ones.
    max_body: bytes of a request. deadline_s: seconds that a request may take. running_bytes: memory for the
    questions and answers that are being worked on; generated_bytes: for turns that are remembered. max_open:
    stores, with a selector each, that are kept open; max_models: models that are held in memory. read_only:
    no store is made, appended to or deleted; max_upload: bytes of the documents of one request; store_disk:
    bytes of the folder in which stores are made.
    """

    config: EngineConfig = field(default_factory=EngineConfig)
    caps: Caps = field(default_factory=Caps)
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 256
    max_prompt: int = 131_072
    max_body: int = 32 << 20
    deadline_s: float = 600.0
    running_bytes: int = 4 << 30
    generated_bytes: int = 1 << 30
    max_open: int = 256
    max_models: int = 1
    read_only: bool = False
    max_upload: int = 1 << 30
    store_disk: int | None = None

    def __post_init__(self) -> None:
        positive = ("max_tokens", "max_running", "max_prompt", "max_body", "deadline_s", "running_bytes")
        for name in (*positive, "max_open", "max_models", "max_upload"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be more than 0, not {getattr(self, name)}")
        if self.max_waiting < 0 or self.generated_bytes < 0:
            raise ConfigError("how many requests wait, and the memory for turns, must be 0 or more")
