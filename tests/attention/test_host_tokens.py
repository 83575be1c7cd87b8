"""Attention to tokens of a row's own, and gathering rows, equal their definitions, whatever the rows are."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from offload_decode.attention import host_tokens
from offload_decode.attention.host_tokens import attend_tokens
from offload_decode.attention.queries import Queries, attend
from offload_decode.attention.rows import HeadRows, Rows, gather_rows, unite
from offload_decode.common.rows import compiled, encodings, threads

CPU = torch.device("cpu")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMS = [*DTYPES, encodings.INT8, encodings.INT4]
PAIRS = [*((form, form) for form in FORMS), (encodings.INT8, encodings.INT4), ("float16", encodings.INT8)]


def stored(form, heads, n, dim, seed):
    rows = np.random.default_rng(seed).standard_normal((heads, n, dim)).astype(np.float32)
    arrays = [own.astype(DTYPES[form]) if form in DTYPES else encodings.encode(own, form) for own in rows]
    for array in arrays:
        array.flags.writeable = False
    return HeadRows(Rows(array) for array in arrays)


def drawn(heads, rows, k, n, seed):
    """Unique ids a row, with padding anywhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(heads, rows, max(n, k), generator=generator).argsort(-1)[..., :k]
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.2, -1, ids).where(ids < n, -1)


def reference(query, keys, values, ids, scaling, softcap):
    """Dense attention with everything masked that a row does not name."""
    n = len(keys[0])
    seen = torch.zeros(*ids.shape[:2], n + 1, dtype=torch.bool).scatter_(2, ids.where(ids >= 0, n), True)
    states = [
        attend(
            query[None, h : h + 1],
            keys[h].read(slice(None), CPU)[None, None],
            values[h].read(slice(None), CPU)[None, None],
            scaling,
            seen[h, None, None, :, :n][0],
            softcap,
        )
        for h in range(len(query))
    ]
    return torch.cat([s.out[0] for s in states]), torch.cat([s.lse[0] for s in states])


@settings(max_examples=60, deadline=None)
@given(
    heads=st.integers(1, 4),
    rows=st.integers(1, 9),
    k=st.integers(1, 70),
    n=st.integers(1, 60),
    dim=st.sampled_from([2, 6, 8, 30, 64, 128]),
    value_dim=st.sampled_from([2, 16, 64]),
    forms=st.sampled_from(PAIRS),
    scored=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    entries=st.sampled_from([1, 50, 1 << 18]),
    sparse=st.sampled_from([0, 10**6]),
    seed=st.integers(0, 2**31),
)
def test_equals_masked_attention(
    heads, rows, k, n, dim, value_dim, forms, scored, softcap, entries, sparse, seed
):
    keys, values = (
        stored(form, heads, n, width, seed + side)
        for side, (form, width) in enumerate(zip(forms, (dim, value_dim), strict=True))
    )
    query = torch.randn(heads, rows, dim, generator=torch.Generator().manual_seed(seed))
    ids = drawn(heads, rows, k, n, seed)
    scores = None
    if scored:
        every = torch.stack([query[h] @ keys[h].read(slice(None), CPU).T for h in range(heads)])
        scores = every.gather(2, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_tokens, "ENTRIES", entries)
        patch.setattr(host_tokens, "SPARSE", sparse)
        state, read = attend_tokens(Queries(query, 0.3, softcap), keys, values, ids, scores)
    expected = reference(query, keys, values, ids, 0.3, softcap)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)
    named = sum(len(ids[h][ids[h] >= 0].unique()) for h in range(heads))
    width = values[0].row_bytes + (0 if scored else keys[0].row_bytes)
    assert named * width <= read <= int((ids >= 0).sum()) * width


def test_queries_that_share_tokens_read_them_once(monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 1)
    keys, values = (stored("float16", 2, 50, 8, side) for side in range(2))
    ids = torch.arange(20).expand(2, 6, 20)
    for scores, stores in ((None, 2), (torch.zeros(ids.shape), 1)):
        _, read = attend_tokens(Queries(torch.randn(2, 6, 8), 0.3), keys, values, ids, scores)
        assert read == stores * 2 * 20 * 16


