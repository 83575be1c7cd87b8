"""A server under clients that come, ask at random and leave: what it withstands, and gives back."""

import random
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families

from tests.cli.conftest import PROGRAM

CLIENTS = 16
HANG_UPS = 0.3
MOST_TOKENS = 48
REMEMBERED = "32MiB"
"""Memory for turns: so little that it is full before anything is measured."""
SELECTORS: tuple[dict[str, Any], ...] = (
    {},
    {"selector": "topk", "options": {"budget": "64"}},
    {"selector": "quest", "options": {"budget": "64"}},
    {"selector": "topk", "options": {"budget": "2%"}},
)
WORDS = ("the", "magic", "number", "for", "blue", "corpus", "is", "not", "what", "was", "asked", "before")


@dataclass
class Served:
    """`offload-decode serve` in a process of its own, until the block ends."""

    stores: list[Path]
    base: str = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        command = ["serve", *map(str, self.stores), "--port", "0", "--memory-for-turns", REMEMBERED]
        self.process = subprocess.Popen([*PROGRAM, *command], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        assert next(self.process.stderr).startswith("serving ")
        self.base = next(self.process.stderr).split()[-1]
        until = time.monotonic() + 120
        while httpx.get(f"{self.base}/health", timeout=60).status_code != 200:
            assert time.monotonic() < until, "it never became ready"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def own_bytes(self) -> int:
        """Anonymous memory: pages of mapped files are not its own."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        return int(said["RssAnon"].split()[0]) * 1024

    def metric(self, name: str) -> float:
        """The sum over all labels."""
        text = httpx.get(f"{self.base}/metrics", timeout=30).text
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        assert any(one.name == f"offload_decode:{name}" for one in samples), name
        return sum(one.value for one in samples if one.name == f"offload_decode:{name}")

    def busy(self) -> float:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting")

    def bytes_at_rest(self) -> int:
        """The least of some looks, when nothing runs or waits any more."""
        until = time.monotonic() + 60
        while self.busy() and time.monotonic() < until:
            time.sleep(0.1)
        return min(self.own_bytes() for _ in range(10) if not time.sleep(0.2))


@dataclass
class Crowd:
    """Clients of the stores and of the model alone, which is the last of `models`."""

    server: Served
    models: list[str]
    rng: random.Random
    whole: int = 0
    left: int = 0
    errors: list[str] = field(default_factory=list)

    def stay(self, clients: int, seconds: float) -> None:
        """So many ask again and again for so long."""
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as pool:
            for one in [pool.submit(self._one, until) for _ in range(clients)]:
                one.result()

    def _one(self, until: float) -> None:
        http = httpx.Client(trust_env=False)
        with OpenAI(
            base_url=f"{self.server.base}/v1", api_key="none", max_retries=0, http_client=http
        ) as client:
            while time.monotonic() < until:
                body, leaves = self._body(), self.rng.random() < HANG_UPS
                # Before the first token, or behind some.
                patience = self.rng.uniform(0.01, 0.5) if leaves and self.rng.random() < 0.5 else 120
                most = self.rng.randrange(1, body["max_tokens"]) if leaves and patience == 120 else 1 << 30
                self.left += leaves
                try:
                    with client.chat.completions.create(stream=True, timeout=patience, **body) as chunks:
                        read = list(islice(chunks, most))
                    ends = sum(bool(choice.finish_reason) for chunk in read for choice in chunk.choices)
                    assert leaves or ends == body["n"], "the stream ended before the answer did"
                    self.whole += not leaves
                except (OpenAIError, httpx.HTTPError, AssertionError) as error:
                    if not leaves:
                        self.errors.append(f"{type(error).__name__}: {error}")

    def _body(self) -> dict[str, Any]:
        rng, model = self.rng, self.rng.choice(self.models)
        question = " ".join(rng.choices(WORDS, k=rng.randrange(1, 400)))
        return {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": rng.randrange(2, MOST_TOKENS),
            "temperature": rng.choice((0.0, 1.0)),
            "n": rng.choice((1, 1, 1, 2)),
            "extra_body": rng.choice(SELECTORS) if model != self.models[-1] else {},
        }


@pytest.fixture(scope="module")
def stores(shelf, tmp_path_factory):
    home = tmp_path_factory.mktemp("soak")
    return [
        Path(shutil.copytree(shelf / "stores" / "book.kv", home / f"copy-{number}.kv")) for number in range(3)
    ]


@pytest.fixture
def crowd(stores):
    with Served(stores) as server:
        told = httpx.get(f"{server.base}/v1/models", timeout=60).json()["data"]
        yield Crowd(server, [one["id"] for one in told], random.Random(0))


@pytest.mark.slow
def test_memory_returns_to_normal_after_clients_come_and_leave(crowd):
    for _ in range(8):  # until everything has been opened, compiled and filled once
        crowd.stay(CLIENTS, 4)
        if crowd.server.metric("kv_cache_usage_perc") > 0.8:
            break
    before = crowd.server.bytes_at_rest()
    crowd.stay(CLIENTS, 12)
    assert crowd.server.bytes_at_rest() <= 1.05 * before
    assert crowd.server.busy() == 0
    assert crowd.errors == []
    assert min(crowd.whole, crowd.left) > CLIENTS


@pytest.mark.slow
def test_a_server_killed_under_load_leaves_whole_stores_and_serves_again(crowd):
    killer = threading.Timer(2, crowd.server.kill)
    killer.start()
    crowd.stay(CLIENTS, 4)
    killer.join()
    assert crowd.errors, "nobody was asking"
    for store in crowd.server.stores:
        subprocess.run([*PROGRAM, "verify", str(store), "--quiet"], capture_output=True, check=True)
    crowd.server.start()
    crowd.errors.clear()
    crowd.whole = 0
    crowd.stay(4, 2)
    assert crowd.errors == []
    assert crowd.whole > 0
