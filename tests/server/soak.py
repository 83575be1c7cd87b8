"""A server under clients that come, ask at random and leave: `python -m tests.server.soak --store STORE`.

`--clients 64` ask for `--minutes 10`, of random stores and of the model alone, with random selectors, lengths
and temperatures; three of ten hang up, before the first token or in the middle. Then the server is killed
(SIGKILL) under load `--kills 3` times, its stores are verified, and it is started again. One table says what
held: no error; nothing running or waiting when all have left; memory after within 5 % of memory before; the
slowest first tokens of the second half no slower than twice those of the first. Exits with 1 where anything
did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from benchmarks import servers
from benchmarks.clients import Body, Seen, ask, client, quantile
from benchmarks.serve import copies
from benchmarks.tables import table

STORES = 3
HANG_UPS = 0.3
MOST_TOKENS = 48
MOST_WORDS = 400
REMEMBERED = "32MiB"
"""Memory for turns: so little that it is full before anything is measured."""
FULL = 0.8
SELECTORS: tuple[Body, ...] = (
    {},
    {"selector": "topk", "options": {"budget": "64"}},
    {"selector": "quest", "options": {"budget": "64"}},
    {"selector": "topk", "options": {"budget": "2%"}},
)
_WORDS = ("the", "magic", "number", "for", "blue", "corpus", "is", "not", "what", "was", "asked", "before")

Row = tuple[str, str, str]


@dataclass
class Crowd:
    """Clients, and what they have seen; `left` counts those that hung up."""

    base: str
    models: Sequence[str]
    patience: float
    rng: random.Random
    seen: list[Seen] = field(default_factory=list)
    left: int = 0

    async def stay(self, clients: int, seconds: float) -> None:
        """So many ask again and again for so long."""
        until = time.monotonic() + seconds
        async with client(self.base, clients, self.patience) as http:
            await asyncio.gather(*(self._one(http, until) for _ in range(clients)))

    async def _one(self, http: httpx.AsyncClient, until: float) -> None:
        while time.monotonic() < until:
            body = self._body()
            if self.rng.random() >= HANG_UPS:
                self.seen.append(await ask(http, body))
                continue
            self.left += 1
            if self.rng.random() < 0.5:  # whenever it may be, before the first token too
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ask(http, body), self.rng.uniform(0.0, 0.5))
            else:
                await ask(http, body, hang_up=self.rng.randrange(1, body["max_tokens"]))

    def _body(self) -> Body:
        rng, model = self.rng, self.rng.choice(self.models)
        question = " ".join(rng.choices(_WORDS, k=rng.randrange(1, MOST_WORDS)))
        stored = model != self.models[-1]
        return {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": rng.randrange(2, MOST_TOKENS),
            "temperature": rng.choice((0.0, 1.0)),
            "n": rng.choice((1, 1, 1, 2)),
            "stream_options": {"include_usage": True},
            **(rng.choice(SELECTORS) if stored else {}),
        }


def soaked(server: servers.Server, crowd: Crowd, clients: int, seconds: float) -> Iterator[Row]:
    """Rows of what held while clients came and went for so long."""
    for _ in range(5):  # until everything has been opened, compiled and filled once
        asyncio.run(crowd.stay(clients, seconds / 5))
        if server.metrics()["kv_cache_usage_perc"] > FULL:
            break
    before, (asked, left) = at_rest(server), (len(crowd.seen), crowd.left)
    asyncio.run(crowd.stay(clients, seconds))
    after, seen = at_rest(server), crowd.seen[asked:]
    errors = sorted({one.error for one in crowd.seen if one.error})
    yield "answers, all of them whole", f"{len(seen):,}", held(not errors and bool(seen), "; ".join(errors))
    yield "clients that hung up", f"{crowd.left - left:,}", ""
    rest = {name: server.metrics().get(f"num_requests_{name}", 0) for name in ("running", "waiting")}
    yield "requests left over", str(rest), held(not any(rest.values()))
    change = after / before - 1
    yield f"memory after {before / 1e6:,.0f} MB before", f"{change:+.1%}", held(change <= 0.05)
    halves = [quantile([one.first for one in half if one.pieces], 0.99) for half in in_half(seen)]
    yield (
        "p99 of the first token, by halves",
        " s, ".join(f"{half:.2f}" for half in halves) + " s",
        held(halves[1] <= 2 * halves[0]),
    )


def at_rest(server: servers.Server, patience: float = 60.0) -> int:
    """The server's own bytes when nothing runs or waits any more, the least of some looks."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        told = server.metrics()
        if not told.get("num_requests_running") and not told.get("num_requests_waiting"):
            break
        time.sleep(0.1)
    found = []
    for _ in range(10):
        time.sleep(0.2)
        found.append(server.memory()["own"])
    return min(found)


def in_half(seen: Sequence[Seen]) -> tuple[list[Seen], list[Seen]]:
    """Earlier and later ones."""
    ordered = sorted(seen, key=lambda one: one.began)
    return ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]


def killed(server: servers.Server, crowd: Crowd, stores: Sequence[Path], seconds: float) -> bool:
    """Kill the server while clients ask, and start it again: whether the stores are whole, and answer."""

    async def under_load() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(crowd.stay(16, seconds))
            await asyncio.sleep(seconds / 2)
            server.kill()

    asyncio.run(under_load())
    whole = all(verified(store) for store in stores)
    server.start()
    crowd.seen.clear()
    asyncio.run(crowd.stay(4, seconds / 2))
    return whole and not any(one.error for one in crowd.seen)


def verified(store: Path) -> bool:
    """What `offload-decode verify` says."""
    program = "from offload_decode.cli.main import main; main()"
    command = [sys.executable, "-c", program, "verify", str(store), "--quiet"]
    return subprocess.run(command, cwd=servers.ROOT, capture_output=True, check=False).returncode == 0


def held(good: bool, why: str = "") -> str:
    return "held" if good else f"FAILED {why}"


def rows(store: Path, home: Path, clients: int, seconds: float, kills: int, seed: int = 0) -> Iterator[Row]:
    """Everything, in `home`, a folder that is empty."""
    rng, stores = random.Random(seed), copies(store, STORES, home)
    with servers.ours(stores, home / "server.log", "--memory-for-turns", REMEMBERED) as server:
        told = httpx.get(f"{server.base}/v1/models", trust_env=False).json()["data"]
        crowd = Crowd(server.base, [one["id"] for one in told], 120.0, rng)  # the bare model is the last
        yield from soaked(server, crowd, clients, seconds)
        good = sum(killed(server, crowd, stores, min(4.0, seconds)) for _ in range(kills))
        yield (
            "killed, stores whole, started again",
            f"{kills:,}",
            held(good == kills, f"{kills - good} times"),
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True, help="made with `offload-decode prefill`")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    with TemporaryDirectory(prefix="offload-decode-soak-") as home:
        seconds = 60 * given.minutes
        found = [*rows(given.store, Path(home), given.clients, seconds, given.kills, given.seed)]
    print(table(("what", "how much", "what held"), found))
    sys.exit(any("FAILED" in each[2] for each in found))


if __name__ == "__main__":
    main()
