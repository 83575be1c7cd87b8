"""SparQ against products over the channels where |q| is largest, one row at a time."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import MemoryCases, assert_best


class TestSparQ(SelectorContract, MemoryCases):
    name = "sparq"

    @pytest.mark.parametrize(("r", "counted"), [("2", lambda dim: 2), ("40%", lambda dim: -(-2 * dim // 5))])
    def test_the_largest_channels_choose(self, case, r, counted):
        queries, keys = case.queries(), case.keys(4)
        ids = case.make("sparq", r=r, budget="8").select(4, queries).ids
        for head, rows in enumerate(queries.rows):
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
