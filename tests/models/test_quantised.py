"""Weights in few bits answer from a store that the whole weights made, and say whose they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_decode.engine.engine import Engine
from offload_decode.errors import ConfigError
from offload_decode.models.loading import load
from tests.tiny import text_model, tiny_tokenizer

QUESTION = "What is the colour of thing 7?"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose rows hold whole blocks of 64 weights, and a store of it."""
    from prefill_jobs.job import prefill

    folder = tmp_path_factory.mktemp("quantised")
    # Weights as a trained model has them: with tests' usual ones, 4 bits would change everything.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    text_model(**sizes).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "corpus.txt").write_text("".join(f"Thing {n} has the colour {n * n}.\n" for n in range(20)))
    prefill(str(folder / "corpus.txt"), model=str(folder / "model"), out=folder / "s.kv", device="cpu")
    return folder


@pytest.mark.parametrize(("weights", "off"), [("int8", 0.05), ("int4", 0.4)])
def test_a_store_is_asked_with_its_models_weights_in_few_bits(folder: Path, weights: str, off: float) -> None:
    pytest.importorskip("bitsandbytes")
    whole = Engine.open(folder / "s.kv", device="cpu")
    small = Engine.open(folder / "s.kv", device="cpu", weights=weights)
    assert small.loaded.weights_hash == whole.loaded.weights_hash
    assert small.loaded.dtype == whole.loaded.dtype
    exact, close = (engine.ask(QUESTION) for engine in (whole, small))
    difference = (close - exact).norm() / exact.norm()
    assert 0 < difference < off
    assert len(small.answer(QUESTION, 8).tokens) == 8


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_only_linear_layers_are_taken(folder: Path, weights: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = load(str(folder / "model"), "cpu", weights=weights).model
    kinds = {type(layer).__module__ for layer in _linear(model.model)}
    assert all(kind.startswith("bitsandbytes") for kind in kinds)
    assert type(model.lm_head) is torch.nn.Linear
    assert model.model.embed_tokens.weight.dtype is torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "off"), [("int8", 0.05), ("int4", 0.4)])
def test_they_answer_on_a_gpu(folder: Path, weights: str, off: float) -> None:
    pytest.importorskip("bitsandbytes")
    exact = Engine.open(folder / "s.kv", device="cpu").ask(QUESTION)
    small = Engine.open(folder / "s.kv", device="cuda", weights=weights)
    assert small.loaded.device.type == "cuda"
    assert (small.ask(QUESTION).cpu() - exact).norm() / exact.norm() < off


def test_a_missing_library_and_an_unknown_name_are_sentences(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"offload-decode\[quant\]"):
        load(str(folder / "model"), "cpu", weights="int8")
    with pytest.raises(ConfigError, match="choose one of: auto, int8, int4"):
        load(str(folder / "model"), "cpu", weights="int3")


def _linear(model: Any) -> Iterator[torch.nn.Linear]:
    return (layer for layer in model.modules() if isinstance(layer, torch.nn.Linear))
