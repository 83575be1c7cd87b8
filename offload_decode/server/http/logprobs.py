"""Log-probabilities as the two APIs have them: a list of objects for chat, parallel lists for completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import cast

from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs

from offload_decode.server.requests import Scored

LEAST = -9999.0
"""What is said for a token that cannot come, as OpenAI does: JSON knows no infinity."""

Pieces = Callable[[Sequence[int]], Awaitable[Sequence[str]]]
"""Ids of tokens to the text of each."""


async def of_chat(tokens: Sequence[Scored], pieces: Pieces) -> list[ChatCompletionTokenLogprob]:
    """Each token with its bytes, and the likeliest ones in its place."""
    texts = await _texts(tokens, pieces)
    return [
        ChatCompletionTokenLogprob(
            token=texts[one.token],
            bytes=list(texts[one.token].encode()),
            logprob=_finite(one.logprob),
            top_logprobs=[
                TopLogprob(token=texts[token], bytes=list(texts[token].encode()), logprob=_finite(logprob))
                for token, logprob in one.top
            ],
        )
        for one in tokens
    ]


async def of_completion(tokens: Sequence[Scored], pieces: Pieces, offset: int = 0) -> Logprobs:
    """The first token of all has no log-probability, and is None in both lists. `offset`: where in the text
    the first of these tokens begins.

    The token itself is among the likeliest in its place, whether it is one of them or not.
    """
    texts = await _texts(tokens, pieces)
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(texts[one.token])
    known = [None if one.logprob is None else _finite(one.logprob) for one in tokens]
    top = [_top(one, texts) for one in tokens]
    return Logprobs.model_construct(
        text_offset=offsets,
        tokens=[texts[one.token] for one in tokens],
        token_logprobs=cast(list[float], known),
        top_logprobs=cast(list[dict[str, float]], top),
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
    return LEAST if logprob is None else max(logprob, LEAST)
