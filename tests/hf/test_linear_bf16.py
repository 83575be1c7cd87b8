"""Products of one row of bfloat16 on a CPU: the same numbers, without oneDNN, and nothing else without it."""

from collections.abc import Callable
from threading import Barrier, Event, Thread

import pytest
import torch

from offload_decode.hf.hooks import activate
from offload_decode.hf.linear_bf16 import read_in_place
from tests.tiny import text_model

BRAIN = torch.bfloat16


def read_in_place_with(within: Callable[[torch.Tensor], None], dtype: torch.dtype = BRAIN) -> torch.nn.Linear:
    """A layer that is read in place, in each of whose products `within` runs."""
    layer = torch.nn.Linear(8, 8).to(dtype)
    plain = layer.forward

    def forward(states: torch.Tensor) -> torch.Tensor:
        within(states)
        return plain(states)

    layer.forward = forward  # type: ignore[method-assign]
    read_in_place(layer)
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_is_multiplied_as_before(bias: bool) -> None:
    layer = torch.nn.Linear(96, 40, bias=bias).to(BRAIN)
    row = torch.randn(1, 1, 96).to(BRAIN)
    exact = torch.nn.functional.linear(
        row.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    read_in_place(layer)
    assert layer(row).dtype is BRAIN
    assert layer(row).shape == (1, 1, 40)
    assert torch.equal(layer(input=row), layer(row))
    assert (layer(row) - exact).abs().max() <= 2**-7 * exact.abs().max()


def test_onednn_is_switched_off_for_one_row_of_bfloat16_alone() -> None:
    for dtype, rows, on in ((BRAIN, 1, False), (BRAIN, 2, True), (torch.float32, 1, True)):
        seen = list[bool]()
        layer = read_in_place_with(lambda _, seen=seen: seen.append(torch.backends.mkldnn.enabled), dtype)
        layer(torch.ones(1, rows, 8, dtype=dtype))
        assert seen == [on]
        assert torch.backends.mkldnn.enabled


def test_it_is_switched_on_again_when_a_product_fails_and_only_if_it_was_on() -> None:
    layer = read_in_place_with(lambda _: None)
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 7, dtype=BRAIN))
    assert torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        layer(torch.ones(1, 8, dtype=BRAIN))
        assert not torch.backends.mkldnn.enabled
    finally:
        torch.backends.mkldnn.enabled = True


def test_the_last_of_several_threads_switches_it_on() -> None:
    meet, on = Barrier(2), list[bool]()

    def together(_: torch.Tensor) -> None:
        meet.wait(10)  # both are within
        on.append(torch.backends.mkldnn.enabled)

    layer = read_in_place_with(together)
    threads = [Thread(target=layer, args=(torch.ones(1, 8, dtype=BRAIN),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert on == [False, False]
    assert torch.backends.mkldnn.enabled


def test_several_rows_wait_for_one_and_one_row_lets_several_have_onednn() -> None:
    """A product of several rows takes many times as long without oneDNN, whichever thread switched it off."""
    seen, within, leave = list[tuple[int, bool]](), Event(), Event()

    def held(states: torch.Tensor) -> None:
        within.set()
        assert leave.wait(10)
        seen.append((len(states), torch.backends.mkldnn.enabled))

    def begin(rows: int) -> Thread:
        thread = Thread(target=layer, args=(torch.ones(rows, 8, dtype=BRAIN),))
        thread.start()
        return thread

    layer = read_in_place_with(held)
    for first, then, expected in (
        (1, 2, [(1, False), (2, True)]),  # the second waits
        (2, 1, [(1, True), (2, True)]),  # the second goes on with oneDNN
    ):
        seen.clear()
        within.clear()
        leave.clear()
        one = begin(first)
        assert within.wait(10)
        within.clear()
        other = begin(then)
        assert within.wait(0.2) is (first == 2), "it has begun, or waits"
        leave.set()
        one.join()
        other.join()
        assert sorted(seen) == expected
        assert torch.backends.mkldnn.enabled


def test_a_model_that_is_served_reads_its_weights_so() -> None:
    for dtype, so in ((BRAIN, True), (torch.float32, False)):
        model = text_model().to(dtype)
        activate(model)
        linear = [part for part in model.modules() if type(part) is torch.nn.Linear]
        assert linear
        assert all(("forward" in part.__dict__) is so for part in linear)
