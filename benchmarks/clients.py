"""Clients of an OpenAI server, many at once: what they ask, and when each piece of an answer reached them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

Body = dict[str, Any]


@dataclass
class Seen:
    """One request, in seconds of one clock: when it `began`, when each piece of text came (`pieces`), when it
    `ended`. `tokens` as the server counts them, else pieces; `error` where it was not answered whole.
    """

    began: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0
    cached: int = 0
    finish: str | None = None
    status: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """Seconds until the first piece."""
        return self.pieces[0] - self.began

    @property
    def gaps(self) -> list[float]:
        """Seconds between two pieces."""
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


def client(base: str, connections: int, patience: float) -> httpx.AsyncClient:
    """A client of the server at `base` that waits `patience` seconds for a byte."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=base, limits=limits, timeout=patience, trust_env=False)


async def ask(http: httpx.AsyncClient, body: Body, hang_up: int | None = None) -> Seen:
    """Put one question and read its answer as it comes; hang up after `hang_up` pieces."""
    seen = Seen(time.perf_counter())
    try:
        async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
            seen.status = response.status_code
            if response.status_code != 200:
                seen.error = (await response.aread()).decode(errors="replace")[:300]
            else:
                async with aclosing(_events(response)) as events:
                    async for chunk in events:
                        _note(seen, chunk)
                        if hang_up is not None and len(seen.pieces) >= hang_up:
                            break
    except httpx.HTTPError as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.ended = time.perf_counter()
    if seen.error is None and seen.finish is None and hang_up is None:
        seen.error = "the stream ended before the answer did"
    seen.tokens = seen.tokens or len(seen.pieces)
    return seen


async def _events(response: httpx.Response) -> AsyncGenerator[Body]:
    async for line in response.aiter_lines():
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line[5:])


def _note(seen: Seen, chunk: Body) -> None:
    if "error" in chunk:
        seen.error = json.dumps(chunk["error"])[:300]
    for choice in chunk.get("choices") or ():
        if (choice.get("delta") or {}).get("content"):
            seen.pieces.append(time.perf_counter())
        seen.finish = choice.get("finish_reason") or seen.finish
    usage = chunk.get("usage") or {}
    seen.tokens = usage.get("completion_tokens") or seen.tokens
    seen.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or seen.cached


@dataclass(frozen=True)
class Load:
    """What some clients saw in a window of `seconds`, each asking again as soon as it was answered. `tokens`
    of the window alone; the answers that were being written when it closed were read to their end.
    """

    clients: int
    seconds: float
    tokens: float
    answers: Sequence[Seen]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def errors(self) -> list[str]:
        return [seen.error for seen in self.answers if seen.error is not None]

    def first(self, share: float) -> float:
        """A quantile of the seconds to the first token; NaN where there was none."""
        return quantile([seen.first for seen in self.answers if seen.pieces], share)

    def between(self, share: float) -> float:
        """A quantile of the seconds between two pieces of an answer."""
        return quantile([gap for seen in self.answers for gap in seen.gaps], share)


def quantile(values: Sequence[float], share: float) -> float:
    """NaN where there are none."""
    return float(np.quantile(values, share)) if len(values) else float("nan")


async def load(
    base: str, body: Callable[[int, int], Body], clients: int, seconds: float, patience: float
) -> Load:
    """`clients` ask `body(client, turn)` again and again for `seconds`, each at least once."""
    answers: list[Seen] = []
    async with client(base, clients, patience) as http:
        began = time.perf_counter()

        async def one(number: int) -> None:
            turn = 0
            while turn == 0 or time.perf_counter() < began + seconds:
                answers.append(await ask(http, body(number, turn)))
                turn += 1

        await asyncio.gather(*map(one, range(clients)))
    window = max(seconds, min(seen.ended for seen in answers) - began)
    tokens = 0.0
    for seen in answers:
        inside = sum(came <= began + window for came in seen.pieces)
        tokens += inside * seen.tokens / max(len(seen.pieces), 1)
    return Load(clients, window, tokens, answers)
