"""Fused attention equals the reference: what rows see behind causal masks, and every operator and product."""

import math

import pytest
import torch
from torch import Tensor

from offload_decode.attention import dense
from offload_decode.attention.dense import LEAST_ROWS, attend_bf16, attend_dense
from offload_decode.attention.queries import CausalMask, attend
from offload_decode.types import AttentionState

SCALING = 0.3
MASKS = [None, CausalMask(), CausalMask(1), CausalMask(6), CausalMask(1000)]


def qkv(tokens=5, keys=23, heads=(4, 2), dims=(24, 16), batch=1, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(tokens + keys)
    shapes = ((heads[0], tokens, dims[0]), (heads[1], keys, dims[0]), (heads[1], keys, dims[1]))
    return [torch.randn(batch, *shape, generator=generator).to(device, dtype) for shape in shapes]


def by_definition(causal, tokens, keys):
    """Entry by entry."""
    if causal is None:
        return None
    own = [keys - tokens + row for row in range(tokens)]
    window = math.inf if causal.window is None else causal.window
    return torch.tensor([[[[place - window < key <= place for key in range(keys)] for place in own]]])


def reference(tensors, causal, softcap=None):
    query, key, value = (part.float().cpu() for part in tensors)
    mask = by_definition(causal, query.shape[2], key.shape[2])
    return attend(query, key, value, SCALING, mask, softcap)


def close(first, second, tolerance=5e-6):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (9, 9), (5, 23), (30, 30)])
def test_rows_see_what_their_mask_says(causal, softcap, sizes, monkeypatch):
    monkeypatch.setattr(dense, "PLACED_ROWS", 7)
    tensors = qkv(*sizes, heads=(2, 1), dims=(8, 4))
    close(
        attend_dense(*tensors, SCALING, softcap=softcap, causal=causal), reference(tensors, causal, softcap)
    )


def test_on_a_cpu_there_is_no_operator_of_a_gpu():
    assert dense.attend_fused(*qkv(), SCALING) is None


def by_token(query, key, value, scaling, causal):
    """What the operators on `[B, T, H, D]` give, of as many KV heads as heads or fewer."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    mask = by_definition(causal, query.shape[2], key.shape[2])
    out, lse = attend(query, key, value, scaling, mask)
    return out.transpose(1, 2), lse


def flash(q, k, v, _q, _k, rows, keys, drop, causal, _m, *, scale, window_size_left, window_size_right):
    assert (rows, keys, drop) == (q.shape[1], k.shape[1], 0.0)
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], "it knows one width alone"
    assert (window_size_right == 0) == (window_size_left is not None)
    window = None if window_size_left is None else window_size_left + 1
    return *by_token(q, k, v, scale, CausalMask(window) if causal else None), "…"


def efficient(q, k, v, _b, _q, _k, _mq, _mk, drop, mask_type, with_lse, *, scale):
    assert q.shape[2] == k.shape[2] == v.shape[2], "it knows no groups"
    assert drop == 0.0
    assert with_lse
    out, lse = by_token(q, k, v, scale, {0: None, 2: CausalMask()}[mask_type])
    return out, torch.nn.functional.pad(lse, (0, -q.shape[1] % 32), value=torch.nan), "…"


def cudnn(q, k, v, _bias, with_lse, drop, causal, _m, *, scale):
    assert with_lse
    assert drop == 0.0
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if causal else None
    out, lse = attend(q, k, v, scale, mask)
    return out, lse[..., None], "…"


OPERATORS = {
    "_scaled_dot_product_cudnn_attention": (dense._cudnn, cudnn),
    "_flash_attention_forward": (dense._flash, flash),
    "_efficient_attention_forward": (dense._efficient, efficient),
}


@pytest.fixture
def served(monkeypatch):
    """Torch would take every operator, on the newest card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dense, "_allowed", lambda *_, **__: True)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("sizes", [(5, 23), (40, 40)])
