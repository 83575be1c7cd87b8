"""The Triton kernel that attends to chosen rows equals the reference: under Triton's interpreter where there
is no CUDA device, and on the card where there is one.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

from offload_decode.attention import device_tokens
from offload_decode.common.errors import ConfigError
from tests.card import stand_in

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# (KV heads, rows, k, channels of keys and of values, rows there are)
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 3, 17, 5, 9, 40), (3, 2, 700, 64, 64, 900), (1, 4, 130, 300, 128, 200)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or TRITON_INTERPRET is set")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("Triton compiles for the card here; TRITON_INTERPRET=1 interprets")
    return torch.device(request.param)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def asked(heads, rows, k, dim, value_dim, there, dtype=torch.float16):
    """Queries, keys, values, and places of which some are -1: for one row all of them."""
    keys, values = random(there, dim, seed=1).to(dtype), random(there, value_dim, seed=2).to(dtype)
    generator = torch.Generator().manual_seed(3)
    places = torch.stack(
        [torch.randperm(max(there, k), generator=generator)[:k] for _ in range(heads * rows)]
    ).view(heads, rows, k)
    places = places.masked_fill(random(heads, rows, k, seed=4) > 1, -1).masked_fill(places >= there, -1)
    if rows > 1:
        places[0, 1] = -1
    return random(heads, rows, dim), keys, values, places


def same(state, expected):
    for one, other in zip(state, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, atol=3e-6, rtol=2e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scored", [False, True])
def test_attention_equals_the_reference(device, shape, softcap, scored):
    query, keys, values, places = asked(*shape)
    scores = random(*places.shape, seed=5).masked_fill(random(*places.shape, seed=6) > 1.5, -torch.inf)
    own = query, None if scored else keys, values, places, scores if scored else None
    on_device = (None if part is None else part.to(device) for part in own)
    same(device_tokens._by_program(*on_device, 0.3, softcap), device_tokens.reference(*own, 0.3, softcap))


@pytest.mark.parametrize("programs", [1, 10_000])
def test_an_attention_in_one_piece_equals_the_merged_one(device, monkeypatch, programs):
    monkeypatch.setattr(device_tokens, "PROGRAMS", programs)
    own = *asked(2, 3, 700, 64, 32, 900, torch.bfloat16), None
    on_device = (None if part is None else part.to(device) for part in own)
    same(device_tokens._by_program(*on_device, 0.3), device_tokens.reference(*own, 0.3, None))


def test_rows_in_pinned_memory_are_read_where_they_lie_in_two_launches(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    if not INTERPRETED:
        pytest.skip("Triton compiles for the card here; TRITON_INTERPRET=1 interprets")
    query, keys, values, places = asked(2, 3, 700, 64, 32, 900)
    expected = device_tokens.reference(query, keys, values, places, None, 0.3, None)
    with stand_in() as card:
        sent = query.cuda(), places.cuda()
        launches, waits = [], len(card.waits)
        launch = card.launch
        monkeypatch.setattr(card, "launch", lambda args: launches.append(len(args)) or launch(args))
        rows = [part.pin_memory() for part in (keys, values)]
        state = device_tokens.attend_rows(sent[0], *rows, sent[1], None, 0.3)
        assert len(launches) == 2
        assert len(card.waits) == waits, "nobody waits for it"
        state = [part.cpu() for part in state]
        with pytest.raises(RuntimeError, match="neither on the device nor pinned"):
            device_tokens.attend_rows(sent[0], keys, values, sent[1], None, 0.3)
    same(state, expected)


def test_nothing_to_attend_to_is_the_empty_state(device):
    query, keys, values, places = (part.to(device) for part in asked(2, 3, 4, 8, 5, 9))
    for none in (places[..., :0], torch.full_like(places, -1)):
        out, lse = device_tokens.attend_rows(query, keys, values, none, None, 1.0)
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def test_a_missing_triton_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="attend=host"):
        device_tokens._by_program(*asked(1, 1, 1, 1, 1, 1), None, 1.0)
