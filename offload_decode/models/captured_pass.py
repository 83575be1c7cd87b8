"""A decoder's pass as CUDA graphs: one before each attention, and one behind the last."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload_decode.errors import UnsupportedModel
from offload_decode.models.recorded import Asked, RecordedCache


class _Stop(NamedTuple):
    """An attention of the pass, and where the graph behind it reads what is answered."""

    asked: Asked
    answer: Tensor


class CapturedPass:
    """A decoder's pass over `ids [B, T]` as graphs. One at a time runs it: its tensors are the same ones
    every time.
    """

    def __init__(self, forward: Callable[..., Any], layers: int, ids: Tensor, positions: Tensor, pool: Any):
        self._ids, self._positions = ids.clone(), positions.clone()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stops: list[_Stop] = []
        self._pool = pool
        cache = RecordedCache(layers, int(positions.max()), self._stopped)
        self._begin()
        try:
            self.output = passed(forward, self._ids, self._positions, cache)
        except BaseException:
            with suppress(RuntimeError):  # what was not allowed has ended it already
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()
        given = [name for name, one in self.output.items() if isinstance(one, Tensor | tuple)]
        if given != ["last_hidden_state"] or self._ids.shape != self.output.last_hidden_state.shape[:2]:
            raise UnsupportedModel("this decoder gives something else than a state for each token")

    @property
    def layers(self) -> list[int]:
        """Whose attention it stops at, in order."""
        return [stop.asked.layer for stop in self._stops]

    def run(self, ids: Tensor, positions: Tensor, answers: Callable[[Asked], Tensor]) -> Tensor:
        """The states `[B, T, W]` of these tokens, which stand at `positions [B or 1, T]`."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        for graph, stop in zip(self._graphs, self._stops, strict=False):
            graph.replay()
            stop.answer.copy_(answers(stop.asked))
        self._graphs[-1].replay()
        return self.output.last_hidden_state.clone()  # type: ignore[no-any-return]

    def _stopped(self, asked: Asked) -> Tensor:
        """The pass came to an attention: the graph ends here, and the next one begins with an answer."""
        self._graphs[-1].capture_end()
        query, value = asked.query, asked.value
        answer = query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        self._stops.append(_Stop(asked, answer))
        self._begin()
        return answer

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may go on with a device meanwhile.
        self._graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")


def passed(forward: Callable[..., Any], ids: Tensor, positions: Tensor, cache: RecordedCache) -> Any:
    """What `forward` gives for `ids [B, T]` at `positions [B or 1, T]` behind a cache that is not one."""
    # A prepared mask is handed on as it is, and no attention looks at it.
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return forward(input_ids=ids, position_ids=positions, attention_mask=seen, cache=cache, use_cache=True)