def test_an_operator_is_given_what_it_takes_and_its_answer_is_read_as_it_is(
    name, causal, sizes, served, monkeypatch
):
    """With a stand-in that answers as torch's own operator does, in its layout."""
    run, stand_in = OPERATORS[name]
    tensors = qkv(*sizes, dims=(24, 16), batch=2)
    monkeypatch.setattr(dense, "_PLANNED_ROWS", 1)
    monkeypatch.setattr(torch.ops.aten, name, stand_in)
    found = run(*tensors, SCALING, causal)
    if found is None:
        assert causal is not None
    else:
        close(AttentionState(found[0][..., :16], found[1]), reference(tensors, causal))


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_has_the_operators_as_they_are_called(name, served, monkeypatch):
    """Checked on tensors without memory: names, order and kinds of the arguments, and shapes."""
    monkeypatch.setattr(dense, "_PLANNED_ROWS", 1)
    tensors = qkv(keys=5, dtype=torch.bfloat16, device="meta")
    for causal in (None, CausalMask()):
        out, lse = OPERATORS[name][0](*tensors, SCALING, causal)
        assert out[..., :16].shape == (1, 4, 5, 16)
        assert lse.shape == (1, 4, 5)
        assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_a_step_is_not_given_to_an_operator_that_plans_for_every_shape(served):
    for tokens, planned in ((1, False), (1023, False), (1024, True)):
        tensors = qkv(tokens, 1024, dims=(8, 8), device="meta")
        assert (dense._cudnn(*tensors, SCALING, None) is not None) == planned


def test_keys_are_not_repeated_for_the_heads_of_a_group():
    query, key, value = qkv(heads=(8, 2), batch=2)
    _, keys, values = dense._by_kv_head(query, key, value)
    for whole, seen in ((key, keys), (value, values)):
        assert seen.shape[:2] == (4, 4)
        assert seen.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("causal", MASKS)
