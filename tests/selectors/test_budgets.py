"""Budgets: what each spelling means, that a schedule only moves tokens between layers, and that heads get
their own.
"""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.engine import step as prefix
from offload_decode.engine.engine import Engine
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import wrap
from offload_decode.selectors.base import Memory, Selector, SelectorOptions
from offload_decode.selectors.budgeted import Budgeted
from offload_decode.selectors.budgets import Budget
from offload_decode.testing.selector_contract import LAYER
from offload_decode.testing.stores import stored
from offload_decode.types import PageSelection, Selection
from tests.tiny import tiny_model

KV_HEADS = 2


def counts(budget, n_tokens=1000, layers=(0, 2, 5)):
    """Tokens for each head of each layer; one number where the heads agree."""
    spelled = []
    for own in budget.per_layer(n_tokens, layers, KV_HEADS).values():
        heads = None if own is None else [head.tokens for head in own.heads]
        spelled.append(heads[0] if heads and len(set(heads)) == 1 else heads)
    return spelled


def masses(budget):
    return [
        None if own is None else [head.mass for head in own.heads]
        for own in budget.per_layer(1000, (0, 2, 5), KV_HEADS).values()
    ]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget("64"), [64, 64, 64]),
        (Budget("0"), [0, 0, 0]),
        (Budget("2%"), [20, 20, 20]),
        (Budget("0.15%"), [2, 2, 2]),
        (Budget("100%"), [1000, 1000, 1000]),
        (Budget("5000"), [1000, 1000, 1000]),  # never more than there is
        (Budget("1, 50%, 7"), [1, 500, 7]),
        (Budget("60", schedule="linear"), [30, 60, 90]),
        (Budget("6%", schedule="linear"), [30, 60, 90]),
        (Budget("60/6", schedule="linear"), [[30, 3], [60, 6], [90, 9]]),
        (Budget("800", schedule="linear"), [467, 933, 1000]),  # the last layer's rest goes to the others
        (Budget("90%", schedule="linear"), [700, 1000, 1000]),
        (Budget("100%", schedule="linear"), [1000, 1000, 1000]),
        (Budget("5000/6", schedule="linear"), [[1000, 3], [1000, 6], [1000, 9]]),
        (Budget("64/128"), [[64, 128]] * 3),
        (Budget("8, 1% / 5000, 3/3"), [8, [10, 1000], 3]),
        (Budget("mass=0.9"), [1000, 1000, 1000]),  # the most that it may take
        (Budget("64", dense_layers="0,5"), [None, 64, None]),
        (Budget("64", dense_layers="first:2"), [None, 64, 64]),
        (Budget("64", dense_layers="first:3"), [None, None, 64]),
        (Budget("64", dense_layers="first:0"), [64, 64, 64]),
    ],
)
def test_spellings(budget, expected):
    assert counts(budget) == expected


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget("64"), [[None, None]] * 3),
        (Budget("mass=0.9"), [[0.9, 0.9]] * 3),
        (Budget("8,mass=0.9,mass=0.5/mass=0.2"), [[None, None], [0.9, 0.9], [0.5, 0.2]]),
        (Budget("mass=1"), [None] * 3),  # dense
        (Budget("mass=1/mass=0.5"), [[1, 0.5]] * 3),
        (Budget("mass=0.9", dense_layers="2"), [[0.9, 0.9], None, [0.9, 0.9]]),
    ],
)
def test_masses(budget, expected):
    assert masses(budget) == expected


def test_the_first_layers_may_be_none_of_the_searched():
    assert counts(Budget("7", dense_layers="first:2"), layers=(3, 4)) == [7, 7]


@given(st.lists(st.integers(0, 10**7), min_size=KV_HEADS, max_size=KV_HEADS), st.integers(1, 80))
def test_linear_keeps_each_heads_total_and_grows(amounts, layers):
    budget = Budget("/".join(map(str, amounts)), schedule="linear")
    spread = budget.per_layer(10**9, range(layers), KV_HEADS).values()
    for head, amount in enumerate(amounts):
        column = [layer.heads[head].tokens for layer in spread]
        assert sum(column) == amount * layers
        assert all(later - earlier >= -1 for earlier, later in pairwise(column))
        assert column[0] == pytest.approx(2 * amount / (layers + 1), abs=1)


MEANINGLESS = {
    "none of these": ["many", "", "dense", "2.5", "mass", "mass=", "xmass=0.5", "mass=99%", "1/"],
    "more than 0 and at most 1": ["mass=0", "mass=1.01", "mass=-0.5", "mass=nan"],
    "0 or more": ["-1", "8,-1,8"],
    "lists 2 layers, but 3": ["1,2"],
    "mixes a mass with counts": ["mass=0.5/2%", "8/mass=0.5"],
    "lists 3 heads, but a layer has 2": ["1/2/3", "1,2/3/4,5"],
    "from 0% to 100%": ["150%", "100.1%", "-1%", "nan%", "1e400%"],
}
REFUSED = [(Budget(amount), because) for because, amounts in MEANINGLESS.items() for amount in amounts]
REFUSED += [(Budget(own, "linear"), "leave 'schedule' out") for own in ("1,2,3", "mass=0.5", "mass=1")]
REFUSED += [
    (Budget("8", dense_layers=own), "like 0,1 nor first:2")
    for own in ("first", "first:", "first:-1", "first:2,5", "5,first:2")
]


