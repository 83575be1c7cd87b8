"""The stand-in for a device keeps the rules of one."""

import copy
import threading

import numpy as np
import pytest
import torch
from numba import njit

from tests.card import stand_in


def on_device(*shape):
    return torch.arange(float(np.prod(shape))).reshape(shape).to("cuda")


def waited(card, act):
    before = len(card.waits)
    act()
    return [wait.kind for wait in card.waits[before:]]


def test_torch_has_a_device_and_what_is_made_there_stays_there(card):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    x = torch.empty(2, 3, device="cuda").fill_(2.0)
    made = [
        x,
        x + 1,
        x.topk(2).values,
        x.T,
        x[0],
        torch.zeros_like(x),
        torch.cat([x, x]),
        x.new_full((2,), 1),
    ]
    made += [x.cpu().cuda(), torch.arange(3).to(x), *x.split(1), x.float(), copy.deepcopy(x)]
    for one in made:
        assert one.is_cuda
        assert one.device == torch.device("cuda", 0)
        assert one.get_device() == 0
    for one in (x.cpu(), x.to("cpu"), torch.zeros_like(x, device="cpu"), torch.ones(2)):
        assert not one.is_cuda
        assert one.device == torch.device("cpu")
    assert torch.equal((x + 1).cpu(), torch.full((2, 3), 3.0))


def test_a_module_and_its_copy_move(card):
    module = torch.nn.Linear(3, 2)
    expected = module(torch.arange(6.0).reshape(2, 3))
    moved = module.to("cuda")
    assert {one.device.type for one in moved.parameters()} == {"cuda"}
    assert all(isinstance(one, torch.nn.Parameter) for one in copy.deepcopy(moved).parameters())
    assert torch.equal(moved(on_device(2, 3)).cpu(), expected)


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(2, 3) @ x.T,
        lambda x: torch.cat([x, torch.ones(2, 3)]),
        lambda x: torch.stack([x[0, 0], torch.tensor(1.0)]),
        lambda x: x.scatter_(1, torch.zeros(2, 1, dtype=torch.long), 1.0),
        lambda x: torch.ones(2, 3)[x.long()],
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: x.add_(torch.ones(2, 3)),
        lambda x: x.__setitem__(x > 1, torch.ones(4)),
    ],
)
def test_tensors_of_both_sides_do_not_mix(card, act):
    with pytest.raises(RuntimeError, match="on the same device"):
        act(on_device(2, 3))


def test_numpy_and_compiled_code_do_not_read_it(card):
    x = on_device(2, 3)
    for read in (x.numpy, lambda: np.asarray(x), lambda: np.add(x, 1)):
        with pytest.raises(TypeError, match="numpy cannot read"):
            read()
    with pytest.raises(TypeError, match="compiled code of the host cannot read"):
        njit(lambda address: address)(x.data_ptr())


def test_numbers_of_the_host_meet_it(card):
    x, one = on_device(2, 3), torch.tensor(1.0)
    x[0] = one
    assert torch.equal((x * one + 1).cpu(), torch.tensor([[2.0, 2, 2], [4, 5, 6]]))


@pytest.mark.parametrize(
    ("act", "kinds"),
    [
        (lambda x: x.sum().item(), ["read"]),
        (lambda x: x.tolist(), ["read"]),
        (lambda x: bool((x > 1).any()), ["read"]),
        (lambda x: int(x[0, 0]), ["read"]),
        (lambda x: x.cpu(), ["read"]),
        (lambda x: x[x > 1], ["read"]),
        (lambda x: x.nonzero(), ["read"]),
        (lambda x: torch.ones(2, 3).copy_(x), ["read"]),
        (lambda x: torch.ones(2, 3).to("cuda", non_blocking=True), ["sent"]),  # it is not pinned
        (lambda x: torch.ones(2, 3).pin_memory().to("cuda"), ["sent"]),
        (lambda x: torch.tensor([1, 2], device="cuda"), ["sent"]),
        (lambda x: x[:, torch.tensor([0, 1])], ["sent"]),
        (lambda x: x.__setitem__(0, torch.ones(3)), ["sent"]),
        (lambda x: (x + 1, torch.cuda.current_stream().synchronize()), ["joined"]),
        (lambda x: torch.cuda.current_stream().synchronize(), []),  # nothing is under way
        (lambda x: torch.ones(2, 3).pin_memory().to("cuda", non_blocking=True), []),
        (lambda x: x.to("cpu", non_blocking=True), []),
        (lambda x: x.__setitem__(x > 1, 0.0), []),
        (lambda x: torch.full((2,), 3, device="cuda"), []),
        (lambda x: (x @ x.T).softmax(-1).topk(1), []),
    ],
)
def test_what_makes_the_host_wait_is_noted(card, act, kinds):
    x = on_device(2, 3)
    assert waited(card, lambda: act(x)) == kinds


def test_a_wait_tells_the_line_that_asked_for_it(card):
    on_device(3).tolist()
    assert card.waits[-1].function == "tolist"
    assert card.waits[-1].file == __file__


