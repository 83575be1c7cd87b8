"""Passes that are captured between their attentions give what plain ones give, or are not captured."""

import copy
import threading
from itertools import chain

import pytest
import torch

from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.engine import Engine
from offload_decode.hf import cuda_graphs
from offload_decode.hf.compat import with_cache
from offload_decode.hf.cuda_graphs import GraphPass, report
from offload_decode.models.loading import wrap
from tests.tiny import random_ids, text_model, tiny_tokenizer, token_store

N = 40
SERVED = ["llama", "gemma2", "gemma3", "mistral", "olmo2", "qwen3"]
OPTIONS = {"budget": "20", "dense_layers": ""}


@pytest.fixture
def opened(card, tmp_path, monkeypatch):
    """An engine on the host, and one on the device that captures a shape that comes a second time."""
    monkeypatch.setattr(cuda_graphs, "WORTH", 2)

    def opened(family: str, change=lambda model: None, **changes) -> tuple[Engine, Engine]:
        engines = []
        for device in ("cpu", "cuda"):
            model = text_model(family=family, **changes)
            change(model)
            loaded = wrap(model.to(device), tiny_tokenizer())
            if device == "cpu":
                token_store(tmp_path / family, loaded, random_ids(N), chunk=16)
            engines.append(Engine.open(tmp_path / family, loaded, selector="topk", options=OPTIONS))
        engines[0].prefix.host.placement.attend = engines[1].prefix.host.placement.attend = "host"
        return engines[0], engines[1]

    return opened


@pytest.fixture
def written(opened):
    """An engine on the device that has captured a pass of one token."""
    _, engine = opened("llama")
    write(engine, 5, 9)
    return engine


def passes(engine: Engine) -> dict:
    return engine.loaded.model.base_model.forward.passes


def write(engine: Engine, first: int, end: int) -> None:
    """Run tokens one by one."""
    for token in range(first, end):
        engine.extend([token])


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    """But for rounding: a window's keys are masked there, and left out here."""
    torch.testing.assert_close(one, other.cpu(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", SERVED)
def test_tokens_of_an_answer_are_captured_and_give_the_hosts_logits(opened, family):
    on_host, on_device = opened(family)
    for tokens in ([5, 6, 7], [8], [9], [10], [11, 12], [13], [14]):
        assert_same(on_host.extend(tokens), on_device.extend(tokens))
    assert report(on_device.loaded.model.base_model) == {"passes": [[1, 1]], "refused": None}
    assert report(on_host.loaded.model.base_model) is None
    (held,) = passes(on_device).values()
    assert held.layers == list(range(on_host.loaded.model.config.num_hidden_layers))


def test_half_precision_is_captured(opened):
    _, engine = opened("llama", lambda model: model.bfloat16())
    plain = engine.fork()
    write(engine, 5, 9)
    with_graphs = engine.extend([9])
    engine.loaded.model.base_model.forward.refused = "compared"
    assert_same(plain.extend([5, 6, 7, 8, 9])[None].argmax(-1).cpu(), with_graphs[None].argmax(-1))
    engine.crop(engine.length - 1)
    torch.testing.assert_close(engine.extend([9]).cpu(), with_graphs.cpu(), rtol=2e-2, atol=2e-2)


def test_a_replayed_graph_runs_nothing_of_the_decoder(written, monkeypatch):
    monkeypatch.setattr(written.loaded.model.base_model.norm, "forward", None)
    written.extend([9])
    with pytest.raises(TypeError):
        written.extend([9, 10])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_packed_passes_are_captured_by_their_tokens(opened, family):
    runs = []
    for engine in opened(family):
        forks = [engine.fork() for _ in range(3)]
        rounds = [[[5, 6], [7], [8, 9, 10]], *([[n], [n + 1], [n + 2]] for n in range(11, 16))]
        passed = (run_turns([*map(Turn, forks, each)]) for each in rounds)
        runs.append([*chain.from_iterable(passed)])
    for one, other in zip(*runs, strict=True):
        assert_same(one, other)
    assert list(passes(engine)) == [(1, 3, 1)]


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("gemma2", {"sliding_window": 36})])
def test_beams_are_captured_and_padded_rows_run_as_before(opened, family, changes):
    on_host, on_device = opened(family, **changes)
    questions = ["Who?", "What is it?"]
    one, other = (engine.answer_many(questions, 5) for engine in (on_host, on_device))
    assert [own.tokens for own in one] == [own.tokens for own in other]
    beams = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    one, other = (e.loaded.model.generate(**e.inputs("Why"), **beams) for e in (on_host, on_device))
    assert one.tolist() == other.tolist()
    assert [2, 1] in report(on_device.loaded.model.base_model)["passes"]


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "dbrx", "bamba", "llama4", "gemma3n"])
def test_passes_without_a_graph_run_as_before(opened, family):
    """Latents that the model unfolds, experts that the host looks up, states, chunks, shared keys."""
    # transformers 5.5 looks every id up in Gemma 3n's table for each layer, which may be a shorter one.
    changes = {"vocab_size_per_layer_input": 259} if family == "gemma3n" else {}
    on_host, on_device = opened(family, **changes)
    for tokens in ([5, 6, 7], *([token] for token in range(8, 13))):
        assert_same(on_host.extend(tokens), on_device.extend(tokens))
    assert not passes(on_device)


