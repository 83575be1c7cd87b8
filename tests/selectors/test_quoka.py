"""QuoKA against the paper's formulas, one sequence and one head at a time."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import Case, MemoryCases, assert_best


def unit(vectors):
    return vectors / vectors.norm(dim=-1, keepdim=True)


class TestQuoKA(SelectorContract, MemoryCases):
    name = "quoka"

    def test_one_token_is_the_cosine_with_the_mean_of_the_group(self, case):
        queries = case.queries(tokens=1)
        ids = case.make("quoka", budget="8").select(2, queries).ids
        of_group = queries.vectors.unflatten(1, (queries.batch, queries.group))
        scores = unit(of_group).mean(2) @ unit(case.keys(2)).transpose(1, 2)
        shared = ids.unflatten(1, (queries.batch, queries.group))
        assert_best(scores, shared[:, :, 0], 8)
        assert torch.equal(shared, shared[:, :, :1].expand_as(shared))

    def test_one_token_of_one_head_is_cosine_top_k(self, case):
        case = Case.drawn(case.host.length, 3, 3, case.shape.head_dim, case.dtype)
        queries = case.queries(tokens=1)
        ids = case.make("quoka", budget="8").select(2, queries).ids
        likeness = cosine_similarity(queries.vectors[:, :, None], case.keys(2)[:, None], dim=-1)
        assert_best(likeness, ids, 8)

    def test_the_queries_least_like_their_mean_are_kept(self, case):
        queries = case.queries(tokens=9)
        kept = case.make("quoka", queries="4").selector.options.representatives(queries)
        for head in range(case.shape.kv_heads):
            for sequence in range(queries.batch):
                own = queries.vectors[head].unflatten(0, (queries.batch, queries.group, 9))[sequence]
                expected = torch.zeros(4, case.shape.head_dim)
                for rows in own:
                    likeness = unit(rows) @ unit(rows.mean(0))
                    expected += unit(rows[likeness.argsort()[:4]]) / queries.group
                torch.testing.assert_close(kept[head, sequence], expected, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("similarity", ["cosine", "dot"])
    @pytest.mark.parametrize("reduce", ["max", "mean"])
    def test_a_short_question_is_kept_whole(self, case, similarity, reduce):
        queries = case.queries(tokens=5)
        selector = case.make("quoka", budget="8", similarity=similarity, reduce=reduce)
        ids = selector.select(2, queries).ids.unflatten(1, (queries.batch, -1))
        scale = unit if similarity == "cosine" else torch.clone
        asking = scale(queries.by_token()).mean(2)
        scores = torch.einsum("hbtd,hnd->hbtn", asking, scale(case.keys(2)))
        assert_best(scores.amax(2) if reduce == "max" else scores.mean(2), ids[:, :, 0], 8)
        assert torch.equal(ids, ids[:, :, :1].expand_as(ids))

    def test_sequences_of_a_batch_choose_alone(self, case):
        both = case.queries(tokens=20)
        selector = case.make("quoka", budget="8")
        ids = selector.select(2, both).ids.unflatten(1, (2, -1))
        for sequence in range(2):
            rows = both.vectors.unflatten(1, (2, -1))[:, sequence]
            alone = selector.select(2, type(both)(rows, 0.1, None, both.group, 20)).ids
            assert torch.equal(ids[:, sequence], alone)

    def test_keys_are_read_once_and_their_norms_not_computed(self, case):
        case.make("quoka", budget="8").select(2, case.queries())
        assert len(case.host.read) == case.shape.kv_heads

    @pytest.mark.parametrize(
        "option", [{"queries": "0"}, {"similarity": "euclid"}, {"reduce": "median"}], ids=str
    )
    def test_senseless_options_are_refused(self, case, option):
        with pytest.raises(ConfigError, match=r"at least 1|choose one of"):
            case.make("quoka", **option)