@pytest.mark.parametrize(
    ("budget", "because"),
    [
        *REFUSED,
        (Budget("8", schedule="cosine"), "uniform, linear"),
        (Budget("8", dense_layers="1"), "searched layers are 0, 2, 5"),
    ],
)
def test_what_makes_no_sense_is_refused(budget, because):
    with pytest.raises(ConfigError, match=because):
        budget.per_layer(1000, (0, 2, 5), KV_HEADS)


class First(Selector):
    """The first tokens of the store."""

    name, paper, reads, holds = "first", "none", "nothing", "nothing"

    def choose(self, layer, queries, k):
        return Selection(torch.arange(k).expand(*queries.vectors.shape[:2], k))


class FirstPages(First):
    """The first pages of the store."""

    def choose(self, layer, queries, k):
        pages = torch.arange(-(-k // 4)).expand(len(queries.vectors), queries.tokens, -1)
        return PageSelection(pages, 4, torch.full((len(queries.vectors),), k), shared=True)


class Kept(Memory[int]):
    """A memory, whose heads share one count."""

    name, paper, reads, holds = "kept", "none", "nothing", "nothing"
    choose = First.choose


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return stored(tmp_path_factory.mktemp("budgets"), 60, 4, KV_HEADS)


def made(kind, store, budget):
    host, shape = HostKV(store, torch.device("cpu")), store.manifest.shape
    budgets = Budget(budget).per_layer(host.length, shape.full_layers, shape.kv_heads)
    return Budgeted(kind(SelectorOptions(budget), host, shape, budgets))


@given(first=st.integers(0, 70), second=st.integers(0, 70))
def test_each_head_gets_the_best_of_its_own_budget(store, first, second):
    queries = Queries(torch.ones(KV_HEADS, 6, 16), 0.3, group=2, tokens=3)
    wanted = [min(first, 60), min(second, 60)]
    held = made(First, store, f"{first}/{second}")
    chosen = held.select(LAYER, queries).ids
    assert chosen.shape == (KV_HEADS, 6, max(wanted))
    for head, count in enumerate(wanted):
        assert chosen[head, 5].tolist() == [*range(count), *[-1] * (max(wanted) - count)]
    assert held.selector.budgets[LAYER].largest == max(wanted)
    assert made(FirstPages, store, f"{first}/{second}").select(LAYER, queries).limit.tolist() == wanted


@pytest.mark.parametrize("budget", ["mass=0.9", "8,mass=0.9", "8/16", "mass=1/mass=0.5"])
def test_a_memory_has_one_count_for_all_heads(store, budget):
    with pytest.raises(ConfigError, match="without mass= and /"):
        made(Kept, store, budget)


@pytest.mark.parametrize("budget", ["8,4", "8/8", "mass=1", "2%"])
def test_a_memory_takes_budgets_that_come_to_one_count(store, budget):
    made(Kept, store, budget)


def test_the_engine_attends_to_as_much_as_the_heads_budgets_say(store, monkeypatch):
    """A step counts every row's own tokens: two rows for each KV head of the tiny model."""
    loaded = wrap(tiny_model("llama", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2))

    def run(**options):
        engine = Engine.open(store, loaded, options=options)
        logits = engine.extend([7, 8, 9])
        return logits, engine.prefix.take_stats()

    dense, everything = run(budget="100%")
    assert everything.by_layer == {0: 4 * 3 * 60, 1: 4 * 3 * 60}
    whole, stats = run(budget="mass=1")
    assert stats.by_layer == everything.by_layer
    torch.testing.assert_close(whole, dense, atol=1e-5, rtol=0)
    _, stats = run(budget="5/7,mass=1")
    assert stats.by_layer == {0: 2 * 3 * (5 + 7), 1: 4 * 3 * 60}
    assert stats.selected == sum(stats.by_layer.values())
    with monkeypatch.context() as patched:
        small, some = run(budget="mass=0.3")
        patched.setattr(prefix, "SELECTED_IDS", 100)  # a row at a time
        parts, each = run(budget="mass=0.3")
    assert each.by_layer == some.by_layer
    torch.testing.assert_close(parts, small, atol=1e-5, rtol=0)
    most, more = run(budget="mass=0.6")
    assert all(0 < some.by_layer[layer] < more.by_layer[layer] for layer in (0, 1))
    assert (most - dense).norm() < (small - dense).norm()
