"""`mass=p`: the smallest k that holds a share of the attention, exactly and by estimate."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import numpy_view
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors import budgeted
from offload_decode.selectors.budgeted import MassBudget, cut, exact_scores
from offload_decode.selectors.budgets import Budget
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape, PageSelection, Selection

HEADS, GROUP, TOKENS, DIM = 2, 2, 3, 16


def host_of(keys, layers=1):
    """A host whose layers all have the same keys `[Hkv, N, D]`."""
    shape = ModelShape.uniform((LayerKind.FULL,) * layers, HEADS * GROUP, HEADS, keys.shape[2])
    arrays = [numpy_view(keys)] * layers
    return HostKV(MemoryStore(shape, arrays, arrays), torch.device("cpu"))


def stored(host):
    """Its keys `[Hkv, N, D]` in float32."""
    return torch.stack([rows.read(slice(None), host.device) for rows in host.layer_keys(0)])


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(n_tokens, scaling=1.0, softcap=None, seed=1, layers=1):
    """Half-precision keys and the queries of one step: the larger `scaling`, the more peaked."""
    host = host_of(normal(HEADS, n_tokens, DIM, seed=seed).half(), layers)
    rows = normal(HEADS, GROUP * TOKENS, DIM, seed=seed + 1)
    return host, Queries(rows, scaling, softcap, group=GROUP, tokens=TOKENS)


def all_logits(host, queries):
    return queries.logits(queries.vectors @ stored(host).transpose(1, 2)).double()


def exact_top(host, queries, asked=None):
    """The k best with their scores, as a flat index finds them; `asked` gets every k."""

    def choose(k):
        if asked is not None:
            asked.append(k)
        scores, ids = (queries.vectors @ stored(host).transpose(1, 2)).topk(k)
        return Selection(ids, scores)

    return choose


def budget(host, amount):
    return Budget(amount).per_layer(host.length, [0], HEADS)[0]


def held(host, queries, selection):
    """True share of the attention that each row of a selection holds."""
    weights = torch.softmax(all_logits(host, queries), -1)
    weights = torch.cat([weights, torch.zeros(*weights.shape[:2], 1)], -1)
    return weights.gather(-1, selection.ids % weights.shape[-1]).sum(-1)  # padding meets the zero


def select(host, queries, amount, choose, **options):
    return MassBudget(host, **options).select(0, queries, budget(host, amount), choose)


def sizes(selection):
    return (selection.ids >= 0).sum(-1)


@pytest.mark.parametrize(("scaling", "softcap"), [(1.0, None), (4.0, None), (2.0, 5.0), (2000.0, None)])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.99])
def test_a_store_within_the_sample_gives_exactly_the_smallest_k(scaling, softcap, share):
    host, queries = made(900, scaling, softcap)
    selection = select(host, queries, f"mass={share}", exact_top(host, queries))
    best = torch.softmax(all_logits(host, queries), -1).sort(-1, descending=True).values.cumsum(-1)
    assert ((best < share).sum(-1) + 1).float().mean() < 450, "the case is no test: all would be taken"
    least, most = ((best < bound).sum(-1) + 1 for bound in (share - 1e-5, share + 1e-5))  # of float32
    assert (least <= sizes(selection)).all()
    assert (sizes(selection) <= most).all()


def test_a_selectors_own_order_is_kept_whatever_it_is():
    host, queries = made(500, scaling=4.0)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).expand(HEADS, GROUP * TOKENS, -1)
    selection = select(host, queries, "mass=0.2", lambda k: Selection(order[..., :k]))
    weights = torch.softmax(all_logits(host, queries), -1).gather(-1, order).cumsum(-1)
    assert (sizes(selection) == (weights < 0.2).sum(-1) + 1).all()
    for row, size in zip(selection.ids.flatten(0, 1), sizes(selection).flatten(), strict=True):
        assert (row[:size] == order[0, 0, :size]).all()
        assert (row[size:] == -1).all()


@pytest.mark.parametrize("shared", [True, False])
def test_pages_become_the_smallest_run_of_their_tokens(shared):
    host, queries = made(300, scaling=1.0)
    lists = TOKENS if shared else GROUP * TOKENS
    order = normal(lists, 43, seed=0).argsort(-1)  # the last page is ragged

    def choose(k):
        pages = order[:, : math.ceil(k / 7)].expand(HEADS, -1, -1)
        return PageSelection(pages, 7, torch.full((HEADS,), k), shared)

    selection = select(host, queries, "mass=0.05", choose)
    whole = page_tokens(order.expand(HEADS, -1, -1), 7, 300, torch.full((HEADS,), 301))
    holes_last = (whole < 0).int().argsort(dim=-1, stable=True)  # those of the ragged page
    whole = whole.gather(-1, holes_last)
    if shared:  # rows are [group, tokens], and a token's group reads its list
        whole = whole.repeat(1, GROUP, 1)
    weights = torch.softmax(all_logits(host, queries), -1).gather(-1, whole.clamp(min=0))
    places = (weights.masked_fill(whole < 0, 0).cumsum(-1) < 0.05).sum(-1) + 1
    assert (selection.ids.shape[-1] >= places).all()
    rows = (part.flatten(0, 1) for part in (selection.ids, whole, places))
    for row, own, size in zip(*rows, strict=True):
        assert (row[:size] == own[:size]).all()
        assert (row[size:] == -1).all()


@pytest.mark.parametrize("scaling", [1.5, 3.0, 10.0])
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_estimate_reaches_the_share_within_its_error(scaling, share):
    """On average over rows, within the stated deviation for the smallest k that is asked for."""
    host, queries = made(6000, scaling)
    selection = select(host, queries, f"mass={share}", exact_top(host, queries), sample=512)
    true = held(host, queries, selection)
    deviation = math.sqrt(6000 / (256 * 512) * share * (1 - share))
    assert abs(true.mean() - share) < deviation or true.mean() > share
    best = torch.softmax(all_logits(host, queries), -1).sort(-1, descending=True).values.cumsum(-1)
    over = (best < share + deviation).sum(-1).double().mean() + 1
    assert sizes(selection).double().mean() <= over


def test_the_rest_is_unbiased_and_as_spread_as_stated():
    """Every layer draws its own sample, and here all layers have the same keys."""
    host, queries = made(3000, scaling=1.5, layers=200)
    chosen, estimate = exact_top(host, queries)(256), MassBudget(host, sample=256)
    logs = [estimate.rest(layer, queries, chosen.ids).log_sum() for layer in range(200)]
    rests = torch.stack(logs).double().exp()
    logits = all_logits(host, queries)
    best = logits.gather(-1, chosen.ids).exp().sum(-1)
    rest = logits.exp().sum(-1) - best
    whole = best + rest
    stated = torch.sqrt(3000 / (256 * 256) * (best / whole) * (rest / whole))
    assert (((rests - rest) / whole).std(0) <= stated).all()
    assert (((rests.mean(0) - rest) / whole).abs() <= 4 * stated / math.sqrt(200)).all()


@pytest.mark.parametrize("scaling", [0.8, 0.6])
def test_k_grows_until_the_share_is_held(scaling):
    host, queries = made(6000, scaling)
    asked = []
    selection = select(host, queries, "mass=0.7", exact_top(host, queries, asked))
    assert 2 <= len(asked) <= 3
    assert all(later >= min(4 * earlier, 6000) for earlier, later in pairwise(asked))
    assert asked[-2] < sizes(selection).max() <= asked[-1]


def test_diffuse_attention_is_read_in_order():
    host, queries = made(6000, scaling=0.01)
    asked = []
    assert select(host, queries, "mass=0.99", exact_top(host, queries, asked)).ids is None
    assert asked == [256], "the sample tells it at once"


def test_more_ids_than_memory_allows_are_not_asked_for(monkeypatch):
    host, queries = made(6000, scaling=1.0)
    monkeypatch.setattr(budgeted, "SELECTED_IDS", 500 * HEADS * GROUP * TOKENS)
    asked = []
    assert select(host, queries, "mass=0.9", exact_top(host, queries, asked)).ids is None
    assert max(asked) <= 501


def test_heads_have_masses_of_their_own():
    host, queries = made(6000, scaling=0.5)
    uneven = select(host, queries, "mass=0.4/mass=0.2", exact_top(host, queries))
    for head, share in enumerate((0.4, 0.2)):
        alike = select(host, queries, f"mass={share}", exact_top(host, queries))
        assert (held(host, queries, uneven)[head] >= share - 0.03).all()
        assert int(sizes(uneven)[head].sum()) == pytest.approx(int(sizes(alike)[head].sum()), rel=0.1)


def test_padding_weighs_nothing_under_a_softcap():
    host, queries = made(900, scaling=0.5)
    capped = replace(queries, softcap=0.5)
    exact = exact_top(host, capped)

    def with_holes(k):
        found = exact(k)
        holes = found.ids.new_full((*found.ids.shape[:2], 500), -1)
        return Selection(
            torch.cat([found.ids, holes], -1),
            torch.cat([found.scores, holes.float().masked_fill(holes < 0, -torch.inf)], -1),
        )

    plain, holey = (sizes(select(host, capped, "mass=0.4", choose)) for choose in (exact, with_holes))
    assert (plain == holey).all()


def test_huge_scores_of_either_sign_stay_finite():
    host = host_of(torch.tensor([[[100.0], [-100.0], [99.0]] + [[0.0]] * 600] * HEADS))
    queries = Queries(torch.tensor([[[100.0], [-100.0]]] * HEADS), 1.0, group=2)
    for amount in ("mass=0.5", "mass=0.999999"):
        selection = select(host, queries, amount, exact_top(host, queries), sample=300)
        assert sizes(selection).tolist() == [[1, 1]] * HEADS
        assert selection.ids[:, :, 0].tolist() == [[0, 1]] * HEADS
    low = Queries(torch.full((HEADS, 1, 1), -100.0), 1.0)
    blind = select(host, low, "mass=0.5", lambda k: Selection(torch.arange(k).expand(HEADS, 1, k)))
    assert sizes(blind).tolist() == [[2]] * HEADS


def test_an_index_that_finds_too_little_gives_all_it_found():
    host, queries = made(700, scaling=1.0)
    found = torch.tensor([5, 3, -1]).expand(HEADS, GROUP * TOKENS, -1)

    def choose(k):
        return Selection(torch.cat([found, torch.full((HEADS, GROUP * TOKENS, k - 3), -1)], -1))

    assert (sizes(select(host, queries, "mass=0.5", choose)) == 2).all()


def test_rows_that_left_no_sampled_token_ask_for_more():
    host, queries = made(40)
    estimate = MassBudget(host, sample=4)
    ids = estimate.sample(0, 0)[0].expand(HEADS, GROUP * TOKENS, -1)
    assert torch.isposinf(estimate.rest(0, queries, ids).log_sum()[0]).all()
    everything = torch.arange(40).expand(HEADS, GROUP * TOKENS, -1)
    assert torch.isneginf(estimate.rest(0, queries, everything).log_sum()).all()


def test_the_sample_is_fixed_and_differs_between_heads():
    host, _ = made(5000, layers=2)
    first, again = MassBudget(host), MassBudget(host)
    ids, keys = first.sample(1, 0)
    assert len(ids.unique()) == 1024
    assert (ids == again.sample(1, 0)[0]).all()
    assert (keys == stored(host)[0, ids]).all()
    assert any((ids != first.sample(*other)[0]).any() for other in ((1, 1), (0, 0)))


def test_scores_are_taken_in_pieces(monkeypatch):
    host, queries = made(200)
    ids = torch.stack([torch.randperm(200)[:50] for _ in range(HEADS * GROUP * TOKENS)])
    ids = ids.reshape(HEADS, GROUP * TOKENS, 50)
    ids[0, 1, 7:] = -1
    monkeypatch.setattr(budgeted, "GATHERED", 37 * DIM)
    found = exact_scores(host, 0, queries, Selection(ids))
    scores = found.scores
    assert found.moved == ids.numel() * 2 * DIM
    expected = (queries.vectors @ stored(host).transpose(1, 2)).gather(-1, ids.clamp(min=0))
    torch.testing.assert_close(scores, expected.masked_fill(ids < 0, -torch.inf))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=HEADS, max_size=HEADS), st.booleans())
def test_a_cut_keeps_the_first_places(kept, scored):
    ids = torch.arange(7).repeat(HEADS, 3, 1)
    shorter = cut(Selection(ids, ids.float() if scored else None), torch.tensor(kept)[:, None])
    for head, count in enumerate(kept):
        assert shorter.ids[head, 2].tolist() == [*range(min(count, 7)), *[-1] * (7 - count)]
        if scored:
            assert torch.isneginf(shorter.scores[head, :, count:]).all()
            assert (shorter.scores[head, :, :count] == ids[head, :, :count]).all()
    assert scored or shorter.scores is None
