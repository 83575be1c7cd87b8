"""Loki and SparQ against principal components, and the channels where |q| is largest, one row at a time."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import MemoryCases, assert_best


class TestLoki(SelectorContract, MemoryCases):
    name = "loki"

    @pytest.mark.parametrize("dims", ["1", "3"])
    def test_the_first_components_choose(self, case, dims):
        if case.dtype is not torch.float32 or case.host.length == 1:
            pytest.skip("rounded components, or none: the order is not that of the formula")
        queries, keys = case.queries(), case.keys(4).double()
        ids = case.make("loki", dims=dims, budget="8").select(4, queries).ids
        _, _, components = torch.linalg.svd(keys, full_matrices=False)
        first = components[:, : int(dims)].transpose(1, 2)
        assert_best((queries.vectors.double() @ first) @ (keys @ first).transpose(1, 2), ids, 8)

    def test_all_components_are_the_oracle(self, case):
        queries = case.queries()
        chosen = case.make("loki", dims="100%", budget="8").select(4, queries)
        exact = queries.vectors @ case.keys(4).transpose(1, 2)
        found, best = exact.gather(-1, chosen.ids), exact.topk(min(8, case.host.length)).values
        # Components are kept in the store's dtype: scores are off by what that rounds.
        rounding = torch.finfo(case.dtype).eps * 8 * case.shape.head_dim**2
        assert (best - found).abs().max() <= max(1e-4, rounding)
        assert chosen.scores is None

    def test_keys_are_read_once(self, case):
        selector = case.make("loki", budget="8")
        selector.select(4, case.queries())
        read = len(case.host.read)
        selector.fork().select(4, case.queries(tokens=1))
        assert len(case.host.read) == read == case.shape.kv_heads

    @pytest.mark.parametrize("dims", ["0", "-3", "0%", "few"])
    def test_senseless_dimensions_are_refused(self, case, dims):
        with pytest.raises(ConfigError, match="option dims"):
            case.make("loki", dims=dims)


class TestSparQ(SelectorContract, MemoryCases):
    name = "sparq"

    @pytest.mark.parametrize(("r", "counted"), [("2", lambda dim: 2), ("40%", lambda dim: -(-2 * dim // 5))])
    def test_the_largest_channels_choose(self, case, r, counted):
        queries, keys = case.queries(), case.keys(4)
        ids = case.make("sparq", r=r, budget="8").select(4, queries).ids
        for head, rows in enumerate(queries.vectors):
            for row, query in enumerate(rows):
                large = query.abs().argsort(descending=True)[: counted(case.shape.head_dim)]
                assert_best(keys[head][:, large] @ query[large], ids[head, row], 8)

    @pytest.mark.parametrize("r", ["100%", "1000"])
    def test_all_channels_are_the_oracle(self, case, r):
        queries = case.queries()
        ids = case.make("sparq", r=r, budget="8").select(4, queries).ids
        assert torch.equal(ids, case.make("oracle", budget="8").select(4, queries).ids)

    @pytest.mark.parametrize("r", ["0", "-3", "0%", "few", "inf%", "nan%", "1e400%"])
    def test_senseless_channels_are_refused(self, case, r):
        with pytest.raises(ConfigError, match="option r"):
            case.make("sparq", r=r)
