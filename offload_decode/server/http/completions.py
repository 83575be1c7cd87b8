"""`/v1/completions`: texts, or tokens, to be continued. And `/tokenize`, `/detokenize` and `/tokenizer_info`,
in vLLM's shapes, so that clients that count tokens need no tokenizer of their own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request, Response
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel, Field

from offload_decode.server.catalog import Entry
from offload_decode.server.http.answers import (
    MOST_TOP,
    AnswerBody,
    Body,
    Cost,
    Ids,
    Name,
    Pieces,
    completion_logprobs,
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
from offload_decode.server.http.chat import Messages, plain
from offload_decode.server.http.errors import RESPONSES, STREAMED, known_names
from offload_decode.server.http.streaming import DONE, QUIET_S, Events, Stream, sse
from offload_decode.server.requests import (
    AnsweredRequest,
    Delta,
    Done,
    Ended,
    NoSuchName,
    Prompted,
    Scored,
    Settings,
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
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class CompletionAnswer(Completion, Cost):
    """OpenAI's answer, with its citations and cost."""


class TokenizeBody(Body):
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


class DetokenizeBody(Body):
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
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Continue texts: the whole answer, or a stream of chunks."""
        id = new_id("cmpl")
        asked = _asked(service_of(request).settings, body, id)
        starts = [partial(service_of(request).complete, one) for one in asked]
        pieces = pieces_of(request, body.model)
        echoed = await run_sync(_echoed, request, body) if body.echo else []
        if body.stream:
            events = await started(request, starts)
            chunks = _chunks(body, id, events, pieces, echoed)
            return Stream(events, chunks, known_names(service_of(request)))
        answered = await whole(request, starts)
        return json_of(await _answer(body, id, answered, pieces, echoed))

    @routes.post("/tokenize", **tokens)
    def tokenize(request: Request, body: TokenizeBody) -> Tokenized:
        """A text, or the prompt that messages become behind a store, as tokens."""
        if (body.prompt is None) == (body.messages is None):
            raise WrongField("give a prompt or messages, and not both", "prompt")
        service = service_of(request)
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
    def detokenize(request: Request, body: DetokenizeBody) -> Detokenized:
        """Tokens as a text."""
        service = service_of(request)
        return Detokenized(prompt=service.detokenize(_entry(service, body.model).name, body.tokens))

    @routes.get("/tokenizer_info", **tokens)
    def tokenizer_info(request: Request, model: Name | None = None) -> TokenizerInfo:
        """The special tokens and the chat template of a model; of the first, where none is named."""
        service = service_of(request)
        tokenizer = service.loaded_models.model(_entry(service, model)).known_tokenizer
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=len(tokenizer),
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
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
    if len(body.prompts) > 1 and body.citations:
        raise WrongField("citations are of one prompt, and here are several", "citations")
    return [
        CompletionRequest(
            **body.asked(settings, f"{id}-{number}", most, body.logprobs, None),
            prompt=prompt,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        for number, prompt in enumerate(body.prompts)
    ]


def _echoed(request: Request, body: CompletionBody) -> list[str]:
    """The prompts as texts."""
    detokenize = partial(service_of(request).detokenize, body.model)
    return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in body.prompts]


async def _answer(
    body: CompletionBody, id: str, answered: Sequence[AnsweredRequest], pieces: Pieces, echoed: Sequence[str]
) -> CompletionAnswer:
    choices = []
    for part, one_request in enumerate(answered):
        before, scores = (echoed[part], one_request.scores or ()) if body.echo else ("", ())
        for index, one in sorted(one_request.answers.items()):
            tokens = (*scores, *one.tokens)
            known = None if body.logprobs is None else await completion_logprobs(tokens, pieces)
            choices.append(
                CompletionChoice(
                    index=part * body.answers + index,
                    text=before + one.text,
                    finish_reason="length" if one.finish == "length" else "stop",
                    logprobs=known,
                )
            )
    return CompletionAnswer(
        id=id,
        object="text_completion",
        created=now(),
        model=body.model,
        choices=choices,
        usage=usage_of(one.done for one in answered),
        **cost(answered[0].done) if body.citations else {},
    )


async def _chunks(
    body: CompletionBody, id: str, events: Events, pieces: Pieces, echoed: Sequence[str]
) -> AsyncIterator[bytes | None]:
    chunk = body.chunk(partial(CompletionAnswer, object="text_completion"), id)
    offsets: dict[int, int] = {}  # characters of each choice so far
    done: list[Done] = []

    def part(index: int, text: str, finish: str | None = None, known: Logprobs | None = None) -> bytes:
        # Built without a check: of a choice that goes on, the reason is null, which openai's type leaves out.
        choice = CompletionChoice.model_construct(
            index=index, text=text, finish_reason=finish, logprobs=known
        )
        return sse(chunk(choices=[choice]))

    async def more(index: int, text: str, tokens: Sequence[Scored]) -> bytes:
        offset = offsets.get(index, 0)
        known = None if body.logprobs is None else await completion_logprobs(tokens, pieces, offset)
        offsets[index] = offset + (len(text) if known is None else sum(map(len, known.tokens or [])))
        return part(index, text, None, known)

    async for event in events.each(QUIET_S):
        if event is None:
            yield None
            continue
        first = event.part * body.answers
        match event.event:
            case Prompted(_, scores) if body.echo:
                for index in range(body.answers):
                    yield await more(first + index, echoed[event.part], scores or ())
            case Delta(index, text, tokens) if text or (body.logprobs is not None and tokens):
                yield await more(first + index, text, tokens)
            case Ended(index, finish):
                yield part(first + index, "", finish)
            case Done() as one:
                done.append(one)
    if last := body.last_fields(done):
        yield sse(chunk(choices=[], **last))
    yield DONE


def _entry(service: Service, name: str | None) -> Entry:
    if name is not None:
        return service.catalog.entry(name)
    entries = service.catalog.entries()
    if not entries:
        raise NoSuchName("there is no model to ask yet: publish a store, or start the server with --model")
    return entries[0]
