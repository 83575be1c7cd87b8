"""Dense prefill: every chunk attends to all that came before it."""

from __future__ import annotations

from offload_decode.attention.queries import Queries
from offload_decode.prefill_jobs.methods.base import Earlier, Method


class Dense(Method):
    """Attend to everything; what the others are measured against."""

    name = "dense"
    paper = "none: exact attention"
    chunk_shapes = False

    def select(self, layer: int, queries: Queries, earlier: Earlier) -> None:
        """All tokens."""
