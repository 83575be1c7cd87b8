"""Processes that train together hold the mean of their gradients, and stop together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch

from training.sharing import Team

MEMBER = """
import torch
from training.sharing import Team
team = Team()
with team.in_turn():
    print("begins", team.rank, flush=True)
first, second = torch.full((2, 3), float(team.rank)), torch.tensor([4.0 * team.rank])
team.average([first, None, second])
print("mean", first.tolist(), second.tolist(), team.any(team.rank == 1), team.any(False))
"""


def test_two_hold_the_mean_and_begin_in_turn() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared["CUDA_VISIBLE_DEVICES"] = ""
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER],
            env=shared | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [member.communicate(timeout=120)[0].splitlines() for member in members]
    for rank, lines in enumerate(said):
        assert lines == [f"begins {rank}", "mean [[0.5, 0.5, 0.5], [0.5, 0.5, 0.5]] [2.0] True False"]


def test_one_by_itself_waits_for_nobody() -> None:
    team = Team()
    gradient = torch.tensor([1.0, 2.0])
    with team.in_turn():
        team.average([gradient])
    assert gradient.tolist() == [1.0, 2.0]
    assert team.first
    assert team.any(True)
    assert not team.any(False)
