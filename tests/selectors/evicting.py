"""Promises of the selectors that forget, against a simulation that lets one token in at a time."""

from collections.abc import Callable
from itertools import chain, pairwise
from math import inf
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import tensor_view
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.testing.selector_contract import LAYER, SelectorContract, floats, selected_ids
from offload_decode.types import Document
from tests.families import VOCAB
from tests.tiny import tiny_model

QUESTION = 12


def sampled(folder, tokens, samples, dtype=torch.float32):
    """A store that holds `samples` prefill queries for each KV head."""
    ids = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(7)).numpy()
    model = tiny_model("llama", num_hidden_layers=2).to(dtype)
    path = folder / f"{tokens}-{samples}-{dtype}"
    documents = [Document("all", 0, tokens)]
    settings = Settings(options={"chunk": 64}, query_samples=samples)
    prefill_tokens(wrap(model), ids.astype(np.int32), documents, path, settings)
    return KVStore.open(path)


def asked(store, tokens=QUESTION, softcap=None):
    shape = store.manifest.shape
    rows = torch.randn(
        shape.kv_heads, shape.group * tokens, shape.head_dim, generator=torch.Generator().manual_seed(8)
    )
    return Queries(rows, scaling=0.7, softcap=softcap, group=shape.group, tokens=tokens)


def passes(queries, *lengths):
    """The queries of several forward passes of `lengths` tokens."""
    for part in queries.by_token().split(lengths, dim=3):
        rows = part.reshape(len(part), -1, part.shape[-1])
        yield Queries(rows, queries.scaling, queries.softcap, queries.group, part.shape[3])


def kept_sets(held, queries):
    """For each KV head and token, the set of stored tokens that all heads of the group attend to."""
    ids = selected_ids(held, queries)
    ids = ids.reshape(len(ids), queries.group, queries.tokens, -1)
    found = [[[{i for i in row if i >= 0} for row in heads] for heads in head] for head in ids.tolist()]
    assert all(own == of_head[0] for of_head in found for own in of_head)
    return [of_head[0] for of_head in found]


class Simulation:
    """One KV head's cache as a dict of tokens and merits, in float64."""

    def __init__(self, store, head, k, queries, judge, recent):
        self.keys = floats(store.keys(LAYER, head)).double()
        self.k, self.queries, self.judge, self.newest = k, queries, judge, recent(k)
        self.cache: dict[int, float] = {}
        self.tail: list[int] = []
        samples = tensor_view(store.queries(LAYER, head)).double()
        positions = store.query_positions.tolist()
        self.weight = store.manifest.n_tokens * store.manifest.shape.group / len(positions)
        # The last sample comes with the last token.
        at = [len(self.keys) - 1 if p == positions[-1] else p for p in positions]
        for token in range(len(self.keys)):
            self.cache[token] = 0.0
            if token in at:
                self.attend([samples[j] for j, position in enumerate(at) if position == token], self.weight)
                self.drop()

    def attend(self, rows, weight):
        received = dict.fromkeys(self.cache, 0.0)
        for row in rows:
            if self.cache:
                logits = self.queries.logits(torch.stack([row @ self.keys[token] for token in self.cache]))
                for token, share in zip(self.cache, logits.softmax(0).tolist(), strict=True):
                    received[token] += weight * share
        self.cache = {token: self.judge(merit, received[token]) for token, merit in self.cache.items()}

    def drop(self):
        while self.cache and len(self.cache) + len(self.tail) > self.k:
            order = sorted(self.cache) + self.tail
            newest = order[len(order) - self.newest :]
            del self.cache[min(self.cache, key=lambda token: inf if token in newest else self.cache[token])]

    def ask(self, rows):
        """The tokens that a question's token with the queries `rows [G, D]` attends to."""
        before = set(self.cache)
        self.attend(list(rows.double()), 1.0)
        self.tail.append(len(self.keys) + len(self.tail))
        self.drop()
        return before


