"""Dense attention over stored rows equals its definition, whatever the rows are and however many."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.attention import host_dense
from offload_decode.attention.host_dense import BLOCK, attend_all, attend_groups, attend_tensors
from offload_decode.attention.queries import attend, empty_state
from offload_decode.attention.rows import HeadRows, Rows
from tests.attention.test_host_tokens import CPU, FORMS, PAIRS, stored


def reference(query, keys, values, scaling, softcap=None):
    keys, values = (
        torch.stack([own.read(slice(None), CPU, torch.float64) for own in part])[None]
        for part in (keys, values)
    )
    heads, rows, _ = query.shape
    scores = query.double() @ keys[0].transpose(-1, -2) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    assert scores.shape == (heads, rows, keys.shape[2])
    return scores.softmax(-1) @ values[0], scores.logsumexp(-1)


def close(state, expected, most=2e-6):
    for part, own in zip(state, expected, strict=True):
        assert (part.dtype, part.shape) == (torch.float32, own.shape)
        torch.testing.assert_close(part.double(), own, atol=most, rtol=most)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 3 * BLOCK + 1),
    st.sampled_from(PAIRS),
    st.sampled_from([None, 5.0]),
    st.integers(0, 99),
)
def test_it_is_attention_to_all_tokens(heads, rows, n, forms, softcap, seed):
    keys, values = stored(forms[0], heads, n, 24, seed), stored(forms[1], heads, n, 16, seed + 1)
    query = torch.randn(heads, rows, 24, generator=torch.Generator().manual_seed(seed))
    state = attend_all(query, keys, values, 0.3, softcap)
    close(state, reference(query, keys, values, 0.3, softcap))


@pytest.mark.parametrize("form", FORMS)
def test_parts_and_rows_in_many_pieces_change_nothing_but_rounding(form, monkeypatch):
    keys, values = stored(form, 2, 1000, 32, 0), stored(form, 2, 1000, 32, 1)
    query = torch.randn(2, 37, 32, generator=torch.Generator().manual_seed(2))
    whole = attend_all(query, keys, values, 0.5)
    close(whole, reference(query, keys, values, 0.5))
    monkeypatch.setattr(host_dense, "PART", 96)
    monkeypatch.setattr(host_dense, "TOGETHER", 8)
    parts = attend_all(query, keys, values, 0.5)
    assert not torch.equal(parts.out, whole.out)
    close(parts, reference(query, keys, values, 0.5))
    monkeypatch.setattr(host_dense, "PARTS", 3)
    close(attend_all(query, keys, values, 0.5), reference(query, keys, values, 0.5))


def test_a_row_does_not_depend_on_the_others_of_its_batch():
    keys, values = stored("float16", 2, 300, 32, 0), stored("float16", 2, 300, 32, 1)
    query = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(2))
    together = attend_all(query, keys, values, 0.5)
    for row in range(11):
        alone = attend_all(query[:, row : row + 1], keys, values, 0.5)
        assert torch.equal(alone.out[:, 0], together.out[:, row])
        assert torch.equal(alone.lse[:, 0], together.lse[:, row])


def test_logits_of_any_size_make_weights():
    keys, values = stored("float32", 1, 200, 8, 0), stored("float32", 1, 200, 8, 1)
    query = torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(2))
    for scaling in (0.0, 1e-3, 50.0, 1e4, -1e4):
        close(attend_all(query, keys, values, scaling), reference(query, keys, values, scaling), 1e-4)


def test_logits_of_minus_infinity_have_no_weight(monkeypatch):
    monkeypatch.setattr(host_dense, "PART", 3 * BLOCK)
    numbers = np.random.default_rng(0).standard_normal((6 * BLOCK + 1, 8)).astype(np.float32)
    values, query = stored("float32", 1, len(numbers), 8, 1), torch.ones(1, 4, 8)
    # A block, a part and a block, the last token, and all of them.
    for gone in (slice(BLOCK), slice(4 * BLOCK), slice(6 * BLOCK, None), slice(None)):
        infinite = numbers.copy()
        infinite[gone, 3] = -np.inf
        keys = HeadRows([Rows(infinite)])
        dense = [own[0].read(slice(None), CPU)[None, None] for own in (keys, values)]
        expected = attend(query[None], *dense, 0.5)
        close(attend_all(query, keys, values, 0.5), [part[0].double() for part in expected])
    infinite[2, 3] = np.nan
    assert attend_all(query, HeadRows([Rows(infinite)]), values, 0.5).out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_one_query_meets_generated_rows_where_they_lie(dtype, softcap):
    """In a buffer with room for more, as `kv.generated` has them."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 1, 24, generator=generator), torch.randn(2, 2, 90, 24, generator=generator)
    value = torch.randn(2, 2, 90, 16, generator=generator).to(dtype)
    key = key.to(dtype)
    for length in (1, 2, 77):
        own = query, key[:, :, :length], value[:, :, :length]
        state = attend_tensors(*own, 0.3, softcap)
        assert state is not None
        close(state, [part.double() for part in attend(*own, 0.3, None, softcap)], 1e-5)


