"""LessIsMore / TidalDecode: what a selecting layer ranks, and who takes it over."""

import pytest
import torch

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.testing.selector_contract import SelectorContract
from tests.selectors.memory_cases import BATCH, LAYERS, TOKENS, MemoryCases, assert_best


class TestLessIsMore(SelectorContract, MemoryCases):
    name = "lessismore"

    @pytest.mark.parametrize("softcap", [None, 0.5])
    def test_tokens_are_ranked_by_the_attention_of_all_heads(self, case, softcap):
        drawn = case.queries()
        queries = Queries(drawn.vectors, drawn.scaling, softcap, drawn.group, drawn.tokens)
        ids = case.make("lessismore", budget="8").select(1, queries).ids
        scores = 0.1 * drawn.vectors @ case.keys(1).transpose(1, 2)
        weights = (scores if softcap is None else softcap * (scores / softcap).tanh()).softmax(-1)
        summed = weights.unflatten(1, (BATCH, drawn.group, TOKENS)).sum((0, 2))
        lists = ids.unflatten(1, (BATCH, drawn.group, TOKENS))
        assert_best(summed, lists[0, :, 0], 8)
        assert torch.equal(lists, lists[:1, :, :1].expand_as(lists))

    def test_layers_between_take_the_list_and_read_no_keys(self, case):
        selector = case.make("lessismore", budget="9,5,7,3,9")
        chosen, read = {}, {}
        for layer in LAYERS:
            case.host.read.clear()
            chosen[layer] = selector.select(layer, case.queries(seed=layer)).ids
            read[layer] = {of for of, _ in case.host.read}
        assert read == {1: {1}, 2: set(), 3: {3}, 4: set(), 5: set()}
        for layer, source, k in ((2, 1, 5), (4, 3, 3), (5, 3, 7)):
            own = min(k, case.host.length)
            assert chosen[layer].shape[-1] == min((9, 5, 7, 3, 9)[layer - 1], case.host.length)
            assert torch.equal(chosen[layer][..., :own], chosen[source][..., :own])

    def test_layers_before_the_first_are_dense(self, case):
        selector = case.make("lessismore", budget="2", select_layers="3")
        assert selector.select(1, case.queries()).ids is None
        assert selector.select(3, case.queries()).ids.shape[-1] == min(2, case.host.length)
        assert selector.select(5, case.queries()).ids.shape[-1] == min(2, case.host.length)

    def test_a_selecting_layer_may_itself_be_dense(self, case):
        selector = case.make("lessismore", budget="2", select_layers="2", dense_layers="1,2")
        assert selector.select(2, case.queries()).ids is None
        case.host.read.clear()
        assert selector.select(3, case.queries()).ids.shape[-1] == min(2, case.host.length)
        assert case.host.read == []

    def test_two_layers_select_by_default(self, case):
        assert case.make("lessismore").selector.select_layers == [1, 3]
        assert case.make("lessismore", dense_layers="1,2").selector.select_layers == [3, 4]
        assert case.make("lessismore", dense_layers="1,2,3,4,5").selector.select_layers == []

    def test_rows_of_different_passes_never_mix(self, case):
        selector = case.make("lessismore", budget="4")
        selector.select(1, case.queries())
        forked = selector.fork()
        with pytest.raises(AssertionError):
            selector.select(2, case.queries(tokens=TOKENS + 1))
        selector.select(3, case.queries(tokens=1))
        assert forked.select(2, case.queries()).ids.shape[1] == case.queries().vectors.shape[1]
        with pytest.raises(AssertionError):
            selector.select(2, case.queries(tokens=1))
        forked.selector.reset()
        with pytest.raises(AssertionError):
            forked.select(2, case.queries())

    def test_a_mass_is_refused(self, case):
        with pytest.raises(ConfigError, match="without mass="):
            case.make("lessismore", budget="mass=0.9")

    @pytest.mark.parametrize("layers", ["0", "1,6", "first", "-1"])
    def test_layers_that_are_not_searched_are_refused(self, case, layers):
        with pytest.raises(ConfigError, match="select_layers"):
            case.make("lessismore", select_layers=layers)
