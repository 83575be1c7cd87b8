"""Ratios and scaled times."""

import time
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from benchmarks import layers, step
from benchmarks.layers import Fidelity, Truth
from benchmarks.machine import Machine, timed
from benchmarks.step import Row
from benchmarks.ways import BASELINE, OURS, Traffic, Way

MACHINE = Machine("a processor", 2, 1 << 30, 2e9, 2e8)
WHOLE = Fidelity(1, 0.1)
POOR = replace(WHOLE, ratio=0.9)


def row(way: str, side: str, seconds: float, fidelity: Fidelity = WHOLE, tokens: int = 1000) -> Row:
    return Row(tokens, 64, 1, way, side, 2, 2, seconds, "", fidelity, None)


def test_ratios_are_to_the_fastest_baseline_that_holds_enough() -> None:
    ours = row("clusters", OURS, 0.01)
    rows = [
        row("torch dense, fused, float32", BASELINE, 0.5),
        row("torch dense, matmul, float32", BASELINE, 0.2),
        row("faiss IVF per query head", BASELINE, 0.001, POOR),
        row("faiss IVF per query head", BASELINE, 0.04),
        row("faiss flat per query head", BASELINE, 9.0, tokens=2000),
        ours,
    ]
    assert step.against(rows, ours, "torch dense") == pytest.approx(20)
    assert step.against(rows, ours, step.REFERENCES["IVF"]) == pytest.approx(4)
    assert step.against(rows, ours, "faiss flat per query head") is None


def test_speed_without_fidelity_does_not_count() -> None:
    dense = row("torch dense, fused, float32", BASELINE, 0.5)
    good, poor = row("good", OURS, 0.01), row("poor", OURS, 0.01, POOR)
    table = step.show([dense, good, poor])
    assert "(50)" not in table.splitlines()[3]
    assert "(50)" in table.splitlines()[4]
    assert "0.9000 low" in table.splitlines()[4]


def test_what_was_measured_on_some_heads_is_scaled_to_all() -> None:
    layer = layers.MadeUp(200, heads=4, group=2, dim=16, steps=2).long_tailed()

    def sleeps(rows: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        time.sleep(0.01)
        return np.zeros_like(rows)

    def way(heads: int) -> Way:
        return Way("sleeps", OURS, heads, sleeps, traffic=lambda rows: Traffic(4_000, 400))

    one, four = (
        step.measured(way(heads), layer, Truth.of_steps(layer.heads(heads), [8]), 8, MACHINE, seconds=0.05)
        for heads in (1, 4)
    )
    assert 4 * 0.01 <= one.seconds < 4 * 0.02
    assert 0.01 <= four.seconds < 0.02
    # 4,000 bytes in order at 2 GB/s and 400 from random places at 0.2 GB/s are 4 microseconds.
    assert four.allowed == pytest.approx(4e-6 / four.seconds)
    assert one.allowed == pytest.approx(4 * 4e-6 / one.seconds)
    assert one.fidelity.error == pytest.approx(1)


def test_a_batch_keeps_groups_together() -> None:
    steps = np.arange(3 * 2 * 2 * 1, dtype=np.float32).reshape(3, 2, 2, 1)
    rows = step.batched(steps, 2, 2)
    assert rows.shape == (2, 4, 1)
    np.testing.assert_array_equal(rows[0, :, 0], [*steps[2, 0, :, 0], *steps[0, 0, :, 0]])


def test_every_turn_is_asked_for_in_order_and_the_median_counts() -> None:
    turns: list[int] = []

    def work(turn: int) -> None:
        turns.append(turn)
        time.sleep(0.03 if turn == 2 else 0.001)

    taken = timed(work, repetitions=5, seconds=1, warm_up=1, cold=False)
    assert turns == [0, 1, 2, 3, 4, 5]
    assert len(taken) == 5
    assert min(taken) <= median(taken) < 0.02 < max(taken)
