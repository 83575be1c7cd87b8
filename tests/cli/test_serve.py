"""`offload-decode serve`: what it refuses before it listens, and a server from its start to its end."""

import json
import os
import re
import signal
import socket
import subprocess
import time

import httpx
import pytest

from offload_decode.cli import serve
from offload_decode.server.http.app import address_of, bind, is_loopback
from offload_decode.server.http.security import LOOPBACK
from offload_decode.server.requests import Settings
from tests.cli.conftest import PROGRAM, refused, run


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ([], "name a store"),
        (["none.kv", "--port", "0"], "none.kv"),
        (["STORE", "--api-key", " "], "an empty key"),
        (["STORE", "--api-key-file", "none"], "cannot be read"),
        (["STORE", "--host", "no.such.host.invalid"], "no.such.host"),
        *(
            (["STORE", "--port", "0", option, "many"], "many")
            for option in ("--max-prompt", "--max-body", "--memory-for-turns")
        ),
    ],
)
def test_wrong_use_of_serve_is_refused(store, args, told):
    assert told in refused(2, "serve", *(str(store) if arg == "STORE" else arg for arg in args))


def test_a_port_that_is_taken_is_one_sentence(store):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in refused(2, "serve", store, "--port", str(port))


def test_access_follows_keys_and_host():
    open_here = serve.access_of([], None, ["https://chat.example/"], "127.0.0.1", True)
    assert open_here.hosts == LOOPBACK
    assert open_here.origins == ("https://chat.example",)
    assert serve.access_of(["sesame"], None, [], "127.0.0.1", True).hosts == frozenset()
    assert serve.access_of([], None, [], "0.0.0.0", False).hosts == frozenset()
    assert all(map(is_loopback, ("127.0.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "example.org")))


def test_the_defaults_are_those_of_the_settings():
    shown = run("serve", "--help").out
    settings = Settings()
    for said in (settings.max_tokens, settings.max_running, settings.max_waiting, settings.deadline_s):
        assert f"[default: {said}" in " ".join(shown.split())
    assert (settings.max_prompt, settings.max_body, settings.generated_bytes) == (
        128 << 10,
        32 << 20,
        1 << 30,
    )


def test_the_address_is_a_url():
    with bind("localhost", 0) as bound:
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", address_of(bound))
    assert isinstance(bound, socket.socket)


@pytest.mark.slow
def test_a_server_from_its_start_to_its_end(home):
    command = [*PROGRAM, "serve", str(home), "--port", "0"]
    environment = {**os.environ, "OFFLOAD_DECODE_API_KEY": "sesame"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        assert next(server.stderr).startswith("serving store, ")
        address = next(server.stderr).split()[-1]
        client = httpx.Client(base_url=address, headers={"Authorization": "Bearer sesame"}, timeout=60)
        assert httpx.get(f"{address}/v1/models").status_code == 401
        body = {"model": "store", "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 4}
        while (answer := client.post("/v1/chat/completions", json=body)).status_code == 503:
            time.sleep(0.1)  # the model is being loaded
        assert answer.json()["usage"]["completion_tokens"] == 4
        long = {**body, "max_tokens": 100_000, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert "the server is being stopped" in json.loads(last.removeprefix("data: "))["error"]["message"]
        rest = server.stderr.read()
        assert server.wait(timeout=30) == 0
    finally:
        server.kill()
    assert "Traceback" not in rest
