"""Strangers, byte by byte: a server in a process of its own, and sockets that send what no client does."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest

from offload_decode.server.http import connection
from offload_decode.server.http.connection import MOST_HEADER_BYTES, MOST_HEADERS

ROOT = Path(__file__).parents[3]
SERVER = """
import sys
from offload_decode.server.http import connection
from offload_decode.server.http.app import bind, create_app, listen
from offload_decode.server.http.security import Access
from tests.server.fakes import FakeService

connection.WAIT_S = 1.0
bound = bind("127.0.0.1", 0)
print(bound.getsockname()[1], flush=True)
listen(create_app(FakeService(), Access(keys=("sesame",))), bound, 0)
"""
GET = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        yield process
        process.terminate()


@pytest.fixture(scope="module")
def port(server) -> int:
    number = int(server.stdout.readline())
    assert answer_to(number, [GET + b"\r\n"])  # it has started
    return number


def answer_to(port: int, sent: Iterable[bytes]) -> bytes:
    """What comes back until the server closes; empty where it cuts the connection off."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as there:
        answer = b""
        try:
            for piece in sent:
                there.sendall(piece)
            while piece := there.recv(1 << 16):
                answer += piece
        except ConnectionError:
            pass
        return answer


def cpu_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")")[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


ENDLESS = {
    "a request line": [b"GET /", b"a" * (32 << 20)],
    "a header": [GET + b"a: ", b"a" * (32 << 20)],
    "headers": [GET, b"a: b\r\n" * (4 << 20)],
    "an extension of a chunk": [POST, b"1;a=", b"a" * (32 << 20)],
    "trailers": [POST, b"0\r\n", b"a: b\r\n" * (4 << 20)],
    "chunks of one byte": [POST, b"1\r\na\r\n" * (4 << 20)],
}


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="reads the time of a process from /proc")
@pytest.mark.parametrize("sent", ENDLESS.values(), ids=ENDLESS)
def test_what_has_no_end_is_cut_off_and_costs_next_to_nothing(sent, server, port) -> None:
    before = cpu_s(server)
    assert b"HTTP/1.1 200" not in answer_to(port, sent)
    assert cpu_s(server) - before < 0.8


@pytest.mark.parametrize("sent", [b"a: " + b"a" * 2 * MOST_HEADER_BYTES, b"a: b\r\n" * (MOST_HEADERS + 1)])
def test_headers_that_are_too_large_are_refused_by_name(sent, port) -> None:
    head, _, body = answer_to(port, [GET + sent + b"\r\n\r\n"]).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert b"send up to 128 headers, of 16,384 bytes together" in body


def test_headers_up_to_the_limit_and_bodies_in_pieces_are_read(port) -> None:
    most = {f"a{n}": "b" * 100 for n in range(MOST_HEADERS - 10)}
    address = f"http://127.0.0.1:{port}"
    assert httpx.get(f"{address}/health", headers=most).status_code in (200, 503)
    body = b'{"model": "book", "prompt": "' + b"a" * 9000 + b'"}'
    given = {"Authorization": "Bearer sesame", "Content-Type": "application/json"}
    pieces = (body[at : at + 1] for at in range(len(body)))
    assert httpx.post(f"{address}/v1/completions", content=pieces, headers=given).status_code == 200


@pytest.mark.parametrize("sent", [b"", GET, POST + b"1\r\n"], ids=["nothing", "half a header", "half a body"])
def test_who_sends_nothing_more_is_not_waited_for(sent, port) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as there:
        there.sendall(sent)
        while there.recv(1 << 16):
            pass  # the refusal of a body without a key


def test_a_header_that_drips_is_not_waited_for(port) -> None:
    began = time.monotonic()
    assert not answer_to(port, (time.sleep(0.1) or b"G" for _ in range(300)))
    assert time.monotonic() - began < 15


STRANGE = [
    b"Host: [\r\nOrigin: http://[\r\n",
    b"Host: a\r\nOrigin: http://[\r\n",
    b"Host: a\r\nOrigin: http://a:b:c@[::/\r\n",
    b"Host: \xff\xfe\r\nOrigin: \xff\r\n",
    b"Host: a@b:99999999\r\nOrigin: null\r\n",
    b"Host:\r\n",
    b"Host: a\r\nHost: b\r\n",
    b"",
]


@pytest.mark.parametrize("headers", STRANGE)
def test_strange_names_and_origins_are_answered_in_the_form_of_errors(headers, port) -> None:
    for path in (b"/v1/completions", b"/v1/models/", b"/health", b"//a/[", b"/\xff", b"http://[/health"):
        for key in (b"", b"Authorization: Bearer sesame\r\n"):
            head = (
                b"POST " + path + b" HTTP/1.1\r\nContent-Length: 0\r\nConnection: close\r\n" + key + headers
            )
            answer = answer_to(port, [head + b"\r\n"])
            assert answer.split()[1][:1] in b"234", answer
            assert b'{"error":' in answer or b"HTTP/1.1 3" in answer


def test_seconds_that_are_waited_are_many_for_clients() -> None:
    assert connection.WAIT_S >= 30
