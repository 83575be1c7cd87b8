"""An app behind uvicorn on a loopback port, in a thread, for clients as people use them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import uvicorn
from openai import OpenAI

from server.http.app import create_app
from server.http.security import Access
from tests.server.fakes import FakeService


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an app that serves inside the block."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def serve(service: FakeService) -> Iterator[Callable[..., str]]:
    """Serves the service, with what `Access` is given."""
    with ExitStack() as stack:
        yield lambda **access: stack.enter_context(listening(create_app(service, Access(**access))))


@pytest.fixture
def url(serve: Callable[..., str]) -> str:
    """The address of an open server."""
    return serve()


@pytest.fixture
def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)