def test_rows_that_do_not_lie_one_behind_the_other_are_left_to_torch():
    query, rows = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)
    by_channel = rows.transpose(2, 3).contiguous().transpose(2, 3)
    for other in (
        by_channel,
        rows[:, :, ::2],
        rows.double(),
        rows[:, :, :0],
        torch.nn.Parameter(rows),
        rows.to("meta"),
    ):
        assert attend_tensors(query, other, other, 1.0) is None
        assert attend_tensors(query, rows, other, 1.0) is None


def test_nothing_is_the_empty_state():
    keys, values = stored("float16", 2, 0, 8, 0), stored("float16", 2, 0, 6, 1)
    query = torch.randn(2, 3, 8)
    for part, own in zip(attend_all(query, keys, values, 0.5), empty_state(query, 6), strict=True):
        assert torch.equal(part, own)
    filled = stored("float16", 2, 5, 8, 0)
    assert attend_all(query[:, :0], filled, filled, 0.5).out.shape == (2, 0, 8)


def test_what_it_holds_is_stated(monkeypatch):
    keys, values = stored("float16", 2, 4000, 64, 0), stored("float16", 2, 4000, 64, 1)
    monkeypatch.setattr(host_dense, "PART", 100)
    for rows in (50, 500):  # for a few, what threads widen is as much
        query = torch.randn(2, rows, 64)
        attend_all(query, keys, values, 0.5)  # compiled
        tracemalloc.start()
        try:
            attend_all(query, keys, values, 0.5)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 0.5 * held <= host_dense.state_bytes(4000, 2, rows, 64) <= 2 * held


@pytest.mark.parametrize(("n", "group"), [(128, 64), (100, 32), (7, 64)])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_groups_are_attended_to_apart_and_without_what_a_row_skips(n, group, softcap):
    keys, values = stored("float16", 2, n, 24, 1), stored("float16", 2, n, 16, 2)
    query = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
    skipped = np.random.default_rng(4).random((2, 5, n)) < 0.4
    skipped[0, 1] = True
    out, lse = attend_groups(query.numpy(), keys.compiled, values.compiled, 16, group, skipped, 0.3, softcap)
    assert lse.shape == (-(-n // group), 2, 5)
    for number, (own, of) in enumerate(zip(out, lse, strict=True)):
        part = slice(number * group, (number + 1) * group)
        key, value = (
            torch.stack([head.read(slice(None), CPU)[part] for head in rows])[None] for rows in (keys, values)
        )
        for row in range(5):
            seen = torch.from_numpy(~skipped[None, :, row : row + 1, part])
            expected = attend(query[None, :, row : row + 1], key, value, 0.3, seen, softcap)
            torch.testing.assert_close(
                torch.from_numpy(own[:, row]), expected.out[0, :, 0], atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                torch.from_numpy(of[:, row]), expected.lse[0, :, 0], atol=1e-5, rtol=1e-5
            )