def test_known_scores_are_used_without_reading_keys():
    keys, values = (HeadRows([Rows(np.full((9, 4), value, np.float32))]) for value in (np.nan, 2.0))
    ids, scores = torch.tensor([[[3, 5, -1]]]), torch.tensor([[[0.0, 1.0, -torch.inf]]])
    state, _ = attend_tokens(Queries(torch.ones(1, 1, 4), 1.0), keys, values, ids, scores)
    assert torch.allclose(state.out, torch.tensor(2.0))
    assert torch.allclose(state.lse, torch.tensor(np.log(1 + np.e), dtype=torch.float32))


def test_a_row_without_tokens_is_the_empty_state_and_nan_is_not_hidden():
    keys = stored("float32", 1, 9, 4, 0)
    ids = torch.tensor([[[-1, -1], [1, 2]]])
    queries = Queries(torch.tensor([[[1.0] * 4, [torch.nan] * 4]]), 1.0)
    out, lse = attend_tokens(queries, keys, keys, ids, None)[0]
    assert (out[0, 0] == 0).all()
    assert torch.isneginf(lse[0, 0])
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan()
    unseen = torch.full(ids.shape, -torch.inf)
    out, lse = attend_tokens(queries, keys, keys, ids, unseen)[0]
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("scored", [False, True])
def test_an_id_beyond_the_store_is_refused(scored):
    keys = stored("float16", 1, 9, 4, 0)
    ids = torch.tensor([[[8, 9]]])
    scores = torch.zeros(ids.shape) if scored else None
    with pytest.raises(IndexError, match="rows that there are"):
        attend_tokens(Queries(torch.ones(1, 1, 4), 1.0), keys, keys, ids, scores)
    with pytest.raises(IndexError, match="rows that there are"):
        unite(ids, 9)


def test_every_half_is_widened_exactly():
    halves = np.arange(1 << 16, dtype=np.uint16)
    expected = halves.view(np.float16).astype(np.float32)
    for widen in (compiled.multiplied, compiled.half_to_single):

        @njit
        def widened(halves, out, widen=widen):
            for place in range(len(halves)):
                out[place] = widen(halves[place])

        wide = np.empty(len(halves), np.float32)
        widened(halves, wide)
        assert np.array_equal(wide, expected, equal_nan=True)
        assert np.array_equal(np.signbit(wide), np.signbit(expected))


@settings(max_examples=40, deadline=None)
@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 5),
    k=st.integers(0, 40),
    n=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
def test_the_union_names_every_token_once_in_order(heads, rows, k, n, seed):
    ids = drawn(heads, rows, k, n, seed)
    union, places = unite(ids, n)
    behind = torch.from_numpy(np.concatenate(union))
    first = 0
    for own, place, named in zip(union, places, ids, strict=True):
        assert own.tolist() == sorted(set(named[named >= 0].tolist()))
        assert torch.equal((place < 0), (named < 0))
        assert (behind[place[place >= 0]] == named[named >= 0]).all()
        assert ((place < 0) | ((place >= first) & (place < first + len(own)))).all(), "of its own head"
        first += len(own)


@pytest.mark.parametrize("form", FORMS)
def test_gathered_rows_are_the_stored_bytes_head_by_head(form):
    rows = stored(form, 3, 40, 6, 0)
    tokens = [np.array(own, np.int64) for own in ([7, 0, 39], [], [5])]
    out = torch.zeros(4, rows[0].row_bytes, dtype=torch.uint8)
    gather_rows(rows, tokens, out)
    expected = [
        own.bits[list(part)].view(np.uint8) for own, part in zip(rows, tokens, strict=True) if len(part)
    ]
    assert np.array_equal(out.numpy(), np.concatenate(expected))
