"""H2O: half heavy hitters by the sum of their attention, half recent."""

from __future__ import annotations

import operator

import torch

from offload_decode.testing.selector_contract import LAYER
from tests.selectors.evicting import EvictingContract, asked, kept_sets


class TestH2O(EvictingContract):
    name = "h2o"
    judge = staticmethod(operator.add)
    recent = staticmethod(lambda k: k // 2)

    def test_the_recent_half_slides_on_over_the_question(self, small):
        """Of k = 10, the newest five are kept; each token of the question takes a place among them."""
        tokens = small.manifest.n_tokens
        if tokens <= 10:
            return
        for head in kept_sets(self.make(small, budget="10"), asked(small, tokens=6)):
            for asked_before, kept in enumerate(head):
                assert kept >= set(range(tokens - 5 + asked_before, tokens))

    def test_a_sample_weighs_as_the_queries_it_stands_for(self, small):
        held = self.make(small, budget="2")
        held.select(LAYER, asked(small, tokens=1))
        (replay,) = held.selector.replays.values()
        all_queries = small.manifest.n_tokens * small.manifest.shape.group
        assert replay.merit.shape == (small.manifest.shape.kv_heads, 2)
        # The two that are kept hold at most what all queries gave, and never less than one query's worth.
        assert torch.all(replay.merit.sum(1) <= all_queries * (1 + 1e-5))
        assert torch.all(replay.merit.sum(1) >= small.manifest.shape.group * 0.5)
