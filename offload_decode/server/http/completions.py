"""`/v1/completions`: texts, or tokens, that go on."""

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
from offload_decode.server.http import answers
from offload_decode.server.http.answers import (
    DONE,
    QUIET_S,
    Answered,
    Body,
    Cited,
    Events,
    Ids,
    Name,
    Pieces,
    RequestMessage,
    Stream,
    data,
    json_of,
    of_completion,
    pieces_of,
    service_of,
)
from offload_decode.server.http.chat import Messages, plain
from offload_decode.server.http.errors import RESPONSES, known_names
from offload_decode.server.requests import (
    MOST_TOP,
    Delta,
    Done,
    Ended,
    NoSuchName,
    Prompted,
    Scored,
    WrongField,
)
from offload_decode.server.service import CompletionAsked, Service
from offload_decode.types import StepStats

MOST_PROMPTS = 128
DEFAULT_TOKENS = 16
"""As OpenAI's API has it, where a request names none."""

Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
ManyIds = Annotated[list[Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class CompletionBody(RequestMessage):
    """What is asked of `/v1/completions`. Several prompts are several requests; the choices of the first come
    first.
    """

    prompt: str | Ids | Texts | ManyIds
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    best_of: int | None = Field(None, ge=1)
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each by itself."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[int(token) for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class CompletionAnswer(Completion):
    """OpenAI's, with what was asked for by `citations`: what the answer attended to, and what it cost."""

    citations: Cited | None = None
    stats: StepStats | None = None


def router() -> APIRouter:
    """The route; the app's `state.service` is asked."""
    routes = APIRouter(tags=["answers"])

    @routes.post(
        "/v1/completions",
        response_model=CompletionAnswer,
        responses={200: {"content": {"text/event-stream": {}}}, **RESPONSES},
    )
    async def complete(request: Request, body: CompletionBody) -> Response:
        """Let texts go on: whole, or as a stream of chunks."""
        id = answers.new_id("cmpl")
        asked = _asked(request, body, id)
        starts = [partial(service_of(request).complete, one) for one in asked]
        pieces = pieces_of(request, body.model)
        echoed = await run_sync(_echoed, request, body) if body.echo else []
        if body.stream:
            events = await answers.started(request, starts)
            chunks = _chunks(body, id, events, pieces, echoed)
            return Stream(events, chunks, known_names(service_of(request)))
        answered = await answers.whole(request, starts)
        return json_of(await _answer(body, id, answered, pieces, echoed))

    return routes


def _asked(request: Request, body: CompletionBody, id: str) -> list[CompletionAsked]:
    if body.suffix:
        raise WrongField("suffix is not for models that only go on: leave it out", "suffix")
    if body.best_of not in (None, body.answers):
        raise WrongField("best_of must be n, or left out", "best_of")
    most = DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if most == 0 and not body.echo:
        raise WrongField("max_tokens: 0 needs echo: true, as there would be nothing to tell", "max_tokens")
    if len(body.prompts) > 1 and body.citations:
        raise WrongField("citations are of one prompt, and here are several", "citations")
    generation = body.generation(service_of(request).settings, most, body.logprobs, None)
    return [
        CompletionAsked(
            id=f"{id}-{number}",
            model=body.model,
            prompt=prompt,
            generation=generation,
            n=body.answers,
            prompt_logprobs=body.logprobs if body.echo else None,
            selector=body.selector,
            options=body.options,
            deadline_s=body.deadline,
            cite=body.citations,
        )
        for number, prompt in enumerate(body.prompts)
    ]


def _echoed(request: Request, body: CompletionBody) -> list[str]:
    """The prompts as texts."""
    detokenize = partial(service_of(request).detokenize, body.model)
    return [prompt if isinstance(prompt, str) else detokenize(prompt) for prompt in body.prompts]


async def _answer(
    body: CompletionBody, id: str, answered: Sequence[Answered], pieces: Pieces, echoed: Sequence[str]
) -> CompletionAnswer:
    choices = []
    for part, one_request in enumerate(answered):
        said = echoed[part] if body.echo else ""
        scores = one_request.scores or () if body.echo else ()
        for index, one in sorted(one_request.written.items()):
            tokens = (*scores, *one.tokens)
            known = None if body.logprobs is None else await of_completion(tokens, pieces)
            choices.append(
                CompletionChoice(
                    index=part * body.answers + index,
                    text=said + one.text,
                    finish_reason="length" if one.finish == "length" else "stop",
                    logprobs=known,
                )
            )
    return CompletionAnswer(
        id=id,
        object="text_completion",
        created=answers.now(),
        model=body.model,
        choices=choices,
        usage=answers.usage_of(one.done for one in answered),
        **answers.cost(answered[0].done) if body.citations else {},
    )


async def _chunks(
    body: CompletionBody, id: str, events: Events, pieces: Pieces, echoed: Sequence[str]
) -> AsyncIterator[bytes | None]:
    empty: dict[str, Any] = {"usage": None} if body.tells_usage else {}
    chunk = partial(
        CompletionAnswer, id=id, object="text_completion", created=answers.now(), model=body.model, **empty
    )
    written: dict[int, int] = {}  # characters of each choice so far
    ended: list[Done] = []

    async def more(choice: int, text: str, tokens: Sequence[Scored]) -> bytes:
        offset = written.get(choice, 0)
        known = None if body.logprobs is None else await of_completion(tokens, pieces, offset)
        written[choice] = offset + (len(text) if known is None else sum(map(len, known.tokens or [])))
        return data(chunk(choices=[_part(choice, text, None, known)]))

    async for told in events.each(QUIET_S):
        if told is None:
            yield None
            continue
        first = told.part * body.answers
        match told.event:
            case Prompted(_, scores) if body.echo:
                for index in range(body.answers):
                    yield await more(first + index, echoed[told.part], scores or ())
            case Delta(index, text, tokens) if text or (body.logprobs is not None and tokens):
                yield await more(first + index, text, tokens)
            case Ended(index, finish):
                yield data(chunk(choices=[_part(first + index, "", finish, None)]))
            case Done() as done:
                ended.append(done)
    last: dict[str, Any] = answers.cost(ended[0]) if body.citations else {}
    if body.tells_usage:
        last["usage"] = answers.usage_of(ended)
    if last:
        yield data(chunk(choices=[], **last))
    yield DONE


def _part(index: int, text: str, finish: str | None, known: Logprobs | None) -> CompletionChoice:
    # Built without a check: of a choice that goes on, the reason is null, which openai's type leaves out.
    return CompletionChoice.model_construct(index=index, text=text, finish_reason=finish, logprobs=known)


# `/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: clients that count tokens need no
# tokenizer of their own.


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


def token_router() -> APIRouter:
    """The routes; the app's `state.service` is asked."""
    routes = APIRouter(tags=["tokens"], responses=RESPONSES)

    @routes.post("/tokenize")
    def tokenize(request: Request, body: TokenizeBody) -> Tokenized:
        """A text, or the prompt that messages become behind a store, as tokens."""
        if (body.prompt is None) == (body.messages is None):
            raise WrongField("give a prompt or messages, and not both", "prompt")
        service = service_of(request)
        entry = _entry(service, body.model)
        messages = None if body.messages is None else plain(body.messages)
        tokens = service.tokenize(entry.name, body.prompt, messages, body.add_special_tokens)
        return Tokenized(
            count=len(tokens),
            max_model_len=entry.tokens + service.settings.max_prompt,
            tokens=tokens,
            token_strs=service.pieces(entry.name, tokens) if body.return_token_strs else None,
        )

    @routes.post("/detokenize")
    def detokenize(request: Request, body: DetokenizeBody) -> Detokenized:
        """Tokens as a text."""
        service = service_of(request)
        return Detokenized(prompt=service.detokenize(_entry(service, body.model).name, body.tokens))

    @routes.get("/tokenizer_info")
    def tokenizer_info(request: Request, model: Name | None = None) -> TokenizerInfo:
        """The special tokens and the chat template of a model; of the first, where none is named."""
        service = service_of(request)
        tokenizer = service.residents.model(_entry(service, model)).known_tokenizer
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            vocab_size=len(tokenizer),
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            chat_template=tokenizer.get_chat_template() if tokenizer.chat_template else None,
        )

    return routes


def _entry(service: Service, name: str | None) -> Entry:
    if name is not None:
        return service.catalog.entry(name)
    entries = service.catalog.entries()
    if not entries:
        raise NoSuchName("there is no model to ask yet: publish a store, or start the server with --model")
    return entries[0]
