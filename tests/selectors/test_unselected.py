"""The estimate of the unselected tail against dense attention, naive formulas and many seeds."""

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries, attend, merge_states
from offload_decode.common.errors import ConfigError
from offload_decode.common.rows import encodings
from offload_decode.engine.step import StoredPrefix
from offload_decode.indexes.clusters.summaries import members as members_of
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors import unselected
from offload_decode.selectors.unselected import _unselected, selected_lists
from offload_decode.store.memory import MemoryStore
from offload_decode.types import (
    AttentionState,
    LayerKind,
    LayerShape,
    ModelShape,
    PageSelection,
    Selection,
    StepStats,
)

HKV, D, VALUE_D, SCALING = 2, 8, 6, 0.4
CPU = torch.device("cpu")


def host_of(keys, values):
    """A prefix of keys `[Hkv, N, D]` and values `[Hkv, N, Dv]` in memory."""
    layer = LayerShape(LayerKind.FULL, HKV, keys.shape[2], values.shape[2])
    return HostKV(MemoryStore(ModelShape((layer,), HKV * 3), keys[None], values[None]), CPU)


def random_host(tokens=150, dim=D, dtype=np.float32):
    generator = np.random.default_rng(0)
    widths = (dim, VALUE_D)
    return host_of(*(generator.standard_normal((HKV, tokens, own)).astype(dtype) for own in widths))


def some_queries(rows=6, dim=D, softcap=None):
    generator = torch.Generator().manual_seed(3)
    return Queries(torch.randn(HKV, rows, dim, generator=generator), SCALING, softcap)


