"""Bounds hold however they are kept, and do not depend on how the tokens came."""

from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.attention.rows import numpy_view
from offload_decode.common.errors import ConfigError, StoreError
from offload_decode.kv import page_bounds
from offload_decode.kv.page_bounds import GrowingBounds, stored_bounds
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape

SIZES = st.sampled_from([1, 3, 7, 16, 32])
DTYPES = {"fp16": [torch.float16, torch.bfloat16, torch.float32], "int8": [torch.bfloat16, torch.float32]}
METADATA = st.sampled_from(["fp16", "int8"])


@st.composite
def keys_of(draw, metadata):
    """`[Hkv, N, D]` of numbers of any size: subnormal, tiny, huge, of both signs, many of them equal."""
    heads, tokens, dim = draw(st.integers(1, 3)), draw(st.integers(1, 70)), draw(st.integers(1, 5))
    largest = 65504.0 if metadata == "fp16" else torch.finfo(torch.bfloat16).max
    numbers = st.one_of(
        st.floats(-largest, largest, width=32),
        st.floats(-1, 1, width=32),
        st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 2e-38, 6e-8, -6e-8, 5.96e-8, largest, -largest, 1 / 3]),
    )
    few = draw(st.lists(numbers, min_size=1, max_size=12))
    seed = draw(st.integers(0, 1 << 30))
    place = torch.randint(len(few), (heads, tokens, dim), generator=torch.Generator().manual_seed(seed))
    keys = torch.tensor(few, dtype=torch.float32)[place].to(draw(st.sampled_from(DTYPES[metadata])))
    # Rounding to bfloat16 may leave the range of fp16.
    return keys if metadata == "int8" else keys.clamp(-65280, 65280)


@st.composite
def cases(draw):
    metadata = draw(METADATA)
    return metadata, draw(keys_of(metadata)), draw(SIZES)


def grown(keys, size, metadata, cuts=()):
    bounds = GrowingBounds(size, metadata)
    for start, end in zip([0, *cuts], [*cuts, keys.shape[1]], strict=True):
        bounds.append(keys[:, start:end])
    return bounds.bounds


@settings(deadline=None)
@given(cases())
def test_every_key_lies_within_the_bounds_of_its_page(case):
    metadata, keys, size = case
    lower, upper = grown(keys, size, metadata).widened()
    assert lower.shape == upper.shape == (len(keys), -(-keys.shape[1] // size), keys.shape[2])
    page = torch.arange(keys.shape[1]) // size
    assert (lower[:, page] <= keys.float()).all()
    assert (keys.float() <= upper[:, page]).all()
    assert torch.isfinite(lower).all()
    assert torch.isfinite(upper).all()


@settings(deadline=None)
@given(cases(), st.data())
def test_bounds_are_the_same_bits_however_the_tokens_came(case, data):
    metadata, keys, size = case
    cuts = sorted(data.draw(st.lists(st.integers(0, keys.shape[1]), max_size=5)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_bounds, "SCALE_PAGES", 3)
        whole, pieces = grown(keys, size, metadata), grown(keys, size, metadata, cuts)
    assert same_bits(whole, pieces)


def same_bits(first, second):
    return all(
        (a is None and b is None) or numpy_view(a).tobytes() == numpy_view(b).tobytes()
        for a, b in zip(first, second, strict=True)
    )


@settings(deadline=None)
@given(keys_of("fp16"), SIZES)
def test_fp16_bounds_are_the_nearest_outside(keys, size):
    lower, upper = grown(keys, size, "fp16").widened()
    for page, (low, high) in enumerate(zip(lower.unbind(1), upper.unbind(1), strict=True)):
        own = keys[:, page * size : (page + 1) * size].float()
        step = (own.abs().amax(1) / 1024).clamp(min=2.0**-24)
        assert (own.amin(1) - low <= step).all()
        assert (high - own.amax(1) <= step).all()


@settings(deadline=None)
@given(keys_of("int8"), SIZES)
def test_int8_bounds_are_within_a_step_of_the_channels_scale(keys, size):
    bounds = grown(keys, size, "int8")
    lower, upper = bounds.widened()
    pages = torch.nn.functional.pad(keys.float(), (0, 0, 0, -keys.shape[1] % size), value=-torch.inf)
    slack = bounds.scale.double() * 1.01
    highest = pages.unflatten(1, (-1, size)).amax(2)
    assert (upper.double() - highest.double() <= slack).all()
    assert (bounds.scale.double() <= keys.float().double().abs().amax(1, keepdim=True) / 126 + 1.5e-45).all()
    assert (lower <= highest).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("metadata", ["fp16", "int8"])
@pytest.mark.parametrize("size", [1, 3, 7, 16, 32, 48, 64])
@pytest.mark.parametrize("tokens", [1, 16, 31, 100, 777])
def test_a_store_gives_the_bounds_of_its_keys(monkeypatch, dtype, metadata, size, tokens):
    monkeypatch.setattr(page_bounds, "SCALE_PAGES", 5)  # several blocks of scales
    keys = torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    arrays = [[numpy_view(head) for head in keys]]
    store = MemoryStore(ModelShape.uniform((LayerKind.FULL,), 2, 2, 4), arrays, arrays)
    asked = Mock(wraps=store, manifest=store.manifest)
    assert same_bits(stored_bounds(asked, 0, size, metadata).bounds, grown(keys, size, metadata))
    assert asked.pages.called == (size % 16 == 0)
    assert asked.keys.called == (size % 16 != 0)


@pytest.mark.parametrize("large", [65520.0, -65520.0, 1e30])
def test_keys_beyond_fp16_name_the_way_out(large):
    keys = torch.zeros(1, 5, 2)
    keys[0, 3, 1] = large
    with pytest.raises(ConfigError, match="metadata=int8"):
        _ = grown(keys, 16, "fp16")
    assert torch.isfinite(torch.stack(grown(keys, 16, "int8").widened())).all()


@pytest.mark.parametrize("metadata", ["fp16", "int8"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3.4028e38])
def test_keys_that_nothing_bounds_are_refused(metadata, bad):
    with pytest.raises(StoreError, match="prefill"):
        GrowingBounds(16, metadata).append(torch.tensor([[[0.0, bad]]]))


def test_the_largest_key_of_a_channel_is_within_127_steps():
    """Of any size, subnormal to huge: a scale that was rounded down would leave some of them outside."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-149, 127, (1, 1, 20_000), generator=generator)
    keys = torch.ldexp(1 + torch.rand(powers.shape, generator=generator), powers)
    lower, upper = grown(torch.cat([keys, -keys]), 16, "int8").widened()
    assert (lower[1] <= -keys[0]).all()
    assert (upper[0] >= keys[0]).all()
