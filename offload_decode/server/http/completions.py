"""`/v1/completions`: texts, or tokens, to be continued. And `/tokenize`, `/detokenize` and `/tokenizer_info`,
in vLLM's shapes, so that clients that count tokens need no tokenizer of their own.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, cast

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel, Field

from offload_decode.server.catalog import Entry
from offload_decode.server.http.answers import (
    MOST_TOP,
    AnswerBody,
    AnswerReply,
    AppService,
    Cost,
    Ids,
    Name,
    WholeBody,
    finite,
    new_id,
)
from offload_decode.server.http.chat import Messages, plain
from offload_decode.server.http.errors import RESPONSES, STREAMED
from offload_decode.server.http.streaming import respond
from offload_decode.server.requests import (
    Delta,
    Ended,
    Event,
    NoSuchName,
    Prompted,
    Scored,
    Settings,
    WrittenAnswer,
    WrongField,
)
from offload_decode.server.service import CompletionRequest, Service

MOST_PROMPTS = 128
DEFAULT_TOKENS = 16
"""As OpenAI's API has it, where a request names none."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class CompletionBody(AnswerBody):
    """A request to `/v1/completions`. Several prompts are several requests; the choices of the first come
    first.
    """

    prompt: str | Ids | Texts | ManyIds
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt by itself."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(list[str | list[int]], [self.prompt] if single else self.prompt)


class CompletionAnswer(Completion, Cost):
    """OpenAI's answer, with its citations and cost."""


class TokenizeBody(WholeBody):
    """A text, or the messages of a chat; the first model there is, where none is named."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class Tokenized(BaseModel):
    """Ids of tokens. `max_model_len`: how many of them a prompt may have, stored ones included."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(WholeBody):
    """Ids of tokens."""

    model: Name | None = None
    tokens: Ids


class Detokenized(BaseModel):
    """Their text."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client that builds prompts of its own must know of a tokenizer."""

    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


def router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter()
    tokens: dict[str, Any] = {"tags": ["tokens"], "responses": RESPONSES}

    @routes.post("/v1/completions", tags=["answers"], response_model=CompletionAnswer, responses=STREAMED)
    async def complete(request: Request, service: AppService, body: CompletionBody) -> Response:
        """Continue texts: the whole answer, or a stream of chunks."""
        id = new_id("cmpl")
        starts = [partial(service.complete, one) for one in _asked(service.settings, body, id)]
        echoed = await run_sync(_echoed, service, body) if body.echo else None
        return await respond(request, starts, CompletionReply(service, body, id, echoed), body.stream)

    @routes.post("/tokenize", **tokens)
    def tokenize(service: AppService, body: TokenizeBody) -> Tokenized:
        """A text, or the prompt that messages become behind a store, as tokens."""
        if (body.prompt is None) == (body.messages is None):
            raise WrongField("give a prompt or messages, and not both", "prompt")
        entry = _entry(service, body.model)
        messages = None if body.messages is None else plain(body.messages)
        ids = service.tokenize(entry.name, body.prompt, messages, body.add_special_tokens)
        return Tokenized(
            count=len(ids),
            max_model_len=entry.tokens + service.settings.max_prompt,
            tokens=ids,
            token_strs=service.pieces(entry.name, ids) if body.return_token_strs else None,
        )

    @routes.post("/detokenize", **tokens)
    def detokenize(service: AppService, body: DetokenizeBody) -> Detokenized:
        """Tokens as a text."""
        return Detokenized(prompt=service.detokenize(_entry(service, body.model).name, body.tokens))

    @routes.get("/tokenizer_info", **tokens)
    def tokenizer_info(service: AppService, model: Name | None = None) -> TokenizerInfo:
        """The special tokens and the chat template of a model; of the first, where none is named."""
        tokenizer = service.loaded_models.model(_entry(service, model)).known_tokenizer
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=len(tokenizer),
            **{name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "pad_token")},
            chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
        )

    return routes


