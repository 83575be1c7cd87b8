"""`/health`, `/metrics`, and the ids and lines of requests."""

import asyncio
import io
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from offload_decode.server import metrics
from offload_decode.server.http import errors
from offload_decode.server.metrics import Metrics


@pytest.fixture
def service():
    """`ready` and `busy` say what is in memory and what is being loaded."""
    known = SimpleNamespace(ready=[], busy=False, open_stores=lambda: ["secret-name"])
    known.models, known.loading = lambda: known.ready, lambda: known.busy
    return SimpleNamespace(metrics=Metrics(), loaded_models=known)


@pytest.fixture
def client(service):
    app = FastAPI()
    app.state.service = service
    app.include_router(errors.router())

    @app.get("/books/{name}")
    async def book(name: str) -> dict[str, str]:
        metrics.log_fields()["model"] = name
        return {}

    @app.get("/broken")
    def broken() -> None:
        raise ValueError("a text of the user's")

    return TestClient(errors.RequestLog(app), raise_server_exceptions=False)


@pytest.fixture
def lines():
    root, out = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    metrics.configure("json", out)
    yield out
    root.handlers[:], root.level = handlers, level


def test_health_is_503_until_the_first_model_is_there(client, service):
    assert client.get("/health").status_code == 200
    service.loaded_models.busy = True
    loading = client.get("/health")
    assert (loading.status_code, loading.json()["status"]) == (503, "loading")
    service.loaded_models.ready = ["demo"]
    ready = client.get("/health")
    assert (ready.status_code, ready.json()) == (200, {"status": "ok", "models_loaded": 1, "stores_open": 1})
    assert "secret" not in ready.text


def test_metrics_are_what_prometheus_reads(client, service):
    service.metrics.watch("book")
    told = client.get("/metrics")
    assert told.headers["content-type"].startswith("text/plain; version=")
    names = {family.name for family in text_string_to_metric_families(told.text)}
    assert "offload_decode:num_requests_waiting" in names


def test_the_request_id_is_returned(client):
    assert client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    first, second = (client.get("/health").headers["x-request-id"] for _ in range(2))
    assert first != second
    assert first


@pytest.mark.parametrize("given", ["a b", "x" * 129, "é", '"', ""])
def test_an_invalid_request_id_is_replaced(client, given):
    told = client.get("/health", headers={"X-Request-Id": given.encode("latin-1")})
    assert told.headers["x-request-id"] != given
    assert told.headers["x-request-id"].isalnum()


def test_every_request_has_one_line(client, lines):
    client.get("/books/one?secret=1", headers={"X-Request-Id": "r1"})
    (line,) = map(json.loads, lines.getvalue().splitlines())
    said = {name: line[name] for name in ("request_id", "method", "route", "status", "model")}
    assert said == {
        "request_id": "r1",
        "method": "GET",
        "route": "/books/{name}",
        "status": 200,
        "model": "one",
    }
    assert "secret" not in lines.getvalue()


def test_failures_are_logged_with_their_status(client, lines):
    client.get("/nowhere")
    client.get("/broken")
    seen = [json.loads(text) for text in lines.getvalue().splitlines()]
    assert [line["status"] for line in seen if line["message"] == "request"] == [404, 500]


def test_health_and_metrics_requests_are_not_logged(client, lines):
    client.get("/health")
    client.get("/metrics")
    assert not lines.getvalue()


def test_a_disconnected_client_is_logged_with_status_499(lines):
    async def gone(scope: Any, receive: Any, send: Any) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(
            errors.RequestLog(gone)({"type": "http", "method": "GET", "path": "/", "headers": []}, None, None)
        )
    assert json.loads(lines.getvalue())["status"] == errors.HUNG_UP
