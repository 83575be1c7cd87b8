"""How long a prefill takes is what its definition counts, chunk by chunk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_decode.attention import dense
from offload_decode.attention import dense as half_products
from offload_decode.attention.dense import attend_half
from offload_decode.kv.placement import BLOCK_TOKENS
from offload_decode.planning import sizes
from offload_decode.planning.plan import Machine, Medium, chosen_chunk, plan
from offload_decode.planning.prefill_speed import Rates, expected_prefill, measure_prefill, prefill_time
from offload_decode.planning.sizes import Workload
from offload_decode.types import AttentionState, LayerKind, LayerShape, ModelShape
from tests.planning.outlines import llama_8b

GIB = 1 << 30
FAST = 1e30
KINDS = (
    LayerShape(LayerKind.FULL, 2, 8, 4),
    LayerShape(LayerKind.SLIDING, 2, 8, 8, 5),
    LayerShape(LayerKind.NONE),
)


def small():
    return replace(llama_8b(), shape=ModelShape(KINDS, 4))


def test_the_operations_are_those_of_every_token_and_every_key_that_it_sees():
    outline = small()
    linear = outline.parameters - 2 * outline.vocabulary * outline.hidden
    seen = sum(2 * 4 * (place * (8 + 4) + min(place, 5) * (8 + 8)) for place in range(1, 30))
    for chunk in (1, 4, 29):
        took = prefill_time(outline, Workload(29, chunk=chunk), Rates(1.0, 1.0, FAST), 0, on_card=False)
        assert took.parts["attention"] == seen
        assert took.parts["matrix products"] == 29 * 2 * linear
        assert took.operations == took.seconds == seen + 29 * 2 * linear


def test_tied_tables_are_one_and_idle_experts_are_not_read():
    outline = llama_8b()
    tables = outline.vocabulary * outline.hidden
    tied = replace(outline, embeddings=0, parameters=outline.parameters - tables)
    request, rates = Workload(8, chunk=8), Rates(1.0, FAST, FAST)
    plain, same = (prefill_time(one, request, rates, 0, on_card=False) for one in (outline, tied))
    assert same.seconds == pytest.approx(plain.seconds)
    idle = prefill_time(replace(outline, experts=10**9, active=0.25), request, rates, 0, on_card=False)
    assert plain.seconds - idle.seconds == pytest.approx(2 * 8 * 0.75e9)


def test_a_cpu_does_one_thing_after_another_and_a_card_all_beside_each_other():
    outline, request = small(), Workload(100, chunk=10)
    rates = Rates(3e12, 1e3, 50.0, fill=40.0, bus=60.0)
    cpu = prefill_time(outline, request, replace(rates, fill=None, bus=None), 0, on_card=False)
    assert cpu.seconds == pytest.approx(sum(cpu.parts.values()))
    assert cpu.bus == 0
    card = prefill_time(outline, request, rates, 30, on_card=True)
    token = sizes.kv_token_bytes(outline.shape, "auto", outline.dtype)
    assert card.bus == token * sum(max(0, start - 30) for start in range(0, 100, 10))
    assert card.parts["bus"] == pytest.approx(card.bus / 40)
    computed = card.parts["matrix products"] + card.parts["attention"]
    longest = max(computed, card.parts["writing"], card.parts["bus"])
    assert longest * (1 - 1e-9) <= card.seconds <= computed + card.parts["writing"] + card.parts["bus"]
    assert card.limit in card.parts
    stays = prefill_time(outline, request, rates, 100, on_card=True)
    assert stays.bus == 0


def test_streamed_weights_cross_the_bus_for_every_chunk_from_memory_that_is_pinned_already():
    outline, request = small(), Workload(100, chunk=10, streamed=True)
    rates = Rates(FAST, FAST, FAST, fill=40.0, bus=60.0)
    took = prefill_time(outline, request, rates, 30, on_card=True)
    weights = 10 * 2 * outline.layered
    blocks = prefill_time(outline, replace(request, streamed=False), rates, 30, on_card=True).bus
    assert took.bus == weights + blocks
    assert took.parts["bus"] == pytest.approx(weights / 60 + blocks / 40) == took.seconds


def test_an_8b_model_is_expected_on_a_16_gib_card():
    outline, machine = llama_8b(), Machine(16 * GIB, 64 * GIB, 1 << 50, 0)
    planned = plan(outline, Workload(1 << 20, streamed=True, chunk_chosen=True), machine)
    assert planned.prefill_fits
    took = expected_prefill(planned, Rates(FAST, FAST, FAST, FAST, 1.0))
    assert took.kept == BLOCK_TOKENS
    taken = planned.need(Medium.GPU, planned.prefilling) + took.kept * planned.kv_bytes // (1 << 20)
    assert taken <= machine.gpu - machine.gpu // 16
    assert took.parts["bus"] >= 64 * 2 * outline.layered


@pytest.mark.parametrize("gpu", [12, 16, 24, 80, 139])
def test_what_is_chosen_and_kept_fits_beside_the_weights(gpu):
    outline, machine = llama_8b(), Machine(gpu * GIB, 64 * GIB, 1 << 50, 0)
    request = Workload(1 << 20, weights="int8")
    request = replace(request, chunk=chosen_chunk(outline, request, machine))
    planned = plan(outline, request, machine)
    assert planned.prefill_fits
    took = expected_prefill(planned, Rates(FAST, FAST, FAST, FAST, FAST))
    taken = planned.need(Medium.GPU, planned.prefilling) + took.kept * planned.kv_bytes // request.tokens
    assert taken <= machine.gpu
    assert took.kept % BLOCK_TOKENS == 0
    if gpu > 12:
        assert request.chunk >= 8192
        assert taken + BLOCK_TOKENS * planned.kv_bytes // request.tokens > 15 / 16 * machine.gpu - GIB


def test_a_cpu_has_the_chunk_of_a_cpu():
    assert chosen_chunk(llama_8b(), Workload(1000), Machine(None, GIB, GIB, 0)) == sizes.CPU_CHUNK


def test_the_functions_that_run_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Products of bfloat16 for what is stored in it alone, as in `offload_decode.prefill_jobs.attention`."""
    halves: list[torch.dtype] = []

    def noted(query: torch.Tensor, *given: Any) -> AttentionState:
        halves.append(query.dtype)
        return attend_half(query, *given)

    monkeypatch.setattr(half_products, "has_half_products", lambda: True)
    monkeypatch.setattr(dense, "attend_half", noted)
    outline = replace(llama_8b(), hidden=64, intermediate=128, dtype="bfloat16", shape=ModelShape(KINDS, 4))
    for kv in ("auto", "int8"):
        halves.clear()
        rates = measure_prefill(outline, Workload(64, chunk=16, kv=kv), "cpu", tmp_path)
        assert min(rates.matmul, rates.attention, rates.write) > 0
        assert rates.bus is None
        assert bool(halves) is (kv == "auto")
    assert not [*tmp_path.iterdir()]
