"""The compiled loops of hosts equal the plain torch reference, whatever the shapes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.attention import pages as dispatch
from offload_decode.attention import pages_host as host_pages
from offload_decode.attention import pages_reference as paging
from offload_decode.attention.pages_reference import PageBounds, page_tokens
from offload_decode.attention.queries import attend
from offload_decode.attention.rows import HeadRows, Rows, numpy_view
from offload_decode.common.rows import encodings
from offload_decode.kv.page_bounds import GrowingBounds

SIZES = [1, 3, 7, 16, 32]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]

shapes = st.fixed_dictionaries(
    {
        "heads": st.integers(1, 5),
        "lists": st.integers(1, 4),
        "group": st.integers(1, 8),
        "dim": st.sampled_from([1, 2, 3, 5, 8, 31, 64, 96, 127, 128]),
        "value_dim": st.sampled_from([1, 2, 16, 31, 64]),
        "tokens": st.integers(1, 150),
        "size": st.sampled_from(SIZES),
        "dtype": st.sampled_from(DTYPES),
    }
)


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def case(heads, lists, group, dim, tokens, size, dtype, seed=0, value_dim=None):
    query = random(heads, lists, group, dim, seed=seed)
    keys = random(heads, tokens, dim, seed=seed + 1, dtype=dtype)
    values = random(heads, tokens, value_dim or dim, seed=seed + 2, dtype=dtype)
    return query, keys, values, -(-tokens // size)


def stored(heads):
    return HeadRows(Rows(numpy_view(own)) for own in heads)


def some_pages(heads, lists, pages, k, seed):
    """Lists of `k` different pages in any order, some of them padded."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(heads, lists, pages, generator=generator).argsort(-1)[..., :k]
    return chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.2, -1)


def bounds_of(keys, size, kept):
    if kept != "float32":
        growing = GrowingBounds(size, kept)
        growing.append(keys)
        return growing.bounds
    parts = keys.float().split(size, dim=1)
    return PageBounds(*(torch.stack([getattr(p, f)(1) for p in parts], 1) for f in ("amin", "amax")))


def close(state, expected):
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)


@settings(deadline=None, max_examples=60)
@given(shapes, st.sampled_from(["float32", "fp16", "int8"]))
def test_page_scores(shape, kept):
    query, keys, _, _ = case(**shape)
    bounds = bounds_of(keys, shape["size"], kept)
    scores = host_pages.page_scores(query, bounds)
    torch.testing.assert_close(scores, paging.page_scores(query, bounds), atol=1e-4, rtol=1e-5)
    page = torch.arange(shape["tokens"]) // shape["size"]
    exact = torch.einsum("hqgd,hnd->hqgn", query, keys.float()).amax(2)
    assert (exact <= scores[..., page] + 1e-3).all()


@pytest.mark.parametrize("kept", ["fp16", "int8"])
@pytest.mark.parametrize("pages", [255, 256, 257, 1500])
def test_pages_of_several_scales_and_tasks(kept, pages):
    bounds = bounds_of(random(2, 3 * pages, 5), 3, kept)
    query = random(2, 3, 2, 5)
    expected = paging.page_scores(query, bounds)
    torch.testing.assert_close(host_pages.page_scores(query, bounds), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("heads", [*range(1, 41)])
def test_every_number_of_heads(heads):
    query, keys, values, _ = case(heads, 2, 3, 4, 40, 7, torch.float16)
    bounds = bounds_of(keys, 7, "fp16")
    scores = host_pages.page_scores(query, bounds)
    torch.testing.assert_close(scores, paging.page_scores(query, bounds), atol=1e-4, rtol=1e-5)
    chosen, limit = host_pages.top_pages(scores, 3), torch.arange(heads) % 25
    assert torch.equal(chosen, paging.top_pages(scores, 3))
    close(
        host_pages.attend_pages(query, stored(keys), stored(values), chosen, 7, limit, 0.3),
        paging.attend_pages(query, keys, values, chosen, 7, limit, 0.3),
    )


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 300), st.integers(0, 310), st.integers(0, 99))
def test_top_pages_are_the_best_and_of_equals_the_earlier(heads, lists, pages, k, seed):
    scores = random(heads, lists, pages, seed=seed)
    for ties in (scores, scores.round(), -scores.round().abs(), torch.zeros_like(scores) * scores.sign()):
        assert torch.equal(host_pages.top_pages(ties, k), paging.top_pages(ties, k))


