"""SnapKV: the question's last tokens vote once, neighbours share their highest vote."""

import pytest
import torch
from torch.nn.functional import max_pool1d

from offload_decode.common.errors import ConfigError
from offload_decode.selectors import scores, snapkv
from offload_decode.testing.selector_contract import LAYER, SelectorContract, floats, selected_ids
from tests.selectors.evicting import asked, passes, sampled


def pooled_votes(store, head, queries, window, kernel):
    """Straight from the definition, in float64."""
    keys = floats(store.keys(LAYER, head)).double()
    votes = torch.zeros(len(keys), dtype=torch.float64)
    for of_head in queries.by_token()[head, 0].double():
        for row in of_head[-window:]:
            votes += queries.logits(keys @ row).softmax(0)
    reach = kernel // 2
    return torch.stack([votes[max(0, i - reach) : i + reach + 1].max() for i in range(len(votes))])


class TestSnapKV(SelectorContract):
    name = "snapkv"

    @pytest.mark.parametrize("blocks", [1 << 22, 50])
    @pytest.mark.parametrize(("window", "kernel"), [(32, 7), (1, 1), (4, 3), (12, 41)])
    def test_the_chosen_hold_the_highest_pooled_votes(self, store, window, kernel, blocks, monkeypatch):
        monkeypatch.setattr(scores, "BLOCK_SCORES", blocks)
        queries = asked(store, softcap=2.0)
        held = self.make(store, budget="6", window=window, kernel=kernel)
        ids = selected_ids(held, queries)
        if ids is None:
            return
        for head, own in enumerate(ids):
            assert torch.equal(own, own[:1].expand_as(own)), "one list for all rows"
            votes = pooled_votes(store, head, queries, window, kernel)
            torch.testing.assert_close(votes[own[0]], votes.topk(6).values, atol=0, rtol=1e-4)

    def test_one_head_votes_at_a_time(self, store, monkeypatch):
        pooled = []

        def noted(votes, *size, **how):
            pooled.append(tuple(votes.shape))
            return max_pool1d(votes, *size, **how)

        monkeypatch.setattr(snapkv, "max_pool1d", noted)
        tokens, budget = store.manifest.n_tokens, min(6, store.manifest.n_tokens - 1)
        selected_ids(self.make(store, budget=str(budget)), asked(store))
        assert pooled == [(1, tokens)] * store.manifest.shape.kv_heads

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_stores_of_low_precision(self, tmp_path, dtype):
        store = sampled(tmp_path, 30, 8, dtype)
        queries = asked(store)
        for head, own in enumerate(selected_ids(self.make(store, budget="6"), queries)):
            votes = pooled_votes(store, head, queries, 32, 7)
            torch.testing.assert_close(votes[own[0]], votes.topk(6).values, atol=0, rtol=1e-4)

    def test_the_first_pass_chooses_for_the_whole_answer(self, store):
        if store.manifest.n_tokens == 1:
            return
        queries, held = asked(store), self.make(store, budget="6")
        first, then, last = passes(queries, 4, 1, 7)
        chosen = selected_ids(held, first)[:, 0]
        for part in (then, last):
            ids = selected_ids(held, part)
            assert torch.equal(ids, chosen[:, None].expand_as(ids))
        forked = held.fork()
        held.selector.reset()
        assert not torch.equal(selected_ids(held, last)[:, 0], chosen)
        assert torch.equal(selected_ids(forked, last)[:, 0], chosen)

    @pytest.mark.parametrize(
        "wrong", [{"kernel": 4}, {"kernel": -1}, {"window": 0}, {"kernel": 10**30 + 1}, {"window": 10**30}]
    )
    def test_a_window_of_nothing_and_an_even_kernel_are_refused(self, store, wrong):
        with pytest.raises(ConfigError, match="odd"):
            self.make(store, **wrong)
