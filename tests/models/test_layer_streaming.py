"""Weights that come to a card layer by layer make the store that weights on the card make, and those of two
layers at most are ever there.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.config import EngineConfig
from offload_decode.engine.engine import Engine
from offload_decode.models.layer_streaming import _Layers, layers_of, stream
from offload_decode.models.loading import load, wrap
from offload_decode.models.quantization import check_weights_of
from offload_decode.models.size_estimate import estimate_of
from offload_decode.planning.sizes import prefill_bytes, streamed_bytes, waiting_bytes
from offload_decode.prefill_jobs.append import append
from offload_decode.prefill_jobs.job import Settings, chunk_for, prefill
from offload_decode.prefill_jobs.lm_eval.model import Settings as Asked
from offload_decode.store.reader import KVStore
from tests.card import references, stand_in
from tests.families import VOCAB
from tests.prefill_jobs.killing import tree
from tests.tiny import saved_model, tiny_model, token_store

N, CHUNK, LAYERS = 40, 16, 3
TOKENS = np.random.default_rng(2).integers(3, VOCAB, N)
CUDA = torch.device("cuda")


def on_card(family="llama", streamed=True, **changes):
    model = tiny_model(family, **changes)
    if not streamed:
        return wrap(model.to(CUDA))
    stream(model, CUDA)
    return replace(wrap(model), streamed=True)


def stored(loaded, path):
    return tree(token_store(path, loaded, TOKENS, CHUNK))


def on_host(loaded):
    """By layer, whether all of its weights lie in memory of the host."""
    return [not any(own.is_cuda for own in layer.parameters()) for layer in layers_of(loaded.model)]


# Dense; sinks and experts; shared keys and a table for every layer; latents; recurrent states.
@pytest.mark.parametrize("family", ["llama", "gpt-oss", "gemma3n", "deepseek_v3", "granitemoehybrid"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_store_has_the_bytes_of_one_made_with_weights_on_the_card(family, tied, tmp_path):
    for streamed in (False, True):
        with references(), stand_in() as card:
            loaded = on_card(family, streamed, tie_word_embeddings=tied)
            card.waits.clear()
            stored(loaded, tmp_path / str(streamed))
            assert loaded.device.type == "cuda"
            if streamed:
                assert all(on_host(loaded))
                assert not {wait.file for wait in card.waits if Path(wait.file).name == "layer_streaming.py"}
    assert tree(tmp_path / "True") == tree(tmp_path / "False")


def test_what_is_loaded_so_makes_and_grows_the_checkpoints_own_store(tmp_path):
    model, first, second = saved_model(tmp_path / "model"), tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("".join(f"Thing {n} has the colour {n * n}.\n" for n in range(9)))
    made = {"model": str(model), "settings": Settings(options={"chunk": 64}), "device": "cuda"}
    for weights in ("auto", "streamed"):
        with references(), stand_in():
            prefill(str(first), **made, out=tmp_path / weights, weights=weights)
    assert tree(tmp_path / "streamed") == tree(tmp_path / "auto")
    assert KVStore.open(tmp_path / "streamed").manifest.weights == "auto"
    assert Engine.open(tmp_path / "streamed", device="cpu").ask("Why?").isfinite().all()
    second.write_text("And that was all of it.")
    for weights in ("auto", "streamed"):
        with references(), stand_in():
            assert prefill(str(first), **made, out=tmp_path / weights, weights=weights).kept
            append(tmp_path / weights, str(second), device="cuda", weights=weights)
    assert tree(tmp_path / "streamed") == tree(tmp_path / "auto")


def test_a_layer_lies_on_the_card_while_it_runs_alone(card, tmp_path):
    loaded, there = on_card(), []
    for number, layer in enumerate(layers_of(loaded.model)):
        layer.self_attn.register_forward_pre_hook(
            lambda *_, number=number: there.append((number, [not own for own in on_host(loaded)]))
        )
    stored(loaded, tmp_path / "store")
    assert there == [(number, [own == number for own in range(LAYERS)]) for number in range(LAYERS)] * 3


def test_no_more_than_two_layers_take_memory_of_the_card(tmp_path):
    layers, peaks = 7, {}
    for streamed in (False, True):
        with references(), stand_in() as card:
            loaded = on_card(streamed=streamed, num_hidden_layers=layers)
            card.memory.forget_peak()
            stored(loaded, tmp_path / str(streamed))
            peaks[streamed] = card.memory.peak
    weights = [*layers_of(loaded.model)[0].parameters()]
    saved = (layers - 2) * sum(own.nbytes for own in weights) + loaded.model.lm_head.weight.nbytes
    assert peaks[False] - peaks[True] >= saved - 2 * 256 * len(weights), "but for where weights begin"


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("gpt-oss", False)])
def test_the_plan_counts_what_lies_on_the_card_and_what_is_pinned(card, family, tied):
    loaded = on_card(family, tie_word_embeddings=tied)
    about = estimate_of(loaded.model, "tiny", loaded.shape)
    layers, buffers = layers_of(loaded.model), list(loaded.model.buffers())
    weights = {weight for layer in layers for weight in layer.parameters()}
    largest = max(len([*layer.parameters()]) for layer in layers)
    counted, taken = streamed_bytes(about), card.memory.taken
    assert counted <= taken <= counted + 2 * 256 * largest + sum(one.nbytes for one in buffers)
    head = 0 if tied else loaded.model.lm_head.weight.nbytes
    assert not tied or loaded.model.lm_head.weight.is_cuda
    assert all(weight.is_pinned() for weight in weights)
    assert waiting_bytes(about) == head + sum(1 << (weight.nbytes - 1).bit_length() for weight in weights)


def test_a_chunk_is_chosen_for_what_the_rooms_leave(card):
    loaded = on_card()
    about = estimate_of(loaded.model, "tiny", loaded.shape)
    free = prefill_bytes(about, 8192, 1 << 20, True)
    card.memory.total = (card.memory.taken + free) * 16 // 15 + 16
    assert chunk_for(loaded, 1 << 20, "auto") == 8192
    card.memory.total -= 2 * about.layer * 4
    assert chunk_for(loaded, 1 << 20, "auto") == 4096


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_the_next_layer_is_sent_before_one_runs(layers, card, tmp_path, monkeypatch):
    loaded, events = on_card(num_hidden_layers=layers), []
    sent = _Layers._sent
    monkeypatch.setattr(_Layers, "_sent", lambda *given: (events.append(("sent", given[1])), sent(*given))[1])
    for number, layer in enumerate(layers_of(loaded.model)):
        layer.self_attn.register_forward_pre_hook(lambda *_, number=number: events.append(("runs", number)))
    stored(loaded, tmp_path / "store")
    expected = [("sent", 0)]
    for run in range(3 * layers):
        following = (run + 1) % layers
        if layers > 2 or run + 1 < layers:  # two layers stay in their rooms
            expected.append(("sent", following))
        expected.append(("runs", run % layers))
    assert events == expected


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_weights_are_back_on_the_host_when_a_pass_breaks_off(error, card, tmp_path, monkeypatch):
    loaded, broken = on_card(), []

    def breaks(*_):
        if not broken:
            broken.append(on_host(loaded))
            raise error("broken off")

    layers_of(loaded.model)[1].mlp.register_forward_pre_hook(breaks)
    with pytest.raises(error, match="broken off"):
        stored(loaded, tmp_path / "store")
    assert broken == [[True, False, True]]
    assert all(on_host(loaded))
    monkeypatch.undo()
    with references():
        expected = stored(wrap(tiny_model()), tmp_path / "host")
    assert stored(loaded, tmp_path / "store") == expected


class Shared(nn.Module):
    """A model whose two layers share a weight, and one of them a weight with the embeddings."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.output = nn.Embedding(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.layers[1].weight = self.layers[0].weight
        self.layers[1].bias = None
        self.inner = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
        self.layers[1].table = self.embeddings.weight
        self.register_buffer("nothing", None)
        self.config = SimpleNamespace(model_type="shared")

    base_model = property(lambda self: self)

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return self.output


