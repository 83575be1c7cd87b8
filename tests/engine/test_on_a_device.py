"""The engine on a stand-in for a device gives the host's very results, and waits for the device no more than
a search must.
"""

from collections import Counter

import pytest
import torch

from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.conversation import Sampler
from offload_decode.engine.engine import Engine
from offload_decode.hf import attention, cuda_graphs
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.selectors import quest, registry
from offload_decode.types import Document
from tests.card import stand_in
from tests.tiny import random_ids, served_model

N, LAYERS = 60, 2
QUESTION = [5, 6, 7]
EVICTING = ("h2o", "tova")
QUESTIONS = ["Who?", "What is it, and how often?", "Why"]


FAMILIES = {"llama": {"num_hidden_layers": LAYERS}, "gemma2": {}}
ATTEND = ["host", "device", "pinned"]


@pytest.fixture(autouse=True)
def _plain_passes(monkeypatch):
    """Bit by bit as on the host: tests/hf/test_cuda_graphs.py has those that are captured, and
    tests/attention/test_host_dense.py the loops of hosts alone.
    """
    monkeypatch.setattr(cuda_graphs, "WORTH", 10**9)
    monkeypatch.setattr(attention, "attend_tensors", lambda *_: None)


@pytest.fixture(scope="module")
def hosts():
    return {family: served_model(family, **changes) for family, changes in FAMILIES.items()}


@pytest.fixture(scope="module")
def stores(hosts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    documents = [Document("first", 0, 25), Document("second", 25, N)]
    for family, loaded in hosts.items():
        prefill_tokens(loaded, random_ids(N), documents, folder / family, Settings(options={"chunk": 32}))
    return folder


@pytest.fixture(scope="module")
def devices():
    """The models on a device, which is there where a test has one."""
    with stand_in():
        return {family: served_model(family, "cuda", **changes) for family, changes in FAMILIES.items()}


@pytest.fixture
def opened(hosts, stores, devices):
    """An engine on the host and one on the device, which attend in the same place."""

    def opened(selector="topk", attend="host", family="llama", cache=0, **options) -> tuple[Engine, Engine]:
        options = {"budget": "20", "dense_layers": ""} | options
        on_host = Engine.open(stores / family, hosts[family], selector=selector, options=options)
        on_host.prefix.host.placement.attend = attend
        settings = {"attend": attend, "device_cache": cache, "options": options}
        return on_host, Engine.open(stores / family, devices[family], selector=selector, **settings)

    return opened


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert other.is_cuda
    assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("selector", sorted({*registry.names()} - {"own"}))
def test_every_selector_gives_the_hosts_logits_and_waits_once_a_layer(card, opened, selector, attend):
    on_host, on_device = opened(selector, attend)
    for tokens in (QUESTION, [8], [9]):
        before = len(card.waits)
        logits = on_device.extend(tokens)
        waited = card.waits[before:]
        assert_same(on_host.extend(tokens), logits)
    waits = Counter(wait.function for wait in waited)
    assert waits.pop("tolist") == 1, "of the ids of a pass, which are checked"
    searched = 2 if selector in EVICTING else 1
    assert sum(waits.values()) <= searched * LAYERS, waited


@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("topk", {"budget": "mass=0.9"}),
        ("oracle", {"budget": "mass=0.9"}),
        ("sparq", {"budget": "mass=0.9"}),
        ("quest", {"budget": "mass=0.9", "page_size": "4"}),
        ("topk", {"budget": "7/20"}),
        ("quest", {"budget": "7/20", "page_size": "4", "metadata": "int8"}),
        ("quest", {"page_size": "4", "per_head": "true"}),
        ("quest", {"page_size": "7", "budget": "100%"}),
        ("topk", {"budget": "0"}),
        ("topk", {"tail": "clusters"}),
        ("quest", {"page_size": "4", "tail": "sample:8"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("attend", ATTEND)
def test_options_of_selectors_give_the_hosts_logits(card, opened, selector, options, attend):
    on_host, on_device = opened(selector, attend, **options)
    for tokens in (QUESTION, [8]):
        assert_same(on_host.extend(tokens), on_device.extend(tokens))


def test_rows_that_the_device_keeps_change_no_bit_and_nobody_waits_for_them(card, opened):
    on_host, on_device = opened(attend="device", cache=1 << 16)
    for token in range(8, 14):
        before = len(card.waits)
        logits = on_device.extend([token])
        assert len(card.waits) - before == LAYERS + 1
        assert_same(on_host.extend([token]), logits)
    assert on_device.prefix.stats.cache_hits > 0


def test_auto_measures_both_places(card, opened):
    _, on_device = opened(attend="auto")
    on_device.extend(QUESTION)
    (measured,) = on_device.prefix.host.placement.report()["measured"]
    assert {"host", "device", "pinned"} <= set(measured)


@pytest.mark.parametrize("attend", ATTEND)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_answers_and_cites_as_on_the_host(card, opened, family, attend):
    on_host, on_device = opened(attend=attend, family=family)
    one, other = (engine.answer_many(QUESTIONS, 3, cites=True) for engine in (on_host, on_device))
    assert [own.tokens for own in one] == [own.tokens for own in other]
    assert [own.citations for own in one] == [own.citations for own in other]
    assert one[0].citations


@pytest.mark.parametrize("selector", ["topk", "quest", "dense"])
def test_an_answer_that_is_drawn_and_cited_is_the_hosts(card, opened, selector):
    one, other = (
        engine.answer(QUESTIONS[0], 4, Sampler(temperature=1.0, seed=3), cites=True)
        for engine in opened(selector, family="gemma2")
    )
    assert (one.tokens, one.citations) == (other.tokens, other.citations)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversations_in_one_pass_give_the_hosts_logits(card, opened, family):
    runs = []
    for engine in opened(family=family):
        asked = (QUESTION, [8, 9], [4])
        turns = [Turn(engine.fork(), tokens, every=len(tokens) == 2) for tokens in asked]
        runs.append(run_turns(turns) + run_turns([Turn(turn.conversation, [11]) for turn in turns]))
    for one, other in zip(*runs, strict=True):
        assert_same(one, other)


def test_pages_of_a_long_conversation_are_chosen_on_the_device(card, opened, monkeypatch):
    monkeypatch.setattr(quest, "WHOLE_GENERATED", 8)
    on_host, on_device = opened("quest", budget="8", page_size="4")
    for tokens in (list(range(3, 20)), [8], [9]):
        before = len(card.waits)
        logits = on_device.extend(tokens)
        waited = card.waits[before:]
        assert_same(on_host.extend(tokens), logits)
    # The ids, and whether a layer's new keys are finite and fit fp16.
    assert len(waited) == 1 + 3 * LAYERS, waited


def test_a_conversation_is_forked_cropped_and_gone_on_with(card, opened):
    runs = []
    for engine in opened(family="gemma2"):
        engine.extend(QUESTION)
        forked = engine.fork()
        logits = [engine.extend([8, 9])]
        engine.crop(N + 3)
        runs.append([*logits, engine.extend([8]), forked.extend([12])])
    for one, other in zip(*runs, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_of_transformers_answers_as_on_the_host(card, opened, beams):
    runs = []
    for engine in opened():
        inputs = engine.inputs(QUESTIONS[2])
        out = engine.loaded.model.generate(**inputs, max_new_tokens=4, do_sample=False, num_beams=beams)
        runs.append(out.tolist())
    assert runs[0] == runs[1]