def test_a_pass_that_depends_on_what_is_not_handed_over_is_refused(opened):
    """A number that the host counts is in the graph what it was when that was captured."""

    def counts(model):
        decoder, count, layer = model.base_model, [0], type(model.base_model.layers[0]).forward

        def forward(hidden_states, **given):
            count[0] += 1
            return layer(decoder.layers[0], hidden_states * (1 + count[0] % 7), **given)

        decoder.layers[0].forward = forward

    _, engine = opened("llama", counts)
    write(engine, 5, 10)
    assert not passes(engine)
    assert "apart from a plain one" in report(engine.loaded.model.base_model)["refused"]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_pass_that_forgets_its_places_is_refused(opened, monkeypatch, family):
    run = GraphPass.run
    monkeypatch.setattr(
        GraphPass, "run", lambda self, ids, _, attend: run(self, ids, self._positions, attend)
    )
    _, engine = opened(family)
    write(engine, 5, 10)
    assert "apart from a plain one" in report(engine.loaded.model.base_model)["refused"]


def hooked(decoder):
    decoder.layers[0].register_forward_hook(lambda module, args, out: out * 1.5)


def replaced(decoder):
    """As adapters do it."""
    other = copy.deepcopy(decoder.layers[0].mlp.down_proj)
    other.weight.data = other.weight.data * 2
    decoder.layers[0].mlp.down_proj = torch.nn.Sequential(other)


def moved(decoder):
    for weight in decoder.parameters():
        weight.data = weight.data.clone() * 0.9


@pytest.mark.parametrize("change", [hooked, replaced, moved])
def test_what_changes_in_a_model_is_not_served_from_graphs_of_before(opened, change):
    on_host, on_device = opened("llama")
    for token in range(5, 9):
        on_host.extend([token]), on_device.extend([token])
    assert passes(on_device)
    for engine in (on_host, on_device):
        change(engine.loaded.model.base_model)
    for token in range(9, 14):
        assert_same(on_host.extend([token]), on_device.extend([token]))
    assert passes(on_device), "captured anew"


@pytest.mark.parametrize("asked", [{"output_hidden_states": True}, {"return_dict": False}])
def test_what_is_asked_for_besides_is_given(written, asked):
    decoder, cache = written.loaded.model.base_model, written.new_cache()
    with torch.no_grad():
        given = decoder(torch.tensor([[7]]).to("cuda"), **with_cache(decoder, cache), use_cache=True, **asked)
    assert type(given) is tuple if "return_dict" in asked else len(given.hidden_states) > 1


def test_what_a_listener_keeps_of_a_token_stays(opened):
    heard = []
    _, engine = opened("llama")
    begin = engine.prefix.begin

    def listening(layer, query, *rest):
        heard.append((query, query.clone()))
        return begin(layer, query, *rest)

    engine.prefix.begin = listening
    write(engine, 5, 12)
    assert passes(engine)
    assert all(torch.equal(kept.cpu(), then.cpu()) for kept, then in heard)


def test_the_last_places_of_a_table_are_captured(opened):
    """Nothing of a check stands beyond what a model has positions for."""
    _, engine = opened("gpt2", n_positions=N + 6)
    write(engine, 5, 11)
    assert report(engine.loaded.model.base_model) == {"passes": [[1, 1]], "refused": None}


def test_what_a_pass_waits_for_is_as_before(card, opened):
    _, engine = opened("llama")
    waited = []
    for token in range(5, 12):
        before = len(card.waits)
        engine.extend([token])
        waited.append(len(card.waits) - before)
    assert passes(engine)
    assert waited[-1] == waited[0]


def test_a_copy_of_a_model_captures_its_own_weights(written):
    other = copy.deepcopy(written.loaded.model.base_model)
    assert other.forward.decoder is other
    assert other.forward.__wrapped__.__self__ is other
    assert not other.forward.passes


def test_a_second_thread_does_not_wait(opened):
    on_host, on_device = opened("llama")
    write(on_device, 5, 9)
    fork = on_device.fork()
    decoder = on_device.loaded.model.base_model
    with decoder.forward._busy:
        logits = []
        thread = threading.Thread(target=lambda: logits.append(fork.extend([9])))
        thread.start()
        thread.join(timeout=30)
    on_host.extend([5, 6, 7, 8])
    assert_same(on_host.extend([9]), logits[0])


@pytest.mark.gpu
@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_card(tmp_path, monkeypatch, family, dtype):
    """The same tokens with graphs and without."""
    model = text_model(family=family).to("cuda", getattr(torch, dtype))
    loaded = wrap(model, tiny_tokenizer())
    token_store(tmp_path / "s", loaded, random_ids(N), chunk=16)
    logits = []
    for worth in (10**9, 2):
        monkeypatch.setattr(cuda_graphs, "WORTH", worth)
        engine = Engine.open(tmp_path / "s", loaded, selector="topk", options=OPTIONS, attend="host")
        logits.append(torch.stack([engine.extend([token]) for token in range(5, 15)]))
    assert report(model.base_model) == {"passes": [[1, 1]], "refused": None}
    torch.testing.assert_close(*logits, rtol=2e-2, atol=2e-2 if dtype == "bfloat16" else 1e-4)
