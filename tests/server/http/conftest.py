"""An app behind uvicorn on a loopback port, in a thread, for clients as people use them."""

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn
from fastapi import FastAPI
from openai import OpenAI

from offload_decode.server.http.app import create_app
from offload_decode.server.http.connection import Connection
from offload_decode.server.http.security import Access
from tests.server.fakes import FakeService


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The address of an app that serves inside the block."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        server = uvicorn.Server(
            uvicorn.Config(
                app, http=Connection, log_config=None, access_log=False, timeout_graceful_shutdown=1
            )
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def running():
    """An open server, one for all tests: starting and stopping one takes longer than most of them."""
    app = create_app(FakeService())
    with listening(app) as address:
        yield app, address


@pytest.fixture
def service(running):
    """What the open server asks in this test."""
    app, _ = running
    app.state.service = FakeService()
    return app.state.service


@pytest.fixture
def url(running, service):
    """The address of the open server."""
    return running[1]


@pytest.fixture
def client(url):
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


@pytest.fixture
def serve():
    """Starts a server of its own, with what `Access` is given."""
    with ExitStack() as stack:
        yield lambda settings=None, **access: stack.enter_context(
            listening(create_app(FakeService(settings), Access(**access)))
        )