def some_ids(host, k, rows=6):
    """Different tokens for every row; one place in each row is padding."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.rand(HKV, rows, host.length, generator=generator).argsort(-1)[..., :k]
    ids[..., k // 2 : k // 2 + 1] = -1
    return ids


def both(host, read):
    return torch.stack([read(0, head).read(slice(None), CPU) for head in range(HKV)])


def dense(host, queries, ids=None):
    """Attention to all tokens, or to those that `ids` leave out."""
    seen = torch.ones(HKV, queries.vectors.shape[1], host.length + 1, dtype=torch.bool)
    if ids is not None:
        seen.scatter_(2, ids.where(ids >= 0, host.length), False)
    states = [
        attend(
            queries.vectors[None, head : head + 1],
            both(host, host.keys)[None, head : head + 1],
            both(host, host.values)[None, head : head + 1],
            SCALING,
            mask=seen[None, head : head + 1, :, :-1],
            softcap=queries.softcap,
        )
        for head in range(HKV)
    ]
    return AttentionState(*(torch.cat(part)[:, 0] for part in zip(*states, strict=True)))


def exact_scores(host, queries, ids):
    scores = (queries.vectors @ both(host, host.keys).transpose(1, 2)).gather(2, ids.clamp(min=0))
    return scores.masked_fill(ids < 0, -torch.inf)


def prefix_of(host, **options):
    return StoredPrefix.over(host, host.store.manifest.shape, "topk", {"index": "flat", **options})


def tail_of(host, option):
    return prefix_of(host, tail=option).tail


def of_one_kind(tokens=150):
    """A prefix of one token, over and over: the means of its clusters are this token."""
    one = random_host(1)
    keys, values = (np.repeat(both(one, read).numpy(), tokens, axis=1) for read in (one.keys, one.values))
    return host_of(keys, values)


ROUNDED = 0.02  # values of summaries are 8-bit codes: half of 1/127 of the largest magnitude, about 3


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scored", [True, False])
def test_tokens_that_are_their_clusters_mean_are_estimated_exactly(softcap, scored):
    host, queries = of_one_kind(), some_queries(softcap=softcap)
    ids = some_ids(host, 20)
    scores = exact_scores(host, queries, ids) if scored else None
    estimate = tail_of(host, "clusters").estimate(0, queries, Selection(ids, scores))
    expected = dense(host, queries, ids)
    torch.testing.assert_close(estimate.lse, expected.lse, atol=0.01, rtol=0)
    torch.testing.assert_close(estimate.out, expected.out, atol=ROUNDED, rtol=0)


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_clusters_stand_for_their_unselected_members(scored, softcap):
    """The definition: a group of a cell's keys at its mean, less the selected ones; a cell that holds none of
    these, and less than a quarter of an equal share of the estimate, at its own mean.
    """
    host, queries = random_host(tokens=3000), some_queries(softcap=softcap)
    ids, tail = some_ids(host, 5), tail_of(host, "clusters")
    scores = exact_scores(host, queries, ids) if scored else None
    estimate = tail.estimate(0, queries, Selection(ids, scores))
    whole, parts = 0, 0
    for head, index in enumerate(tail.clusters(0)):
        cells, stored = index.cells, index.summaries
        keys, values, of_cells = (
            encodings.decode(encodings.as_records(own, encodings.INT8)) for own in stored[:3]
        )
        for row, query in enumerate(queries.vectors[head].numpy()):
            near = cells.means @ query
            shares = torch.softmax(queries.logits(torch.from_numpy(near)) + np.log(cells.counts), 0)
            terms = []
            for cell, members in enumerate(members_of(cells)):
                chosen = np.isin(members, ids[head, row])
                if not chosen.any() and shares[cell] < 0.25 / len(near):
                    terms.append((near[cell], len(members), of_cells[cell]))
                    whole += 1
                    continue
                parts += 1
                for group in range(stored.first[cell], stored.first[cell + 1]):
                    own = stored.labels[members] == group
                    taken, size = host.keys(0, head).array[members[own & chosen]], own.sum()
                    if left := size - len(taken):
                        total = size * (near[cell] + keys[group] @ query) - (taken @ query).sum()
                        terms.append((total / left, left, values[group]))
            score, count, value = (np.array(own, np.float32) for own in zip(*terms, strict=True))
            logits = queries.logits(torch.from_numpy(score)) + np.log(count)
            torch.testing.assert_close(estimate.lse[head, row], logits.logsumexp(0), atol=1e-4, rtol=0)
            out = torch.softmax(logits, 0) @ torch.from_numpy(value)
            torch.testing.assert_close(estimate.out[head, row], out, atol=1e-4, rtol=0)
    assert whole > 0, "some cells stand at their mean"
    assert parts > 0, "and some do not"


def test_sampling_is_unbiased_and_states_its_error():
    """Over many seeds denominator and numerator have the right mean, and the stated spread."""
    host, queries = random_host(tokens=400), some_queries(rows=2)
    ids, seeds = some_ids(host, 40, rows=2), 600
    expected, sums, stated, tail = dense(host, queries, ids), [], [], tail_of(host, "sample:32")
    for tail.seed in range(seeds):
        out, lse, deviation = tail.estimate(0, queries, Selection(ids))
        sums.append(torch.cat([out, torch.ones(HKV, 2, 1)], -1) * (lse - expected.lse).exp()[..., None])
        stated.append((2 * (deviation - expected.lse)).exp())
    drawn = torch.stack(sums)
    truth = torch.cat([expected.out, torch.ones(HKV, 2, 1)], -1)
    error = drawn.std(0) / seeds**0.5
    assert ((drawn.mean(0) - truth).abs() < 4 * error).all()
    spread = drawn[..., -1].std(0)
    assert spread.min() > 0.01  # or there was nothing to estimate
    ratio = torch.stack(stated).mean(0).sqrt() / spread
    assert ((ratio > 0.9) & (ratio < 1.4)).all()  # never too small but for chance


def test_the_unselected_places_in_order():
    places, padding = torch.tensor([[4, 9, 0, 5]]), torch.tensor([[False, True, False, False]])
    assert _unselected(places, padding, torch.arange(7)[None]).tolist() == [[1, 2, 3, 6, 7, 8, 9]]


def test_draws_go_where_the_attention_is():
    """Ten of 2,000 tokens hold nearly all of it: a uniform draw of 64 would mostly miss them."""
    keys = np.random.default_rng(2).standard_normal((1, 2000, D)).astype(np.float32) * 0.3
    keys[:, 700:710, 0] = 20
    host = host_of(np.repeat(keys, HKV, 0), np.repeat(keys, HKV, 0))
    rows = torch.zeros(HKV, 1, D)
    rows[..., 0] = 1
    queries = Queries(rows, SCALING)
    nothing = Selection(torch.zeros(HKV, 1, 0).long())
    estimate = tail_of(host, "sample:64").estimate(0, queries, nothing)
    torch.testing.assert_close(estimate.lse, dense(host, queries).lse, atol=0.2, rtol=0)


@pytest.mark.parametrize("option", ["clusters", "sample"])
def test_rows_are_taken_in_parts_and_each_stands_for_itself(monkeypatch, option):
    host, queries = random_host(), some_queries()
    ids = some_ids(host, 20)
    whole = tail_of(host, option).estimate(0, queries, Selection(ids))
    monkeypatch.setattr(unselected, "SCORES", 1)
    parts = tail_of(host, option).estimate(0, queries, Selection(ids))
    torch.testing.assert_close(parts[:2], whole[:2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("option", ["clusters", "sample"])
def test_a_row_that_selected_everything_has_no_tail(option):
    host, queries = random_host(tokens=37), some_queries()
    ids = torch.arange(37).expand(HKV, 6, 37).clone()
    ids[:, 1, 5] = -1  # this row left token 5
    estimate = tail_of(host, option).estimate(0, queries, Selection(ids))
    assert torch.isneginf(estimate.lse[:, [0, 2, 3, 4, 5]]).all()
    assert (estimate.out[:, 0] == 0).all()
    expected = dense(host, queries, ids)
    torch.testing.assert_close(estimate.lse[:, 1], expected.lse[:, 1], atol=0.1, rtol=0)
    if option == "sample":
        torch.testing.assert_close(estimate.out[:, 1], expected.out[:, 1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("option", ["clusters", "sample"])
@pytest.mark.parametrize("tokens", [1, 17])
def test_a_budget_of_nothing_is_an_estimate_alone(option, tokens):
    host = random_host(tokens)
    state = prefix_of(host, budget="0", tail=option).attend(0, torch.randn(2, 6, 3, D), SCALING, None)
    assert torch.isfinite(state.out).all()
    assert torch.isfinite(state.lse).all()
    assert state.out.abs().max() <= both(host, host.values).abs().max() + 1e-5
    if tokens == 1:  # one token is what it is
        expected = both(host, host.values)[:, 0].repeat_interleave(3, 0)[None, :, None].expand(2, 6, 3, -1)
        atol = ROUNDED if option == "clusters" else 1e-5
        torch.testing.assert_close(state.out, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("option", ["clusters", "sample"])
def test_a_budget_of_everything_stays_as_it_is(option):
    host, query = random_host(), torch.randn(2, 6, 3, D)
    plain, estimated = (
        prefix_of(host, budget="100%", tail=tail).attend(0, query, SCALING, None) for tail in ("off", option)
    )
    assert torch.equal(plain.out, estimated.out)
    assert torch.equal(plain.lse, estimated.lse)


def test_the_prefix_merges_selected_and_unselected_tokens():
    host, query = of_one_kind(), torch.randn(2, 6, 3, D)
    exact, merged = (
        prefix_of(host, **options).attend(0, query, SCALING, None)
        for options in ({"budget": "100%"}, {"budget": "7", "tail": "clusters"})
    )
    torch.testing.assert_close(merged, exact, atol=ROUNDED, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_pages_leave_their_tokens_out(shared):
    """Lists of two pages and a limit inside the second; a shared list is that of the row's token."""
    host, batch, group, tokens = of_one_kind(tokens=70), 2, 3, 2
    rows = torch.randn(HKV, batch * group * tokens, D)
    queries = Queries(rows, SCALING, group=group, tokens=tokens)
    lists = batch * tokens if shared else batch * group * tokens
    pages = torch.rand(HKV, lists, 5).argsort(-1)[..., :2]
    selection = PageSelection(pages, 16, torch.full((HKV,), 25), shared)
    state = host.attend(0, queries, selection, StepStats())
    rest = tail_of(host, "clusters").estimate(0, queries, selection)
    merged = merge_states(state, AttentionState(rest.out, rest.lse))
    expected = dense(host, queries)
    torch.testing.assert_close(merged, expected, atol=ROUNDED, rtol=0)
    assert selected_lists(selection, queries, 70)[0].shape == (HKV, lists, 32)