def test_a_copy_to_the_host_is_read_when_it_was_waited_for(card):
    pinned = torch.empty(3, pin_memory=True).copy_(on_device(3), non_blocking=True)
    there = torch.cuda.current_stream().record_event()
    part = pinned[1:]
    for read in (pinned.numpy, pinned.sum, part.tolist, lambda: pinned.fill_(1)):
        with pytest.raises(RuntimeError, match="still writes"):
            read()
    assert not there.query()
    there.synchronize()
    assert there.query()
    assert part.tolist() == [1.0, 2.0]


def test_what_a_copy_to_the_device_reads_is_not_written_before_it_is_done(card):
    pinned = torch.zeros(3).pin_memory()
    pinned.to("cuda", non_blocking=True)
    sent = torch.cuda.current_stream().record_event()
    pinned.numpy()[:] = 1
    with pytest.raises(RuntimeError, match="was written while a copy"):
        sent.synchronize()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.numpy()[:] = 2


def test_the_end_of_the_stand_in_tells_of_such_a_write_too():
    with pytest.raises(RuntimeError, match="was written while a copy"), stand_in():  # noqa: PT012
        pinned = torch.zeros(3).pin_memory()
        pinned.to("cuda", non_blocking=True)
        pinned.numpy()[:] = 1


def test_what_another_stream_makes_is_read_when_it_was_waited_for(card):
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        x = torch.zeros(3).pin_memory().to("cuda", non_blocking=True)
        made = aside.record_event()
    with pytest.raises(RuntimeError, match="another stream writes"):
        x + 1
    torch.cuda.current_stream().wait_event(made)
    assert (x + 1).is_cuda


def test_a_kernel_is_not_given_memory_of_the_host(card):
    pytest.importorskip("triton", reason="triton is not installed")
    pinned, plain = torch.zeros(3).pin_memory(), torch.zeros(3)
    assert card.launch([on_device(3), pinned, 7])[2] == 7
    with pytest.raises(RuntimeError, match="neither on the device nor pinned"):
        card.launch([on_device(3), plain])


def test_nothing_is_left_behind():
    was = torch.cuda.is_available(), torch.Generator, torch.cuda.Stream
    with stand_in():
        x = on_device(3)
    assert (torch.cuda.is_available(), torch.Generator, torch.cuda.Stream) == was
    with pytest.raises(RuntimeError, match="has outlived it"):
        x + 1


def test_what_another_stream_reads_is_not_written_before_it_is_done(card):
    aside, x = torch.cuda.Stream(), on_device(3)
    with torch.cuda.stream(aside):
        aside.wait_stream(torch.cuda.default_stream())
        torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
    for write in (lambda: x.fill_(1), lambda: x.copy_(torch.ones(3)), lambda: x.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="another stream still reads"):
            write()
    torch.cuda.current_stream().wait_stream(aside)
    x.fill_(1)


def test_it_has_so_much_memory():
    with stand_in(1000):
        x = torch.zeros(100, device="cuda")
        part = x[:10]
        assert torch.cuda.mem_get_info() == (600, 1000)
        with pytest.raises(torch.OutOfMemoryError):
            x.repeat(2)
        assert torch.cuda.memory_allocated() == 400
        del x
        assert torch.cuda.mem_get_info() == (600, 1000), "a part of it is still held"
        del part
        assert torch.cuda.mem_get_info() == (1000, 1000)
        assert torch.cuda.max_memory_allocated() >= 400
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0


def test_a_thread_that_is_begun_there_has_the_device_too(card):
    aside, seen = torch.cuda.Stream(), []

    def act():
        seen.append(torch.zeros(2, device="cuda").is_cuda)
        seen.append(torch.cuda.current_stream() is torch.cuda.default_stream())
        try:
            np.asarray(pinned)
        except RuntimeError as error:
            seen.append("still writes" in str(error))

    with torch.cuda.stream(aside):
        aside.wait_stream(torch.cuda.default_stream())
        pinned = torch.empty(3, pin_memory=True).copy_(torch.ones(3, device="cuda"), non_blocking=True)
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
    assert seen == [True, True, True]


def captured(act):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            return graph, act()
        finally:
            graph.capture_end()


def test_what_a_graph_captures_is_done_when_it_is_replayed_and_not_before(card):
    x, count = on_device(4), torch.zeros(4, device="cuda")

    def act():
        count.add_(x)
        count[0] = 7.0
        twice = (x * 2).view(2, 2)
        return twice, (twice[1].to(torch.float16) + torch.ones(2, device="cuda")).to(torch.float64)

    graph, (twice, more) = captured(act)
    torch.cuda.synchronize()
    assert count.tolist() == [0, 0, 0, 0]
    assert bool(more.isnan().all())
    for value in (1.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert twice.tolist() == [[2 * value] * 2] * 2
        assert more.tolist() == [2 * value + 1] * 2
    assert count.tolist() == [7, 4, 4, 4]


@pytest.mark.parametrize(
    "act",
    [
        lambda: on_device(3).sum().item(),
        lambda: torch.ones(2, device="cuda").cpu(),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2, device="cuda").nonzero(),
    ],
)
def test_nothing_is_waited_for_while_a_graph_is_captured(card, act):
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        captured(act)


def test_a_graph_is_not_captured_on_the_default_stream_or_replayed_before(card):
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError):
        graph.capture_begin()
    with pytest.raises(RuntimeError):
        graph.replay()
