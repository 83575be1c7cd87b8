"""States of attention: their definition, their merge, and the fused path against the reference."""

import pytest
import torch

from offload_decode.attention import dense
from offload_decode.attention.dense import attend_blocks, attend_dense
from offload_decode.attention.queries import attend, empty_state, merge_states, sink_state
from offload_decode.types import AttentionState

SCALING = 0.3


def qkv(batch=2, heads=4, kv_heads=2, tokens=5, keys=23, dims=(24, 16)):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, tokens, dims[0], generator=generator)
    key, value = (torch.randn(batch, kv_heads, keys, dim, generator=generator) for dim in dims)
    return query, key, value


def by_hand(query, key, value, softcap=None):
    """Softmax attention written out in float64, one row at a time."""
    out, lse = torch.empty(*query.shape[:3], value.shape[-1]), torch.empty(query.shape[:3])
    group = query.shape[1] // key.shape[1]
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        scores = (key[b, h // group].double() @ query[b, h, t].double()) * SCALING
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        lse[b, h, t] = scores.exp().sum().log()
        out[b, h, t] = (scores.exp() / scores.exp().sum()) @ value[b, h // group].double()
    return AttentionState(out, lse)


def close(first, second, tolerance=2e-6):
    torch.testing.assert_close(first, second, atol=tolerance, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (1, 1), (40, 8), (7, 1)])
def test_attend_is_softmax_attention(heads, softcap):
    tensors = qkv(heads=heads[0], kv_heads=heads[1])
    close(attend(*tensors, SCALING, softcap=softcap), by_hand(*tensors, softcap=softcap))


@pytest.mark.parametrize("cut", [0, 1, 11, 22, 23])
def test_two_parts_merge_to_the_whole_in_either_order(cut):
    query, key, value = qkv()
    whole = attend(query, key, value, SCALING)
    first = attend(query, key[:, :, :cut], value[:, :, :cut], SCALING)
    second = attend(query, key[:, :, cut:], value[:, :, cut:], SCALING)
    close(merge_states(first, second), whole)
    close(merge_states(second, first), whole)


def test_merge_is_associative_and_keeps_large_scores_apart():
    query, key, value = qkv()
    parts = [attend(query, key[:, :, i::3] * 40, value[:, :, i::3], 1.0) for i in range(3)]
    left = merge_states(merge_states(parts[0], parts[1]), parts[2])
    right = merge_states(parts[0], merge_states(parts[1], parts[2]))
    close(left, right, 1e-5)
    close(left, attend(query, key * 40, value, 1.0), 1e-3)


def test_the_empty_state_is_neutral_and_masked_rows_are_empty():
    query, key, value = qkv()
    state = attend(query, key, value, SCALING)
    nothing = empty_state(query, value.shape[-1])
    close(merge_states(state, nothing), state, 0)
    close(merge_states(nothing, nothing), nothing, 0)
    mask = torch.zeros(2, 1, 5, 23, dtype=torch.bool)
    close(attend(query, key, value, SCALING, mask), nothing, 0)
    close(attend_dense(query, key, value, SCALING, mask), nothing, 0)


def test_a_sink_takes_its_share_of_the_denominator_once():
    query, key, value = qkv()
    sinks = torch.tensor([-1.0, 0.0, 1.0, 5.0])
    state = attend(query, key, value, SCALING)
    sunk = merge_states(state, sink_state(sinks, state))
    share = state.lse.exp() / (state.lse.exp() + sinks.exp()[:, None])
    torch.testing.assert_close(sunk.out, state.out * share[..., None], atol=2e-6, rtol=0)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("keys", [1, 23, 600])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16), (16, 24)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_path_equals_the_reference(tokens, keys, dims, masked):
    tensors = qkv(tokens=tokens, keys=keys, dims=dims)
    mask = (
        torch.rand(2, 1, tokens, keys, generator=torch.Generator().manual_seed(1)) > 0.4 if masked else None
    )
    if mask is not None:
        mask[0, 0, 0] = False
    close(attend_dense(*tensors, SCALING, mask), attend(*tensors, SCALING, mask), 5e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shared", [False, True])
def test_rows_in_parts_are_the_rows_at_once(softcap, shared, monkeypatch):
    tensors, generator = qkv(tokens=50, keys=70), torch.Generator().manual_seed(1)
    mask = torch.rand(1 if shared else 2, 1, 1 if shared else 50, 70, generator=generator) > 0.4
    monkeypatch.setattr(dense, "SCORES", 7 * 2 * 70)  # seven rows of the mask, less than one of all scores
    parts, taken = dense._in_parts, []
    monkeypatch.setattr(dense, "_in_parts", lambda *given: (taken.append(given[3]), parts(*given))[1])
    for own in (mask, None):
        close(attend_dense(*tensors, SCALING, own, softcap), attend(*tensors, SCALING, own, softcap), 5e-6)
    assert taken == [1, 1] if softcap else [7, 50]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    query, key, value = (part.to(dtype) for part in qkv())
    expected = attend(query.float(), key.float(), value.float(), SCALING)
    close(attend(query, key, value, SCALING), expected, 0)
    close(attend_dense(query, key, value, SCALING), expected)


def test_blocks_merge_to_the_whole():
    query, key, value = qkv(batch=1, keys=101)
    blocks = [(key[:, :, i : i + 13], value[:, :, i : i + 13]) for i in range(0, 101, 13)]
    close(attend_blocks(query, blocks, 16, SCALING), attend(query, key, value, SCALING), 5e-6)
    close(attend_blocks(query, [], 16, SCALING), empty_state(query, 16), 0)
