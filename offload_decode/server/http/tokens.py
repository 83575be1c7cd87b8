"""`/tokenize`, `/detokenize` and `/tokenizer_info`, in vLLM's shapes: clients that count tokens need no
tokenizer of their own.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from offload_decode.server.catalog import Entry
from offload_decode.server.errors import NoSuchName, WrongField
from offload_decode.server.http.answers import service_of
from offload_decode.server.http.chat import Messages, plain
from offload_decode.server.http.errors import RESPONSES
from offload_decode.server.http.fields import Body, Ids, Name
from offload_decode.server.service import Service


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
