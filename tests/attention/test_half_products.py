"""Attention by products of bfloat16: equal to the reference of the same numbers within their rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload_decode.attention import dense
from offload_decode.attention.dense import LEAST_ROWS, attend_bf16
from offload_decode.attention.state import attend

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


@pytest.mark.parametrize("keys", [1, 511, 512, 1300])
@pytest.mark.parametrize("sharp", [1.0, 8.0])
def test_it_is_attention(keys: int, sharp: float) -> None:
    compare(*drawn(70, keys, sharp), 0.125)


def test_any_scale_and_widths() -> None:
    compare(*drawn(64, 700, 2.0, dim=80, value_dim=48), 80**-0.5)


def test_scores_that_grow_from_block_to_block() -> None:
    query, key, value = drawn(64, 2048, 1.0)
    key = (key.float() + query[:, ::2, :1].float() * torch.linspace(0, 4, 2048)[:, None]).bfloat16()
    compare(query, key, value, 0.125)
    compare(query, key.flip(2), value.flip(2), 0.125)


def test_what_all_keys_share_rounds_nothing_away() -> None:
    """Scores near 1,000 are four apart in bfloat16; what tells keys from each other is kept."""
    query, key, value = drawn(64, 600, 1.0)
    query[..., 0], key[..., 0] = 64, 128
    compare(query, key, value, 0.125)


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
