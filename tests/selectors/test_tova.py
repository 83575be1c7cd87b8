"""TOVA: the token that the current query attends to least is dropped."""

from __future__ import annotations

from itertools import pairwise

from offload_decode.testing.selector_contract import LAYER, floats
from tests.selectors.evicting import EvictingContract, asked, kept_sets


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