def test_the_stated_error_is_a_mean_over_rows():
    host, query = random_host(), torch.randn(1, 6, 4, D)
    prefix = prefix_of(host, budget="10", tail="sample:32")
    prefix.attend(0, query, SCALING, None)
    first = prefix.take_stats()
    queries = Queries(query.reshape(HKV, 12, D), SCALING, group=3, tokens=4)
    rest = prefix.tail.estimate(0, queries, prefix.chosen.select(0, queries))
    whole = prefix.attend(0, query, SCALING, None).lse.reshape(HKV, 12)
    assert first.tail_error == pytest.approx(float((rest.deviation - whole).exp().mean()), rel=1e-4)
    assert first.tail_error > 0
    assert first.tail_rows == 24
    total = StepStats(tail_error=0.5, tail_rows=8)
    total.add(first)
    total.add(StepStats())
    assert total.tail_error == pytest.approx((8 * 0.5 + 24 * first.tail_error) / 32)
    larger = prefix_of(host, budget="10", tail="sample:3200")
    larger.attend(0, query, SCALING, None)
    assert larger.stats.tail_error < first.tail_error / 10


def test_forks_share_what_was_built():
    prefix = prefix_of(random_host(), tail="clusters")
    assert prefix.fresh().tail is prefix.tail


@pytest.mark.parametrize(
    "option",
    [
        "",
        "on",
        "clusters:",
        "clusters:16",
        "auto:2",
        "sample:",
        "sample:1",
        "sample:x",
        "sample:1.5",
        "off:3",
    ],
)
def test_another_option_is_refused_with_the_way_out(option):
    with pytest.raises(ConfigError, match=r"choose off, auto, clusters or sample|as in sample:256"):
        tail_of(random_host(), option)


