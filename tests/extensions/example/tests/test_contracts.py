"""What offload-decode promises of every selector, index and prefill method, of these; and what they are."""

import numpy as np

from offload_decode.store import MemoryStore
from offload_decode.testing import IndexContract, MethodContract, SelectorContract
from offload_decode.testing.method_contract import Written, asked
from offload_decode.types import LayerKind, ModelShape


class TestLongestKeys(SelectorContract):
    name = "longest-keys"

    def test_the_longest_keys_come_first(self) -> None:
        shape = ModelShape.uniform((LayerKind.FULL,), query_heads=4, kv_heads=2, head_dim=8)
        keys = np.zeros((1, 2, 5, 8), np.float32)  # layers, KV heads, tokens, channels
        keys[0, :, :, 0] = [[1, 5, 2, 4, 3], [-2, 1, -5, 3, 4]]
        store = MemoryStore(shape, keys, values=keys)
        for options, first, second in (({}, [1, 3, 4], [2, 4, 3]), ({"skip": 1}, [3, 4, 2], [4, 3, 0])):
            ids = self.make(store, budget="3", **options).select(0, self.queries(store)).ids
            assert ids[:, 0].tolist() == [first, second]


class TestSortedKeys(IndexContract):
    kind = "sorted-keys"


class TestEvenly(MethodContract):
    name = "evenly"

    def test_ids_are_at_even_distances(self) -> None:
        ids = self.make(budget="4").select(0, asked(), Written())  # of forty earlier tokens
        assert ids.tolist() == [[0, 10, 20, 30]] * 2
