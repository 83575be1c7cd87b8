"""What is proposed fits, and nothing that was asked for is changed without need."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_decode.common.errors import ConfigError
from offload_decode.indexes import registry
from offload_decode.kv import placement
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.planning.plan import Machine, Medium, card_room, chosen_chunk, plan
from offload_decode.planning.proposals import (
    changes,
    least_machine,
    most_tokens,
    nearest,
    nearest_prefill,
    prefill_chunk,
)
from offload_decode.planning.sizes import CARD_CHUNKS, CPU_CHUNK
from offload_decode.planning.workload import (
    KV,
    OWN,
    SELECTORS,
    WEIGHTS,
    Workload,
    weights_given,
)
from offload_decode.types import PAGE_METADATA, LayerKind, ModelShape
from tests.planning.estimates import llama_8b

GIB = 1 << 30

estimates = st.builds(
    lambda layers, sliding, kv_heads, group, half, dtype, linear, rest: SizeEstimate(
        model_id="random",
        shape=ModelShape.uniform(
            (LayerKind.FULL,) * layers + (LayerKind.SLIDING,) * sliding,
            kv_heads * group,
            kv_heads,
            2 * half,
            128 if sliding else None,
        ),
        dtype=dtype,
        parameters=linear + rest,
        linear=linear,
        linear_rows=linear // 1000,
        embeddings=rest // 2,
        experts=0,
        active=1.0,
        hidden=512,
        intermediate=2048,
        vocabulary=32000,
        layered=linear,
        layer=linear // layers,
        pinned=2 * linear,
    ),
    layers=st.integers(1, 6),
    sliding=st.integers(0, 3),
    kv_heads=st.sampled_from([1, 2, 8]),
    group=st.sampled_from([1, 4]),
    half=st.sampled_from([16, 64]),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    linear=st.integers(10**6, 10**10),
    rest=st.integers(10**5, 10**9),
)
requests = st.builds(
    Workload,
    tokens=st.integers(1, 20_000_000),
    kv=st.sampled_from(KV),
    weights=st.sampled_from(WEIGHTS),
    selector=st.sampled_from([one for one in SELECTORS if one != OWN]),  # which these models do not have
    budget=st.sampled_from(["64", "1024", "2%"]),
    tail=st.sampled_from(["auto", "off", "clusters", "sample", "sample:2"]),
    index=st.sampled_from(registry.BUILT_IN),
    clusters=st.booleans(),
    page_size=st.sampled_from([2, 16, 100]),
    metadata=st.sampled_from(PAGE_METADATA),
)
machines = st.builds(
    Machine,
    gpu=st.one_of(st.none(), st.integers(GIB, 100 * GIB)),
    ram=st.integers(GIB // 2, 200 * GIB),
    disk=st.integers(GIB // 10, 500 * GIB),
    held=st.just(300 << 20),
)


@settings(max_examples=60, deadline=None)
@given(estimates, requests, machines)
def test_a_proposal_is_a_plan_that_fits(estimate, request, machine):
    asked = plan(estimate, request, machine)
    proposed = nearest(asked)
    if asked.fits:
        assert proposed is not None
        assert not changes(asked.request, proposed.request)
    if proposed is not None:
        again = plan(estimate, proposed.request, machine)
        assert again.fits
        assert all(again.need(place) <= machine.size(place) for place in Medium)
        assert proposed.request.tokens == request.tokens
        assert proposed.request.budget == request.budget
        return
    most = most_tokens(asked)
    if most is not None:
        assert most.fits
        assert most.request.tokens < request.tokens
    least = least_machine(asked)
    enough = Machine(least.get(Medium.GPU), least[Medium.RAM], least[Medium.DISK], machine.held)
    assert nearest(plan(estimate, request, enough)) is not None


def test_a_proposal_of_other_weights_is_counted_in_its_own_dtype():
    shape = ModelShape.uniform((LayerKind.FULL,), 1, 1, 128)
    estimate = SizeEstimate(
        "float32", shape, "float32", 73_272_321, 1_000_000, 1000, 36_136_160, 0, 1.0, 512, 2048, 32000,
        1_000_000, 1_000_000, 1 << 20,
    )  # fmt: skip
    request = Workload(8192, weights="fp16", selector="quest", budget="64", page_size=2)
    machine = Machine(None, 512 << 20, 107_374_182, 300 << 20)
    proposed = nearest(plan(estimate, request, machine))
    assert proposed is None or plan(estimate, proposed.request, machine).fits


@settings(max_examples=40, deadline=None)
@given(estimates, requests, machines, st.data())
def test_fewer_bits_never_take_more(estimate, request, machine, data):
    name, ladder = data.draw(st.sampled_from([("weights", ["auto", "int8", "int4"]), ("kv", list(KV))]))
    request = replace(request, index="flat")
    wide, narrow = (
        plan(estimate, replace(request, **{name: rung}), machine) for rung in (ladder[0], ladder[-1])
    )
    assert all(narrow.need(place) <= wide.need(place) for place in Medium)


def test_an_8b_model_on_16_gib_is_asked_in_int8():
    request = Workload(1 << 20, index="flat")
    asked = plan(llama_8b(), request, Machine(16 * GIB, 64 * GIB, 200 * GIB, 300 << 20))
    assert asked.lacking().keys() == {Medium.GPU}
    proposed = nearest(asked)
    assert changes(asked.request, proposed.request) == {"weights": "int8"}
    # Its store of 137 GB does not stay in 64 GiB, and the plan says what would.
    assert proposed.from_disk > proposed.traffic.scanned
    held = nearest(proposed, in_memory=True)
    assert changes(proposed.request, held.request) == {"kv": "int4-values"}
    assert held.from_disk == 0


@pytest.mark.parametrize(("ram", "change"), [(64, {"streamed": True}), (14, {"weights": "int8"})])
def test_a_prefill_whose_weights_are_too_large_is_given_streamed_ones_or_fewer_bits(ram, change):
    """As memory has room for pinned ones, or not."""
    machine = Machine(14 * GIB, ram * GIB, 500 * GIB, 300 << 20)
    asked = plan(llama_8b(), Workload(1 << 17, chunk=256), machine)
    assert prefill_chunk(asked) is None
    fits = nearest_prefill(asked)
    assert fits.prefill_fits
    assert changes(asked.request, fits.request) == change


def test_weights_are_streamed_before_chunks_become_smaller_than_chosen_ones():
    machine = Machine(16 * GIB, 64 * GIB, 500 * GIB, 300 << 20)
    asked = plan(llama_8b(), Workload(1 << 20, chunk_chosen=True), machine)
    assert (asked.request.chunk, asked.prefill_fits) == (512, False)
    fits = nearest_prefill(asked)
    assert changes(asked.request, fits.request) == {"streamed": True}
    assert fits.request.chunk == chosen_chunk(llama_8b(), fits.request, machine) == 16384
    told = nearest_prefill(plan(llama_8b(), Workload(1 << 20, chunk=512), machine))
    assert changes(asked.request, told.request).keys() == {"chunk"}


def test_streamed_weights_are_two_layers_and_what_is_in_none():
    model, machine = llama_8b(), Machine(16 * GIB, 64 * GIB, 500 * GIB, 300 << 20)
    planned = plan(model, Workload(1 << 20, streamed=True, chunk=8192), machine)
    matrices = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    table, layer = 4096 * 128256, matrices + 2 * 4096
    there = {(part.name, part.place): part.bytes for part in planned.prefilling}
    assert there["weights (float16, streamed)", Medium.GPU] == 2 * (table + 4096 + 2 * layer)
    rounded = matrices + 3 * 4096 * (16384 - 14336) + 2 * 4096  # each weight's memory is a power of two
    assert there["weights (float16, pinned)", Medium.RAM] == 2 * (32 * rounded + table)
    whole = plan(model, Workload(1 << 20, chunk=8192), machine)
    assert planned.asking == whole.asking
    assert not whole.prefill_fits
    assert planned.prefill_fits
    difference = whole.need(Medium.GPU, whole.prefilling) - planned.need(Medium.GPU, planned.prefilling)
    assert difference == 2 * (30 * layer + table), "30 layers and the output layer"
    assert (
        card_room(model, planned.request, 16 * GIB) == card_room(model, whole.request, 16 * GIB) + difference
    )


@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_who_asks_in_fewer_bits_may_still_prefill_with_streamed_weights(weights):
    machine = Machine(16 * GIB, 64 * GIB, 500 * GIB, 300 << 20)
    asked = plan(llama_8b(), Workload(1 << 17, index="flat", streamed=True, weights=weights), machine)
    proposed = nearest(asked)
    assert (proposed.request.weights, proposed.request.streamed) == ("int8", True)
    assert proposed.prefilling == asked.prefilling
    assert nearest_prefill(proposed).request == proposed.request


def test_weights_are_streamed_to_gpus_alone_and_whole():
    roomy = Machine(None, 64 * GIB, 500 * GIB, 0)
    with pytest.raises(ConfigError, match="leave --weights out"):
        plan(llama_8b(), Workload(1, streamed=True), roomy)
    packed = replace(llama_8b(), format="fp8", packed=8 * GIB)
    with pytest.raises(ConfigError, match="in few bits already"):
        plan(packed, Workload(1, streamed=True), replace(roomy, gpu=16 * GIB))
    tight = plan(packed, Workload(1 << 17), replace(roomy, gpu=6 * GIB))
    assert nearest_prefill(tight) is None
    assert weights_given("streamed") == {"weights": "auto", "streamed": True}
    with pytest.raises(ConfigError, match="choose one of: auto, full, fp16, int8, int4, streamed"):
        weights_given("int3")


def test_a_store_that_is_there_is_not_asked_in_another_dtype():
    model = replace(llama_8b(), dtype="float32")
    asked = plan(model, Workload(1 << 17), Machine(20 * GIB, 64 * GIB, 500 * GIB, 300 << 20))
    anew, there = nearest(asked), nearest(asked, kinds=("auto",))
    assert (anew.request.weights, there.request.weights) == ("fp16", "int8")


def test_a_prefill_too_large_is_given_a_smaller_chunk():
    machine = Machine(16 * GIB, 64 * GIB, 200 * GIB, 300 << 20)
    asked = plan(llama_8b(), Workload(1 << 20), machine)
    assert not asked.prefill_fits
    chunk = prefill_chunk(asked)
    assert chunk < 512
    assert plan(llama_8b(), Workload(1 << 20, chunk=chunk), machine).prefill_fits
    assert not plan(llama_8b(), Workload(1 << 20, chunk=2 * chunk), machine).prefill_fits


def test_a_token_moves_the_bytes_of_every_layer_that_it_reads():
    machine = Machine(40 * GIB, 64 * GIB, 200 * GIB, 0)
    moved = plan(llama_8b(), Workload(100_000, index="flat"), machine).traffic
    assert moved.bus == moved.gathered == 32 * 8 * 4 * 1024 * 256
    assert moved.scanned == 32 * 8 * 100_000 * 256
    assert (moved.pages, moved.attended) == (0, 0)
    table = 4096 * 128256
    assert moved.weights == 2 * (llama_8b().parameters - table), "one row of the embeddings"
    quest = plan(llama_8b(), Workload(100_000, selector="quest"), machine).traffic
    assert quest.pages == 30 * 2 * 8 * (100_000 // 16) * 128 * 2
    assert quest.gathered == 30 * 8 * 1024 * 512
    assert quest.attended == 2 * 8 * 100_000 * 512, "two dense layers"
    assert quest.bus == quest.gathered + quest.attended
    dense = plan(llama_8b(), Workload(100_000, selector="dense"), replace(machine, gpu=None)).traffic
    assert dense.attended == 32 * 8 * 100_000 * 512
    assert (dense.scanned, dense.gathered, dense.bus) == (0, 0, 0)


@pytest.mark.parametrize("gpu", [12, 16, 24, 80, 139])
def test_the_chunk_that_is_chosen_fits_beside_the_weights(gpu):
    machine = Machine(gpu * GIB, 64 * GIB, 1 << 50, 0)
    planned = plan(llama_8b(), Workload(1 << 20, weights="int8", chunk_chosen=True), machine)
    assert planned.prefill_fits
    chunk = planned.request.chunk
    if gpu > 12:
        assert chunk >= 8192
    larger = plan(llama_8b(), Workload(1 << 20, weights="int8", chunk=2 * chunk), machine)
    room = machine.gpu - machine.gpu // placement.RESERVE
    assert chunk == CARD_CHUNKS[0] or larger.need(Medium.GPU, larger.prefilling) > room


def test_a_cpu_has_the_chunk_of_a_cpu():
    assert chosen_chunk(llama_8b(), Workload(1000), Machine(None, GIB, GIB, 0)) == CPU_CHUNK


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv": "int2"}, "kv 'int2'"),
        ({"weights": "nf4"}, "weights 'nf4'"),
        ({"selector": "h2o"}, "selector 'h2o'"),
        ({"index": "tree"}, "index 'tree'"),
        ({"tokens": 0}, "tokens must be"),
        ({"page_size": 0}, "page_size must be"),
    ],
)
def test_what_cannot_be_planned_is_named(wrong, says):
    with pytest.raises(ConfigError, match=says):
        Workload(**{"tokens": 10, **wrong})