@pytest.mark.parametrize(("option", "error"), [("off", None), ("clusters", 0.03), ("sample:512", 0.12)])
def test_counts_that_top_k_loses_are_repaired(option, error):
    """Tier T3: a head that attends alike to every occurrence of eight words, more than four times its budget
    of 2 %; values are one-hot, so that its output is their counts. Top-k sees those with the largest noise.
    """
    counts, tokens, dim = np.array([60, 45, 35, 25, 18, 14, 10, 8]), 2500, 64
    generator = np.random.default_rng(7)
    words = np.concatenate(
        [np.repeat(np.arange(8), counts), generator.integers(8, 100, tokens - counts.sum())]
    )
    generator.shuffle(words)
    units = np.linalg.qr(generator.standard_normal((dim, dim)))[0].astype(np.float32)
    units = np.concatenate([units, units[8:44]])  # the others only stand at right angles to the eight
    keys = units[words] + 0.004 * generator.standard_normal((HKV, tokens, dim)).astype(np.float32)
    values = np.eye(100, dim, dtype=np.float32)[words] * (words < 8)[:, None]
    host = host_of(keys, np.stack([values] * HKV))
    query = torch.from_numpy(14 * units[:8].sum(0)).expand(1, HKV * 3, 1, dim)

    out = prefix_of(host, budget="2%", tail=option).attend(0, query, 1.0, None).out[0, :, 0, :8].numpy()
    off = np.abs(out / out.sum(1, keepdims=True) * counts.sum() / counts - 1).mean(1)
    if error is None:
        assert (off > 0.15).all()  # or there is nothing to repair
    else:
        assert (off < error).all()
        assert (np.argsort(-out, 1)[:, :3] == [0, 1, 2]).all()