class EvictingContract(SelectorContract):
    """`judge` and `recent`: the rules, as the paper has them."""

    judge: ClassVar[Callable[[float, float], float]]
    recent: ClassVar[Callable[[int], int]]

    def simulated(self, store, k, queries):
        """As `kept_sets`."""
        found = []
        for head, rows in enumerate(queries.by_token()[:, 0]):
            cache = Simulation(store, head, k, queries, type(self).judge, type(self).recent)
            found.append([cache.ask(rows[:, token]) for token in range(queries.tokens)])
        return found

    # Fewer samples than tokens, as many, one for every query, and of a low precision.
    @pytest.fixture(
        scope="class",
        params=[
            (60, 7, torch.float32),
            (41, 41, torch.float16),
            (41, 100, torch.bfloat16),
            (3, 1, torch.float32),
        ],
        ids=str,
    )
    @classmethod
    def small(cls, request, tmp_path_factory):
        return sampled(tmp_path_factory.mktemp("small"), *request.param)

    @pytest.mark.parametrize(("k", "softcap"), [(0, None), (1, None), (2, None), (9, 2.0), (20, None)])
    def test_it_keeps_what_a_simulation_of_one_token_at_a_time_keeps(self, small, k, softcap):
        queries = asked(small, softcap=softcap)
        if k >= small.manifest.n_tokens:
            assert selected_ids(self.make(small, budget=str(k)), queries) is None
            return
        expected = self.simulated(small, k, queries)
        assert kept_sets(self.make(small, budget=str(k)), queries) == expected
        held = self.make(small, budget=str(k))
        in_parts = [kept_sets(held, part) for part in passes(queries, 5, 1, 1, 5)]
        assert [list(chain(*parts)) for parts in zip(*in_parts, strict=True)] == expected

    def test_what_is_dropped_stays_away_until_the_next_question(self, store):
        queries, held = asked(store), self.make(store, budget="9")
        if store.manifest.n_tokens <= 9:
            return
        first = kept_sets(held, queries)
        for head in first:
            assert [len(kept) for kept in head] == [max(0, 9 - token) for token in range(QUESTION)]
            assert all(later < earlier or not earlier for earlier, later in pairwise(head))
        assert kept_sets(held, queries) == [[set()] * QUESTION] * len(first)
        held.selector.reset()
        assert kept_sets(held, queries) == first

    def test_a_fork_goes_its_own_way(self, small):
        held = self.make(small, budget="20")
        if small.manifest.n_tokens <= 20:
            return
        start, mine, other = passes(asked(small), 4, 4, 4)
        kept_sets(held, start)
        forked = held.fork()
        expected = kept_sets(held.fork(), mine)
        kept_sets(forked, other)
        assert kept_sets(held, mine) == expected
        assert kept_sets(forked, mine) != expected

    def test_the_best_come_first(self, small):
        selection = self.make(small, budget="2").select(LAYER, asked(small))
        assert torch.equal(selection.scores, selection.scores.sort(-1, descending=True).values)
        assert torch.equal(selection.scores == -torch.inf, selection.ids < 0)

    def test_layers_have_budgets_of_their_own(self, small):
        held = self.make(small, budget="1,2")
        (queries,) = passes(asked(small, tokens=1), 1)
        assert [held.select(layer, queries).ids.shape[-1] for layer in (0, 1)] == [1, 2]

    def test_the_prefill_is_replayed_once_for_all_questions_in_little_memory(self, tmp_path):
        tokens, samples, k = 1500, 50, 8
        store = sampled(tmp_path, tokens, samples)
        held, queries = self.make(store, budget=str(k)), asked(store, tokens=2)
        with LargestTensor() as largest:
            held.select(LAYER, queries)
        shape = store.manifest.shape
        ends = np.append(np.unique(store.query_positions)[:-1] + 1, tokens)  # all of the rest, at the last
        gap = int(np.diff(ends, prepend=0).max())
        assert gap <= 4 * tokens // samples
        assert 0 < largest.numel <= shape.kv_heads * shape.head_dim * max(samples, k + gap + 1)

        with LargestTensor() as again:
            forked = held.fork()
            forked.selector.reset()
            forked.select(LAYER, queries)
        assert again.calls < 100 < largest.calls


class LargestTensor(TorchDispatchMode):
    """Counts calls of torch and the elements of the largest new tensor that one of them returned."""

    def __init__(self):
        super().__init__()
        self.calls = self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        shares = func.is_view or func is torch.ops.aten.lift_fresh.default  # the latter: from numpy
        if isinstance(out, torch.Tensor) and not shares:
            self.numel = max(self.numel, out.numel())
        return out
