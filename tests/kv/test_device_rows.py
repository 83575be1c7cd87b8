"""Rows that are copied to a device, the cache that keeps them there, and where attention is computed."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError
from offload_decode.common.rows import encodings
from offload_decode.kv import device_cache
from offload_decode.kv.device_cache import DeviceRows, HotRows
from offload_decode.kv.host_cache import HostKV
from offload_decode.kv.placement import Placement, Request
from offload_decode.types import Selection, StepStats
from tests.kv.test_host import HKV, N, R, ids, made_store, queries

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]


def stored(form, heads=2, n=60, dim=6):
    rows = np.random.default_rng(0).standard_normal((heads, n, dim)).astype(np.float32)
    return [Rows(encodings.encode(own, form) if form.startswith("int") else own.astype(form)) for own in rows]


def fetched(rows, part, own, tokens, staged=False):
    """Rows of each head, float32."""
    flat = rows.fetch(part, own, tokens, StepStats(), staged).float()
    return flat.split_with_sizes([len(some) for some in tokens])


@settings(max_examples=80, deadline=None)
@given(
    places=st.integers(1, 12),
    calls=st.lists(st.sets(st.integers(0, 40), max_size=12).map(sorted), max_size=40),
)
def test_a_cache_gives_up_what_was_used_least_recently(places, calls):
    cache, model = HotRows(places), OrderedDict()
    held = {}  # what a place holds
    for call in calls:
        rows = [row * 1_000_003 for row in call[:places]]
        taken, new = cache.take(np.array(rows, np.int64))
        assert [not fresh for fresh in new] == [row in model for row in rows]
        assert len(set(taken.tolist())) == len(rows)
        assert all(
            held.get(place) == row for place, row, fresh in zip(taken, rows, new, strict=True) if not fresh
        )
        held.update(zip(taken.tolist(), rows, strict=True))
        for row in [row for row in rows if row in model]:
            model.move_to_end(row)
        for row in rows:
            if row not in model:
                model[row] = True
        while len(model) > places:
            model.popitem(last=False)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("form", ["float16", "float32", encodings.INT8, encodings.INT4])
@pytest.mark.parametrize("cache_rows", [0, 7, 100])
def test_what_arrives_is_what_is_stored(device, form, cache_rows):
    keys, values = stored(form), stored("float16")
    width = max(keys[0].row_bytes, values[0].row_bytes)
    rows, generator = DeviceRows(device, cache_rows * width, width, 2), np.random.default_rng(0)
    arrived = []
    for _ in range(8):
        for part, own in enumerate((keys, values)):
            tokens = [np.unique(generator.integers(0, 60, generator.integers(0, 9))) for _ in own]
            arrived += zip(fetched(rows, part, own, tokens), own, tokens, strict=True)
    for got, want, which in arrived:  # the last of them have not overwritten the first
        assert got.device.type == device.type
        assert torch.equal(got.cpu(), want.read(torch.from_numpy(which), CPU))


def test_rows_that_are_kept_do_not_move_again():
    rows, own = DeviceRows(CPU, 10 * 12, 12, 2), stored("float16")
    tokens = [np.array([3, 5]), np.array([3])]

    def fetch(tokens):
        stats = StepStats()
        rows.fetch(0, own, tokens, stats)
        return stats.cache_hits, stats.cache_misses, stats.bytes_moved

    assert fetch(tokens) == (0, 3, 36)
    assert fetch(tokens) == (3, 0, 0)
    assert fetch([np.array([5, 6]), np.array([4])]) == (1, 2, 24)
    assert fetch([np.arange(9), np.arange(9)]) == (0, 18, 18 * 12), "more than there is room for"
    assert fetch(tokens) == (3, 0, 0), "which leaves the others where they are"


def test_a_copy_that_failed_is_not_taken_for_one_that_came(monkeypatch):
    rows, own = DeviceRows(CPU, 10 * 12, 12, 2), stored("float16")
    tokens = [np.array([3, 5]), np.array([3])]

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(device_cache, "gather_rows", fail)
        with pytest.raises(KeyboardInterrupt):
            rows.fetch(0, own, tokens, StepStats())
    got = fetched(rows, 0, own, tokens)
    assert torch.equal(got[0], own[0].read(torch.tensor([3, 5]), CPU))


def test_pinned_rows_that_the_device_still_reads_are_not_overwritten(card):
    rows, own = DeviceRows(torch.device("cuda")), stored("float16")
    tokens = [np.array([3, 5]), np.array([3])]
    before = len(card.waits)
    for _ in range(2):
        assert rows.fetch(0, own, tokens, StepStats(), staged=True).is_pinned()
    torch.zeros(1, device="cuda").add_(1)  # stands for what reads them
    assert len(card.waits) == before
    rows.read()
    rows.fetch(0, own, tokens, StepStats(), staged=True)
    assert len(card.waits) == before + 1


def test_a_cache_that_holds_no_row_is_refused():
    with pytest.raises(ConfigError, match="holds no row"):
        DeviceRows(CPU, 23, 12, 2)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("scored", [False, True])
def test_a_cache_changes_no_bit(device, scored):
    store = made_store(np.float16)
    hosts = [HostKV(store, device, "device", size) for size in (0, 40 * 16, 10**6)]
    hits = 0
    for step in range(4):
        chosen, query = ids(7).roll(step, 1), queries().roll(step, 1).to(device)
        scores = torch.randn(HKV, R, 7, generator=torch.Generator().manual_seed(step)) if scored else None
        states = []
        for host in hosts:
            stats = StepStats()
            states.append(host.attend(0, Queries(query, 0.4), Selection(chosen, scores), stats))
            hits += stats.cache_hits
        for out, lse in states[1:]:
            assert torch.equal(out, states[0].out)
            assert torch.equal(lse, states[0].lse)
    assert hits > 0


def test_auto_keeps_the_faster_way_of_each_kind_of_request(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("offload_decode.kv.placement.time.perf_counter", lambda: clock[0])
    placement = Placement("auto", torch.device("meta"))  # a device that is not the host
    tried = []

    def attempt(host, device):
        def serve(place):
            tried.append(place)
            clock[0] += host if place == "host" else device

        return serve

    few, many = (Request.of(4, Selection(torch.zeros(1, 4, k))) for k in (60, 500))
    for request, seconds, best in ((few, (1, 2), "host"), (many, (3, 2), "device")):
        assert request not in placement.seconds
        placement.measure(request, ("host", "device"), attempt(*seconds))
        assert placement.best(request) == best
    assert tried.count("host") == tried.count("device")
    assert Request.of(4, Selection(torch.zeros(1, 4, 64))) in placement.seconds, "sizes are rounded up"
    assert placement.report()["measured"] == [
        {"kind": "tokens", "rows": 4, "chosen": 64, "scored": False, "host": 1, "device": 2},
        {"kind": "tokens", "rows": 4, "chosen": 512, "scored": False, "host": 3, "device": 2},
    ]


def test_measuring_leaves_the_cache_and_the_statistics_alone(monkeypatch):
    host = HostKV(made_store(), CPU, "device", 10**6)
    host.placement.attend = "auto"
    stats = StepStats()
    host.attend(0, Queries(queries(), 0.4), Selection(ids(7)), stats)
    (measured,) = host.placement.seconds.values()
    assert stats.attended == {min(measured, key=measured.get): 1}
    assert stats.cache_hits == 0


@pytest.mark.parametrize("attend", ["auto", "host"])
def test_a_device_that_is_the_host_leaves_nothing_to_choose(attend):
    assert Placement(attend, CPU).attend == "host"


def test_an_unknown_placement_is_refused():
    with pytest.raises(ConfigError, match="choose one of: auto, host, device, pinned"):
        Placement("gpu", CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_copies_in_flight_are_not_overwritten(cache_bytes):
    """Many steps without a wait between them: staging must not be filled anew while a copy still reads it."""
    own = stored("float16", heads=2, n=5000, dim=128)
    rows, generator = DeviceRows(torch.device("cuda"), cache_bytes, 256, 2), np.random.default_rng(0)
    wanted = [[np.sort(generator.permutation(5000)[:2000]) for _ in own] for _ in range(20)]
    arrived = [fetched(rows, 0, own, tokens) for tokens in wanted]
    for got, tokens in zip(arrived, wanted, strict=True):
        for head in range(2):
            assert torch.equal(got[head].cpu(), own[head].read(torch.from_numpy(tokens[head]), CPU))


@pytest.mark.gpu
def test_auto_measures_on_a_card_and_says_what_it_found():
    host = HostKV(made_store(), torch.device("cuda"), "auto", 1 << 16)
    stats = StepStats()
    host.attend(0, Queries(queries().cuda(), 0.4), Selection(ids(7)), stats)
    (measured,) = host.placement.report()["measured"]
    assert measured["host"] > 0
    assert measured["device"] > 0
    assert stats.attended == {
        min(("host", "device", "pinned"), key=lambda place: measured.get(place, 9.0)): 1
    }
    assert stats.bus_bytes > 0
    assert host.length == N