def test_top_pages_of_many():
    scores = random(1, 2, 60_000).mul(8).round()
    scores[0, 0, ::7] = -torch.inf
    assert torch.equal(host_pages.top_pages(scores, 3000), paging.top_pages(scores, 3000))


@pytest.mark.parametrize("softcap", [None, 1.5])
@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(1, 12), st.integers(0, 200), st.integers(0, 99))
def test_attention_over_pages(softcap, shape, k, limit, seed):
    query, keys, values, pages = case(**shape, seed=seed)
    chosen = some_pages(shape["heads"], shape["lists"], pages, min(k, pages), seed)
    places = torch.full((shape["heads"],), limit)
    how = (chosen, shape["size"], places, 0.3, softcap)
    expected = paging.attend_pages(query, keys, values, *how)
    close(host_pages.attend_pages(query, stored(keys), stored(values), *how), expected)

    if (chosen < 0).all():
        return
    # What a device attends to: the pages of all lists, copied and renumbered.
    own_keys, own_values, numbers = dispatch.gather_pages(
        stored(keys), stored(values), chosen, shape["size"], torch.device("cpu")
    )
    close(paging.attend_pages(query, own_keys, own_values, numbers, *how[1:]), expected)
    union = max(len(own[own >= 0].unique()) for own in chosen)
    assert all(torch.isfinite(own.float()).all() for own in (own_keys, own_values))
    assert own_keys.shape[1] <= (union + 1) * shape["size"]


