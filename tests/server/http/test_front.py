"""A front over replicas that are made up: who is asked, what is sent on, and what a lost one costs."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient
from starlette.types import Message

from offload_decode.server.http.app import guard
from offload_decode.server.http.front import STORES, TRIES, Lost, create_front, run
from offload_decode.server.http.security import Access
from offload_decode.server.requests import Busy
from tests.server.http.conftest import listening
from tests.server.test_catalog import until

CHUNKS = ["data: one\n\n", "data: two\n\n"]
PINGS = [": ping\n\n", 'event: ping\ndata: {"type": "ping"}\n\n']


def app(left: list[str]) -> FastAPI:
    """What every replica runs: it streams, and notes who hangs up."""
    found = FastAPI()

    @found.post("/v1/chat/completions")
    async def chat(body: dict[str, Any]) -> StreamingResponse:
        async def events() -> AsyncGenerator[str]:
            try:
                for chunk in body.get("pings", []) + CHUNKS:
                    yield chunk
                    await asyncio.sleep(body.get("pause", 0))
            except (asyncio.CancelledError, GeneratorExit):
                left.append(body["model"])
                raise

        return StreamingResponse(events(), media_type="text/event-stream")

    @found.get("/v1/models")
    def models(request: Request) -> dict[str, str]:
        return {"id": request.headers.get("x-request-id", "")}

    return found


class MadeUp:
    """Replicas; `losses` says after how many messages each of the next requests loses its replica."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self.app = app(self.left)
        self.asked: list[str] = []
        self.losses: list[int] = []
        self.full = False

    async def ask(self, name: str, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        self.asked.append(name)
        if self.full:
            raise Busy("all are at work")
        left = self.losses.pop(0) if self.losses else None
        async for messages in run(self.app, scope, body):
            for message in messages:
                if left == 0:
                    raise Lost
                yield [message]
                left = None if left is None else left - 1

    async def metrics(self) -> bytes:
        return b"# all of them\n"


@pytest.fixture
def replicas():
    return MadeUp()


@pytest.fixture
def client(replicas):
    return TestClient(create_front(replicas, Access(), 1000), raise_server_exceptions=False)


def chat(client: TestClient, **more: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "book", **more})


def test_a_request_goes_where_its_name_says_and_comes_back_whole(client, replicas):
    answered = chat(client)
    assert (answered.status_code, answered.text) == (200, "".join(CHUNKS))
    assert answered.headers["content-type"].startswith("text/event-stream")
    models = client.get("/v1/models", headers={"X-Request-Id": "mine"})
    assert (models.json(), models.headers["x-request-id"]) == ({"id": "mine"}, "mine")
    client.post(f"{STORES}/book/append", json={"model": "another"})
    client.get("/v1/jobs/1")
    client.get("/tokenizer_info?model=book")
    client.post("/v1/chat/completions", content=b"no JSON")
    assert replicas.asked == ["book", "", STORES, STORES, "book", ""]


@pytest.mark.parametrize(("messages", "pings"), [(0, []), (1, []), (2, PINGS[:1]), (3, PINGS)])
def test_a_replica_that_is_lost_before_an_answer_began_loses_no_request(client, replicas, messages, pings):
    replicas.losses = [messages] * (TRIES - 1)
    answered = chat(client, pings=pings)
    assert answered.status_code == 200
    assert answered.text.removeprefix("".join(pings) * TRIES) == "".join(CHUNKS)
    assert replicas.asked == ["book"] * TRIES


def test_half_an_answer_is_not_taken_for_a_whole_one(base, replicas):
    replicas.losses = [2]
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{base}/v1/chat/completions", json={"model": "book"})
    assert replicas.asked == ["book"]


def test_tries_end(client, replicas):
    replicas.losses = [0] * 100
    answered = chat(client)
    assert (answered.status_code, answered.json()["error"]["code"]) == (429, "busy")
    assert len(replicas.asked) == TRIES


def test_what_may_have_been_done_is_not_done_again(client, replicas):
    replicas.losses = [0] * 100
    assert client.post(STORES, json={}).status_code == 429
    assert len(replicas.asked) == 1


def test_full_replicas_refuse(client, replicas):
    replicas.full = True
    answered = chat(client)
    assert (answered.status_code, answered.headers["retry-after"]) == (429, "1")


def test_keys_and_limits_hold_in_front(replicas):
    client = TestClient(create_front(replicas, Access(keys=("secret",)), 1000))
    assert chat(client).status_code == 401
    client.headers["Authorization"] = "Bearer secret"
    assert chat(client).status_code == 200
    assert chat(client, padding="x" * 1000).status_code == 413
    assert client.get("/metrics").text == "# all of them\n"
    assert replicas.asked == ["book"]


def test_origins_that_may_ask_are_known_in_front_alone(replicas):
    guard(replicas.app, Access(), 1000, 1000)  # as of every server
    client = TestClient(create_front(replicas, Access(origins=("https://chat.example",)), 1000))
    for origin, status in (("https://chat.example", 200), ("https://other.example", 403)):
        client.headers["Origin"] = origin
        assert chat(client).status_code == status


def test_a_name_that_is_too_long_is_looked_for_nowhere(client, replicas):
    client.post("/v1/chat/completions", json={"model": "x" * 513})
    assert replicas.asked == [""]


@pytest.fixture
def base(replicas):
    with listening(create_front(replicas, Access(), 1000)) as address:
        yield address


def test_a_client_that_hangs_up_is_dropped_by_its_replica(base, replicas):
    body = {"model": "book", "pause": 30}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
        assert next(answer.iter_lines()) == "data: one"
    until(lambda: replicas.left == ["book"], 5)


def test_pieces_arrive_as_they_are_written(base):
    body = {"model": "book", "pause": 0.2}
    with httpx.stream("POST", f"{base}/v1/chat/completions", json=body) as answer:
        times = [time.monotonic() for line in answer.iter_lines() if line]
    assert times[1] - times[0] > 0.1
