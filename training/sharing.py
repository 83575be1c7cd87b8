"""Processes that train one model together: each draws rows of its own, and they share their gradients.

torchrun starts them and says by the environment which is which; one process by itself is a team of one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Team:
    """All of them, seen from one."""

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        """Whether this one writes what all have made."""
        return self.rank == 0

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """The first by itself, then the others, who find what it has written."""
        if not self.first:
            dist.barrier()
        yield
        if self.first and self.size > 1:
            dist.barrier()

    def average(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Each tensor becomes its mean over all processes, in one message."""
        if self.size == 1:
            return
        mine = [tensor for tensor in tensors if tensor is not None]
        flat = torch.cat([tensor.flatten() for tensor in mine])
        dist.all_reduce(flat)
        flat /= self.size
        means = torch.split(flat, [tensor.numel() for tensor in mine])
        for tensor, mean in zip(mine, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

    def any(self, mine: bool) -> bool:
        """Whether it is so for one of them: all go on, or stop, together."""
        if self.size == 1:
            return mine
        flag = torch.tensor(int(mine), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
