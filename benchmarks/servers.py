"""Servers in processes of their own: ours, transformers' own, and llama.cpp's; started, asked how they are,
stopped.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent
PREFIX = "offload_decode:"


def free_port() -> int:
    """A port that nobody listens at."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Server:
    """A command that listens at `port` until the block ends; `log` holds what it says."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"

    @property
    def base(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def start(self) -> None:
        """Start it, and wait until it is well."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, **self.environment}
            )
        try:
            self.wait()
        except BaseException:
            self.kill()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float = 180.0) -> None:
        """Until it says that it is well. Raises `RuntimeError` where it ends before, or never says so."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise RuntimeError(f"{self.name} has ended: {self._last_words()}")
            try:
                if httpx.get(self.base + self.health, timeout=5, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass  # it does not listen yet
            time.sleep(0.1)
        raise RuntimeError(f"{self.name} is not ready after {seconds:.0f} s: {self._last_words()}")

    def memory(self) -> dict[str, int]:
        """Bytes that it holds: of its `own`, and with the pages of files that are mapped (`all`)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        said = dict(line.split(":", 1) for line in lines)
        return {
            name: int(said[key].split()[0]) * 1024 for name, key in (("own", "RssAnon"), ("all", "VmRSS"))
        }

    def metrics(self) -> dict[str, float]:
        """Sums over all labels of what ours counts, by name."""
        told = httpx.get(f"{self.base}/metrics", timeout=30, trust_env=False)
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(told.text):
            for sample in family.samples:
                name = sample.name.removeprefix(PREFIX)
                sums[name] = sums.get(name, 0.0) + sample.value
        return sums

    def _last_words(self) -> str:
        return self.log.read_text(errors="replace").strip()[-600:]


def ours(stores: Sequence[Path], log: Path, *more: str) -> Server:
    """`offload-decode serve`."""
    port = free_port()
    program = "from offload_decode.cli.main import main; main()"
    command = [sys.executable, "-c", program, "serve", *map(str, stores), "--port", str(port), *more]
    return Server("offload-decode", command, port, log)


def transformers(model: str, log: Path, *more: str) -> Server:
    """transformers' own `serve`, on the CPU, in float32."""
    port = free_port()
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    return Server(
        "transformers serve",
        [*command, "--device", "cpu", "--dtype", "float32", *more],
        port,
        log,
        {"HF_HUB_OFFLINE": "1"},
    )


def llama(program: str, gguf: Path, context: int, slots: int, log: Path) -> Server:
    """llama.cpp's `llama-server`, its prompt cache on (as it is unless told otherwise), `slots` at once."""
    port = free_port()
    command = [program, "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--ctx-size", str(context), "--parallel", str(slots), "--kv-unified"]
    return Server("llama.cpp", command, port, log)
