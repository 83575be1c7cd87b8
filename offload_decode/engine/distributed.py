"""A prefix whose tokens are attended to in parts, elsewhere: each part gives a state, and they are merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

from torch import Tensor

from offload_decode.attention.state import merge_states
from offload_decode.attention.transfers import to_device
from offload_decode.common.errors import ConfigError
from offload_decode.engine.step import Finish, StoredPrefix
from offload_decode.types import AttentionState, StepStats

Promised = Callable[[], Sequence[tuple[AttentionState, StepStats]]]
Ask = Callable[[int, Tensor, float, float | None], Promised]
"""Begins to attend, as `Prefix.begin` does, from a float32 query on the host to every part; what is returned
waits for the state of each and what it cost.
"""


class ScatteredPrefix(StoredPrefix):
    """The prefix of a whole store, of which nothing is read here but windows and states.

    Every part chooses among its own tokens, with a selector and budgets of its own, so that a budget of 2% is
    2% of each part, and one of 1024 is that many of each. Merging is exact: with all tokens chosen, it is the
    attention of one process.

    Raises `ConfigError` for selectors that remember a conversation, which the parts do not know.
    """

    def __init__(self, whole: StoredPrefix, ask: Ask):
        super().__init__(whole.host, whole.chosen)
        if whole.selector.remembers:
            raise ConfigError(
                f"selector '{whole.selector.name}' remembers a conversation: choose another, such as topk"
            )
        self.ask = ask

    def begin(self, layer: int, query: Tensor, scaling: float, softcap: float | None) -> Finish:
        if self.watches:
            raise ConfigError("what a store in parts attended to is not told: leave citations out")
        return partial(self._merged, query, self.ask(layer, query.detach().float().cpu(), scaling, softcap))

    def _merged(self, query: Tensor, promised: Promised) -> AttentionState:
        with self.stats.timed("attend_s"):
            parts = promised()
            state = reduce(merge_states, (state for state, _ in parts))
        for number, (_, cost) in enumerate(parts):
            self.stats.selected += cost.selected
            self.stats.rows += 0 if number else cost.rows
            self.stats.bytes_moved += cost.bytes_moved
            self.stats.add(StepStats(by_layer=cost.by_layer, attended=cost.attended))
        return AttentionState(*(to_device(part, query.device) for part in state))

    def fork(self) -> ScatteredPrefix:
        return ScatteredPrefix(self, self.ask)
