"""What the benchmark's clients measure of a server whose answers are known."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse

from benchmarks.clients import ask, client, load, quantile
from benchmarks.serve import Row, Seen, show
from benchmarks.servers import free_port
from tests.server.soak import in_half

TOKENS = 4


def app(left: list[str]) -> FastAPI:
    """Streams TOKENS tokens; `left` names what clients hung up on."""
    found = FastAPI()

    @found.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> Any:
        model = body["model"]
        if model == "refused":
            return JSONResponse({"error": {"message": "no"}}, 400)

        async def events() -> AsyncIterator[str]:
            try:
                yield event({"choices": [{"delta": {"role": "assistant"}}]})
                for number in range(TOKENS if model != "cut" else 2):
                    await asyncio.sleep(0.01 if model != "slow" else 0.1)
                    yield event({"choices": [{"delta": {"content": str(number)}}]})
                if model == "failed":
                    yield event({"error": {"message": "failed"}})
                elif model != "cut":
                    yield event({"choices": [{"delta": {}, "finish_reason": "length"}]})
                    cached = {"prompt_tokens_details": {"cached_tokens": 7}}
                    yield event({"choices": [], "usage": {"completion_tokens": 2 * TOKENS, **cached}})
                yield "data: [DONE]\n\n"
            except (asyncio.CancelledError, GeneratorExit):
                left.append(model)
                raise

        return StreamingResponse(events(), media_type="text/event-stream")

    return found


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


@pytest.fixture(scope="module")
def left() -> list[str]:
    return []


@pytest.fixture(scope="module")
def base(left: list[str]) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app(left), port=port, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def asked(base: str, model: str, hang_up: int | None = None) -> Seen:
    async def one() -> Seen:
        async with client(base, 1, 10) as http:
            return await ask(http, {"model": model}, hang_up)

    return asyncio.run(one())


def test_an_answer_is_timed_piece_by_piece(base: str) -> None:
    seen = asked(base, "book")
    assert (seen.error, seen.finish, seen.status) == (None, "length", 200)
    assert (seen.tokens, seen.cached, len(seen.pieces)) == (2 * TOKENS, 7, TOKENS)
    assert seen.first >= 0.01
    assert len(seen.gaps) == TOKENS - 1
    assert all(gap > 0 for gap in seen.gaps)


@pytest.mark.parametrize(
    ("model", "error"), [("refused", "no"), ("failed", "failed"), ("cut", "the stream ended before")]
)
def test_what_is_not_answered_whole_is_an_error(base: str, model: str, error: str) -> None:
    assert error in (asked(base, model).error or "")


def test_nobody_there_is_an_error() -> None:
    assert "ConnectError" in (asked(f"http://127.0.0.1:{free_port()}", "book").error or "")


def test_a_client_that_hangs_up_is_gone(base: str, left: list[str]) -> None:
    seen = asked(base, "slow", hang_up=1)
    assert (seen.error, len(seen.pieces)) == (None, 1)
    until = time.monotonic() + 5
    while "slow" not in left and time.monotonic() < until:
        time.sleep(0.01)
    assert "slow" in left


def test_clients_ask_again_until_the_window_closes_and_only_its_tokens_count(base: str) -> None:
    seen = asyncio.run(load(base, lambda number, turn: {"model": "book"}, 3, 0.3, 10))
    assert seen.errors == []
    assert len(seen.answers) > 3
    whole = sum(one.tokens for one in seen.answers)
    assert 0 < seen.tokens <= whole
    assert seen.tokens_per_second == pytest.approx(seen.tokens / seen.seconds)
    assert seen.first(0.5) <= seen.first(0.99)


def test_tables_and_halves() -> None:
    one = Row(1, 1, 10.0, 0.1, 0.2, 0.01, 0.02, 10**6, 2 * 10**6, 100.0, 3, 0)
    four = Row(1, 4, 25.0, 0.1, 0.2, 0.01, 0.02, 10**6, 2 * 10**6, 100.0, 3, 0)
    assert "2.50" in show([one, four])
    earlier, later = in_half([Seen(2.0), Seen(1.0), Seen(3.0)])
    assert [seen.began for seen in (*earlier, *later)] == [1.0, 2.0, 3.0]
    assert quantile([], 0.5) != quantile([], 0.5)