def test_weights_that_layers_share_stay_shared(card):
    model = Shared()
    weight, table = model.layers[0].weight.detach().clone(), model.embeddings.weight.detach().clone()
    stream(model, CUDA)
    first, second = model.layers
    assert first.weight is second.weight
    assert first.weight.is_pinned()
    assert second.table is model.embeddings.weight
    assert torch.equal(second.table.cpu(), table)
    assert not model.output.weight.is_cuda
    assert model.inner[0][0].weight.is_cuda
    x = torch.ones(1, 4, device=CUDA)
    for _ in range(2):
        assert torch.equal(second(x).cpu(), torch.ones(1, 4) @ weight.T)


def test_a_model_without_a_list_of_layers_is_refused(card):
    model = Shared()
    del model.layers, model.inner
    with pytest.raises(UnsupportedModel, match="'shared' model has no list of layers"):
        stream(model, CUDA)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (lambda: load("demo", "cpu", weights="streamed"), "leave --weights out"),
        (lambda: stream(tiny_model(), torch.device("cpu")), "leave --weights out"),
        (
            lambda: check_weights_of("mxfp4", "streamed"),
            "weights streamed are for checkpoints of whole weights",
        ),
        (lambda: EngineConfig(weights="streamed"), "choose one of: auto, full, int8, int4"),
        (lambda: Asked.of("demo", {"weights": "streamed"}), "is for a prefill"),
    ],
)
def test_they_are_for_a_prefill_of_whole_weights_on_a_card(asked, says):
    with pytest.raises(ConfigError, match=says):
        asked()


def test_nothing_is_answered_with_them(card, tmp_path):
    loaded = on_card()
    engine = Engine.open(token_store(tmp_path / "store", loaded, TOKENS), loaded)
    with pytest.raises(ConfigError, match="load it with other weights to ask it"):
        engine.extend([5])


@pytest.mark.gpu
def test_a_card_makes_the_same_store_with_them(tmp_path):
    loaded = on_card(streamed=False, hidden_size=256, num_hidden_layers=6)
    expected = stored(loaded, tmp_path / "whole")
    for name in ("one", "another"):
        assert stored(on_card(hidden_size=256, num_hidden_layers=6), tmp_path / name) == expected
