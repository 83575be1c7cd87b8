"""H2O keeps half heavy hitters by the sum of their attention, half recent; TOVA drops the least attended."""

import operator
from itertools import pairwise

import torch

from offload_decode.testing.selector_contract import LAYER, floats
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


class TestTOVA(EvictingContract):
    name = "tova"
    judge = staticmethod(lambda before, attention: attention)
    recent = staticmethod(lambda k: 0)

    def test_each_token_of_the_question_drops_the_one_it_attends_to_least(self, small):
        if small.manifest.n_tokens <= 20:
            return
        queries = asked(small)
        for head, sets in enumerate(kept_sets(self.make(small, budget="20"), queries)):
            keys = floats(small.keys(LAYER, head))
            for token, (kept, left) in enumerate(pairwise(sets)):
                ids = sorted(kept)
                logits = queries.logits(queries.by_token()[head, 0, :, token] @ keys[ids].T)
                assert kept - left == {ids[int(logits.softmax(-1).sum(0).argmin())]}