@pytest.mark.parametrize("sizes", [(5, 23), (300, 300), (300, 1000)])
@pytest.mark.parametrize("dims", [(128, 128), (64, 64), (24, 20), (192, 128), (256, 256), (576, 576)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_operator_of_the_device_equals_the_reference(name, causal, sizes, dims, dtype, monkeypatch):
    monkeypatch.setattr(dense, "_PLANNED_ROWS", 1)
    tensors = qkv(*sizes, heads=(8, 2), dims=dims, dtype=dtype, device="cuda")
    tensors = [part * dims[0] ** -0.25 for part in tensors]
    padded = [dense.widened(part, -(-part.shape[-1] // 8) * 8) for part in tensors]
    if (found := OPERATORS[name][0](*padded, SCALING, causal)) is None:
        pytest.skip("not served here")
    out, lse = found
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    tolerance = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    close(AttentionState(out[..., : dims[1]], lse), reference(tensors, causal), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [None, CausalMask(), CausalMask(100)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (576, 576), (192, 128)])
def test_attention_on_the_device_equals_the_reference(causal, softcap, dims):
    tensors = qkv(300, 1000, heads=(8, 2), dims=dims, dtype=torch.bfloat16, device="cuda")
    tensors = [part * dims[0] ** -0.25 for part in tensors]
    close(
        attend_dense(*tensors, SCALING, softcap=softcap, causal=causal),
        reference(tensors, causal, softcap),
        1e-2,
    )


@pytest.mark.gpu
def test_a_usual_model_in_half_precision_is_served_by_an_operator():
    tensors = qkv(64, 64, heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, device="cuda")
    assert dense.attend_fused(*tensors, SCALING, CausalMask()) is not None
    assert dense.attend_fused(*tensors, SCALING) is not None


# Attention by products of bfloat16: equal to the reference of the same numbers within their rounding.

ROUNDING = 2**-8  # of a number in bfloat16
TOLERANCE = 4 * ROUNDING


def drawn(tokens: int, keys: int, sharp: float, dim: int = 64, value_dim: int = 64) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens + keys)
    query = sharp * torch.randn(2, 4, tokens, dim)
    key, value = torch.randn(2, 2, keys, dim), torch.randn(2, 2, keys, value_dim)
    return tuple(part.bfloat16() for part in (query, key, value))


def compare(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
    found = attend_bf16(query, key, value, scaling)
    wanted = attend(query.float(), key.float(), value.float(), scaling)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out, wanted.out, rtol=0, atol=TOLERANCE * float(value.abs().max()))
    torch.testing.assert_close(found.lse, wanted.lse, rtol=0, atol=TOLERANCE)


@pytest.fixture(params=[False, True], ids=["products", "fused kernel"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AMX, and with it."""
    monkeypatch.setattr(dense, "has_amx", lambda: request.param)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("keys", [1, 511, 512, 1300])
@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_it_is_attention(keys: int, sharp: float) -> None:
    compare(*drawn(70, keys, sharp), 0.125)


@pytest.mark.usefixtures("either")
def test_any_scale_and_widths() -> None:
    compare(*drawn(64, 700, 2.0, dim=80, value_dim=48), 80**-0.5)


@pytest.mark.usefixtures("either")
def test_scores_that_grow_from_block_to_block() -> None:
    query, key, value = drawn(64, 2048, 1.0)
    key = (key.float() + query[:, ::2, :1].float() * torch.linspace(0, 4, 2048)[:, None]).bfloat16()
    compare(query, key, value, 0.125)
    compare(query, key.flip(2), value.flip(2), 0.125)


@pytest.mark.usefixtures("either")
def test_what_all_keys_share_rounds_nothing_away() -> None:
    """Scores near 1,000 are four apart in bfloat16; what tells keys from each other is kept."""
    query, key, value = drawn(64, 600, 1.0)
    query[..., 0], key[..., 0] = 64, 128
    compare(query, key, value, 0.125)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("keys", [70, 90])
def test_a_text_that_sees_itself(keys: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "has_bf16_products", lambda: True)
    query, key, value = drawn(70, keys, 2.0, value_dim=48)
    found = attend_dense(query, key, value, 0.125, causal=CausalMask(window))
    mask = by_definition(CausalMask(window), 70, keys)
    wanted = attend(query.float(), key.float(), value.float(), 0.125, mask)
    assert found.out.dtype == found.lse.dtype == torch.float32
    torch.testing.assert_close(found.out, wanted.out, rtol=0, atol=TOLERANCE * float(value.abs().max()))
    torch.testing.assert_close(found.lse, wanted.lse, rtol=0, atol=TOLERANCE)


def test_dense_attention_takes_it_where_the_processor_has_such_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []

    def noted(*given: Tensor | float) -> object:
        taken.append(1)
        return attend_bf16(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(dense, "attend_bf16", noted)
    monkeypatch.setattr(dense, "has_bf16_products", lambda: True)
    many, few = drawn(LEAST_ROWS, 30, 1.0), drawn(LEAST_ROWS - 1, 30, 1.0)
    dense.attend_dense(*many, 0.125)
    assert taken == [1]
    dense.attend_dense(*few, 0.125)
    dense.attend_dense(*(part.float() for part in many), 0.125)
    dense.attend_dense(many[0], many[1], many[2].float(), 0.125)
    dense.attend_dense(*many, 0.125, mask=torch.ones(1, 1, LEAST_ROWS, 30, dtype=torch.bool))
    dense.attend_dense(*many, 0.125, softcap=20.0)
    dense.attend_dense(many[0], many[1][:, :, :0], many[2][:, :, :0], 0.125)
    assert taken == [1]
    monkeypatch.setattr(dense, "has_bf16_products", lambda: False)
    dense.attend_dense(*many, 0.125)
    assert taken == [1]