@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(0, 12), st.integers(0, 200), st.integers(0, 99))
def test_token_scores_are_the_inner_products(shape, k, limit, seed):
    query, keys, _, pages = case(**shape, seed=seed)
    chosen = some_pages(shape["heads"], shape["lists"], pages, min(k, pages), seed)
    places = torch.full((shape["heads"],), limit)
    scores = host_pages.token_scores(query, stored(keys), chosen, shape["size"], places)
    ids = page_tokens(chosen, shape["size"], shape["tokens"], places).unsqueeze(2).expand(scores.shape)
    exact = torch.einsum("hqgd,hnd->hqgn", query, keys.float()).gather(3, ids.clamp(min=0))
    torch.testing.assert_close(scores, exact.masked_fill(ids < 0, -torch.inf), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("encoding", encodings.LARGEST_CODE)
@settings(deadline=None, max_examples=40)
@given(shapes, st.integers(1, 12), st.integers(0, 200), st.integers(0, 99))
def test_encoded_rows_are_what_they_decode_to(encoding, shape, k, limit, seed):
    """Keys and values may be encoded unlike."""
    query, keys, values, pages = case(
        **{**shape, "dim": 2 * shape["dim"], "value_dim": 2 * shape["value_dim"]}, seed=seed
    )
    chosen = some_pages(shape["heads"], shape["lists"], pages, min(k, pages), seed)
    how = (chosen, shape["size"], torch.full((shape["heads"],), limit))
    key_records = [encodings.encode(own.float().numpy(), encodings.INT8) for own in keys]
    value_records = [encodings.encode(own.float().numpy(), encoding) for own in values]
    decoded = [
        torch.from_numpy(np.stack([encodings.decode(own) for own in part]))
        for part in (key_records, value_records)
    ]
    rows = [HeadRows(map(Rows, part)) for part in (key_records, value_records)]
    close(host_pages.attend_pages(query, *rows, *how, 0.3), paging.attend_pages(query, *decoded, *how, 0.3))
    scores = host_pages.token_scores(query, rows[0], *how)
    expected = host_pages.token_scores(query, stored(decoded[0]), *how)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-5)
    if (chosen >= 0).any():
        *own, numbers = dispatch.gather_pages(*rows, chosen, shape["size"], torch.device("cpu"))
        close(
            paging.attend_pages(query, *own, numbers, *how[1:], 0.3),
            paging.attend_pages(query, *decoded, *how, 0.3),
        )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_pages_are_dense_attention(softcap):
    query, keys, values, pages = case(3, 2, 4, 16, 101, 7, torch.bfloat16)
    everything = torch.arange(pages).expand(3, 2, pages)
    state = host_pages.attend_pages(
        query, stored(keys), stored(values), everything, 7, torch.full((3,), pages * 7), 0.3, softcap
    )
    dense = attend(query.flatten(1, 2)[None], keys[None], values[None], 0.3, softcap=softcap)
    torch.testing.assert_close(state.out.flatten(1, 2), dense.out[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(state.lse.flatten(1, 2), dense.lse[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [0, 3])
def test_lists_of_nothing_are_the_empty_state(k):
    query, keys, values, _ = case(2, 3, 2, 8, 20, 16, torch.float16, value_dim=5)
    nothing = torch.full((2, 3, k), -1)
    state = dispatch.attend_pages(query, stored(keys), stored(values), nothing, 16, torch.full((2,), 99), 0.3)
    assert torch.equal(state.out, torch.zeros(2, 3, 2, 5))
    assert torch.isneginf(state.lse).all()


def test_large_scores_do_not_overflow_the_softmax():
    query, keys, values, pages = case(1, 1, 2, 4, 30, 16, torch.float32)
    how = (torch.arange(pages).expand(1, 1, pages), 16, torch.tensor([30]), 1.0)
    close(
        host_pages.attend_pages(1e4 * query, stored(keys), stored(values), *how),
        paging.attend_pages(1e4 * query, keys, values, *how),
    )


@pytest.mark.parametrize("dim", [2, 256])  # offsets beyond 2**31 numbers
def test_ten_million_tokens(tmp_path, dim):
    """A sparse file: its last pages lie beyond the reach of 32-bit offsets, and are read right."""
    tokens, size = 10_000_005, 16
    keys = np.memmap(tmp_path / "keys", np.float16, "w+", shape=(tokens, dim))
    last = -(-tokens // size) - 1
    chosen = torch.tensor([[[last, 3, last - 1, 0]]])
    ids = page_tokens(chosen, size, tokens, torch.tensor([64]))[0, 0]
    ids = ids[ids >= 0].numpy()
    written = np.random.default_rng(0).standard_normal((len(ids), dim)).astype(np.float16)
    keys[ids] = written
    query, own, rows = random(1, 1, 2, dim), torch.from_numpy(written), HeadRows([Rows(keys)])
    state = host_pages.attend_pages(query, rows, rows, chosen, size, torch.tensor([64]), 0.3)
    dense = attend(query[0][None], own[None, None], own[None, None], 0.3)
    torch.testing.assert_close(state.out[0], dense.out[0], atol=1e-5, rtol=0)
    scores = host_pages.token_scores(query, rows, chosen, size, torch.tensor([64]))
    torch.testing.assert_close(
        scores[scores > -torch.inf].reshape(2, -1), query[0, 0] @ own.float().T, atol=1e-4, rtol=1e-5
    )


def test_the_pages_of_ten_million_tokens():
    pages = 625_001
    lower = torch.zeros(1, pages, 1, dtype=torch.int8)
    upper = lower.clone()
    upper[0, [7, 400_000, pages - 1], 0] = torch.tensor([5, 9, 7], dtype=torch.int8)
    bounds = PageBounds(lower, upper, torch.full((1, -(-pages // paging.SCALE_PAGES), 1), 0.5))
    scores = host_pages.page_scores(torch.ones(1, 1, 1, 1), bounds)
    assert host_pages.top_pages(scores, 5).tolist() == [[[400_000, pages - 1, 7, 0, 1]]]
    assert scores[0, 0, -1] == 3.5


def test_a_list_does_not_depend_on_the_others():
    query, keys, values, _ = case(2, 7, 3, 40, 300, 7, torch.float16)
    bounds = bounds_of(keys, 7, "fp16")
    scores = host_pages.page_scores(query, bounds)
    chosen, limit = host_pages.top_pages(scores, 5), torch.tensor([35, 33])
    rows = stored(keys), stored(values)
    out, lse = host_pages.attend_pages(query, *rows, chosen, 7, limit, 0.3)
    for place in range(7):
        part = slice(place, place + 1)
        assert torch.equal(host_pages.page_scores(query[:, part], bounds), scores[:, part])
        alone = host_pages.attend_pages(query[:, part], *rows, chosen[:, part], 7, limit, 0.3)
        assert torch.equal(alone.out, out[:, part])
        assert torch.equal(alone.lse, lse[:, part])