def _asked(settings: Settings, body: CompletionBody, id: str) -> list[CompletionRequest]:
    if body.suffix:
        raise WrongField("suffix is not for models that only go on: leave it out", "suffix")
    if body.best_of not in (None, body.answers):
        raise WrongField("best_of must be n, or left out", "best_of")
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise WrongField("max_tokens: 0 needs echo: true, as there would be nothing to tell", "max_tokens")
    for name, wanted in (("citations", body.citations), ("check", body.check)):
        if len(body.prompts) > 1 and wanted:
            raise WrongField(f"{name} goes with one prompt, and here are several: leave it out", name)
    return [
        CompletionRequest(
            **body.ask_options(settings, f"{id}-{number}", max_tokens=most, top_logprobs=body.logprobs),
            prompt=prompt,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for number, prompt in enumerate(body.prompts)
    ]


def _echoed(service: Service, body: CompletionBody) -> list[str]:
    """The prompts as texts."""
    detokenize = partial(service.detokenize, body.model)
    return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in body.prompts]


class CompletionReply(AnswerReply):
    """As texts. `echoed`: the prompts, where they are a part of the answer."""

    answer = part = CompletionAnswer

    def __init__(self, service: Service, body: CompletionBody, id: str, echoed: Sequence[str] | None):
        super().__init__(service, body, id, len(body.prompts))
        self._answers, self._logprobs, self._echoed = body.answers, body.logprobs is not None, echoed
        self._offsets: Counter[int] = Counter()  # characters of each choice so far

    async def choice(self, part: int, index: int, one: WrittenAnswer) -> CompletionChoice:
        scores, text = one.tokens, one.text
        if self._echoed is not None:
            scores, text = [*(self.answered[part].scores or ()), *scores], self._echoed[part] + text
        return _choice(part * self._answers + index, text, one.finish, await self._scores(scores))

    async def choices(self, part: int, event: Event) -> AsyncIterator[CompletionChoice]:
        first = part * self._answers
        match event:
            case Prompted(_, scores) if self._echoed is not None:
                for index in range(self._answers):
                    yield await self._more(first + index, self._echoed[part], scores or ())
            case Delta(index, text, tokens) if text or (self._logprobs and tokens):
                yield await self._more(first + index, text, tokens)
            case Ended(index, finish, _):
                yield _choice(first + index, "", finish)

    async def _more(self, index: int, text: str, tokens: Sequence[Scored]) -> CompletionChoice:
        known = await self._scores(tokens, self._offsets[index])
        self._offsets[index] += len("".join(known.tokens or ()) if known else text)
        return _choice(index, text, None, known)

    async def _scores(self, tokens: Sequence[Scored], offset: int = 0) -> Logprobs | None:
        """Parallel lists, where they were asked for, whose first token begins at `offset` in the text. The
        first token of all has no log-probability, and is None in both lists of them.
        """
        if not self._logprobs:
            return None
        texts = await self.texts(tokens)
        pieces = [texts[one.token] for one in tokens]
        return Logprobs.model_construct(
            text_offset=list(accumulate(map(len, pieces[:-1]), initial=offset)) if pieces else [],
            tokens=pieces,
            token_logprobs=[None if one.logprob is None else finite(one.logprob) for one in tokens],
            top_logprobs=[_top(one, texts) for one in tokens],
        )


def _choice(index: int, text: str, finish: str | None, known: Logprobs | None = None) -> CompletionChoice:
    """Built without a check: of one that goes on, the reason is null, which openai's type leaves out."""
    return CompletionChoice.model_construct(index=index, text=text, finish_reason=finish, logprobs=known)


def _top(one: Scored, texts: dict[int, str]) -> dict[str, float] | None:
    """The likeliest tokens, and the token itself, whether it is one of them or not."""
    if one.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for token, logprob in (*one.top, (one.token, one.logprob)):
        likeliest.setdefault(texts[token], finite(logprob))  # of tokens that look alike, the likeliest
    return likeliest


def _entry(service: Service, name: str | None) -> Entry:
    if name is not None:
        return service.catalog.entry(name)
    entries = service.catalog.entries()
    if not entries:
        raise NoSuchName("there is no model to ask yet: publish a store, or start the server with --model")
    return entries[0]
