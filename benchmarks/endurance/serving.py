"""A server that answers all the while, and servers that are killed while they answer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks import servers
from benchmarks.endurance.commands import QUESTIONS
from benchmarks.endurance.rounds import Outcome

FLAT = 1.05
"""Memory may grow by so much from the second third of the time to the last."""
_LOOKS = 6  # at the least


def answers(server: servers.Server) -> list[str]:
    """What it answers to the questions. Raises `httpx.HTTPError`."""
    found = []
    for question in QUESTIONS:
        asked = {"model": "a", "messages": [{"role": "user", "content": question}]}
        told = httpx.post(
            f"{server.base}/v1/chat/completions",
            json={**asked, "max_tokens": 8, "temperature": 0},
            timeout=300,
            trust_env=False,
        )
        told.raise_for_status()
        body: Any = told.json()
        found.append(body["choices"][0]["message"]["content"])
    return found


class Steady:
    """A server from the first round to the last: it answers as it did first, in the same memory.

    memory: its own bytes after every round.
    """

    def __init__(self, server: servers.Server) -> None:
        self.server = server
        self.expected = answers(server)
        self.memory: list[int] = []

    def ask(self) -> Outcome:
        """Ask again, and look at its memory."""
        try:
            found = answers(self.server)
        except httpx.HTTPError as error:
            return Outcome(False, lost=f"the server does not answer: {error}")
        self.memory.append(self.server.memory()["own"])
        return Outcome(False, wrong="" if found == self.expected else f"it answers {found}")


def is_flat(memory: Sequence[int]) -> bool:
    """Whether memory stayed what it was; so too where there was no time to tell."""
    third = len(memory) // 3
    return len(memory) < _LOOKS or median(memory[-third:]) <= FLAT * median(memory[third:-third])


def killed(store: Path, log: Path, after: float, expected: list[str]) -> Outcome:
    """Kill a server of `store` when it has answered for `after` seconds; whether it then answers as
    `expected`.
    """
    with servers.ours([store], log) as server:
        timer = threading.Timer(after, server.kill)
        timer.start()
        try:
            answers(server)
            struck = False
        except httpx.HTTPError:
            struck = True
        timer.join()
        server.start()
        found = answers(server)
    return Outcome(struck, wrong="" if found == expected else f"it answers {found}")
