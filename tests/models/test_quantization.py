"""Weights in few bits answer from a store that the whole weights made, and say whose they are."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_decode.common.errors import ConfigError, StoreError, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models.block_layers import FEW_ROWS, BlockEmbedding, BlockLinear, quantize
from offload_decode.models.loading import load
from offload_decode.models.quantization import check_quantizer
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.store.reader import KVStore
from tests.tiny import saved, text_model

Q4_1, Q8_0 = 3, 8
"""ggml's numbers of these types."""
# Rows hold whole blocks of 64 weights, which are as a trained model has them: with tests' usual ones, 4 bits
# would change everything.
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
QUESTION = "What is the colour of thing 7?"


def prefilled(folder: Path, out: str | Path = "s.kv", chunk: int = 64, **more: Any) -> Any:
    """The prefill of the corpus in `folder` by the model there."""
    made = {"model": str(folder / "model"), "out": folder / out, "device": "cpu"}
    return prefill(str(folder / "corpus.txt"), **made, settings=Settings(options={"chunk": chunk}), **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a store of it."""
    folder = tmp_path_factory.mktemp("quantized")
    saved(text_model(**SIZES), folder / "model")
    (folder / "corpus.txt").write_text("".join(f"Thing {n} has the colour {n * n}.\n" for n in range(20)))
    prefilled(folder)
    return folder


@pytest.mark.parametrize(("weights", "off"), [("int8", 0.05), ("int4", 0.4)])
def test_a_store_is_asked_with_its_models_weights_in_few_bits(folder: Path, weights: str, off: float) -> None:
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
    model = load(str(folder / "model"), "cpu", weights=weights).model
    blocks = [layer for layer in model.model.modules() if isinstance(layer, BlockLinear)]
    assert len(blocks) == 7 * model.config.num_hidden_layers
    assert {layer.kind for layer in blocks} == {Q8_0 if weights == "int8" else Q4_1}
    assert (model.lm_head.kind, model.lm_head.wide) == (Q8_0, True)
    table = model.model.embed_tokens
    assert table.weight.dtype is torch.float32
    assert isinstance(table, BlockEmbedding) == model.config.tie_word_embeddings
    if model.config.tie_word_embeddings:
        assert table.blocks is model.lm_head.blocks


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize(
    ("family", "sizes"), [("jamba", {"mamba_dt_rank": 64}), ("hunyuan_v1_moe", {"num_experts": 32})]
)
def test_models_that_look_into_their_layers_run(family: str, sizes: dict[str, Any], weights: str) -> None:
    whole = text_model(family=family, **SIZES, **sizes)
    ids = torch.arange(3, 43)[None]
    with torch.inference_mode():
        expected = whole(input_ids=ids, use_cache=False).logits
        found = quantize(whole, weights)(input_ids=ids, use_cache=False).logits
    assert 0 < (found - expected).norm() < 0.5 * expected.norm()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_few_rows_are_multiplied_as_many_are(tmp_path: Path, family: str, weights: str) -> None:
    """Few rows round their inputs to 8 bits, and may run in compiled layers; many are unpacked and exact.

    Compiled layers differ in a last bit, which here and there rounds an input to the next code.
    """
    saved(text_model(family=family, **SIZES), tmp_path / "model")
    model = load(str(tmp_path / "model"), "cpu", weights=weights).model
    prompts = torch.randint(3, 60, (15, 1, FEW_ROWS + 24), generator=torch.Generator().manual_seed(0))

    def few_rows() -> torch.Tensor:
        found = [model(input_ids=ids[:, :16], use_cache=False).logits[0] for ids in prompts]
        return torch.stack(found)

    with torch.inference_mode():
        many = torch.stack([model(input_ids=ids, use_cache=False).logits[0, :16] for ids in prompts])
        few = few_rows()
        compiled = [vars(layer).pop("forward", None) for layer in model.base_model.layers]
        assert all(compiled) == (family != "phi3")
        plain = few_rows()
    size = many.norm(dim=(1, 2))
    rounded, apart = ((plain - other).norm(dim=(1, 2)) / size for other in (many, few))
    assert rounded.min() > 0
    assert rounded.max() < 0.03
    assert apart.median() < 1e-5
    assert apart.max() < 0.03
    assert few.dtype is torch.float32


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_store_says_which_weights_prefilled_it(folder: Path, tmp_path: Path, weights: str) -> None:
    """Its keys are the quantized model's; asked as it is, it equals that model's own generation."""
    store = tmp_path / "small.kv"
    prefilled(folder, store, weights=weights)
    manifest = KVStore.open(store).manifest
    assert manifest.weights == manifest.prefill["weights"] == weights
    assert manifest.weights_hash == KVStore.open(folder / "s.kv").manifest.weights_hash
    says = f"another prefill .*weights={weights}; asked for is dense chunk=64"
    with pytest.raises(StoreMismatch, match=says):
        prefilled(folder, store)
    assert prefilled(folder, store, weights=weights).kept

    engine = Engine.open(store, device="cpu", selector="dense")
    assert engine.loaded.weights == weights
    question = torch.tensor([engine.question_tokens(QUESTION)])
    stored = torch.from_numpy(KVStore.open(store).tokens.astype("int64"))[None]
    plain = load(str(folder / "model"), "cpu", weights=weights)
    with torch.inference_mode():
        plain.model.set_attn_implementation("eager")
        expected = plain.model(torch.cat([stored, question], 1)).logits[0, -1]
    # Of few rows, such as the question's last ones, inputs are rounded to 8 bits.
    assert (engine.ask(QUESTION) - expected).norm() < 0.02 * expected.norm()
    full = Engine.open(store, device="cpu", weights="full")
    assert full.loaded.weights == "auto"
    assert full.ask(QUESTION).isfinite().all()


def test_an_interrupted_prefill_is_not_gone_on_with_by_other_weights(folder: Path, tmp_path: Path) -> None:
    run = partial(prefilled, folder, tmp_path / "s.kv", chunk=32)

    def stop(stage: str, done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(weights="int4", progress=stop)
    with pytest.raises(StoreError):
        run()
    assert run(weights="int4").resumed_from >= 64


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "off"), [("int8", 0.05), ("int4", 0.4)])
def test_they_answer_on_a_gpu(folder: Path, weights: str, off: float) -> None:
    pytest.importorskip("bitsandbytes")
    exact = Engine.open(folder / "s.kv", device="cpu").ask(QUESTION)
    small = Engine.open(folder / "s.kv", device="cuda", weights=weights)
    assert small.loaded.device.type == "cuda"
    assert (small.ask(QUESTION).cpu() - exact).norm() / exact.norm() < off


def test_a_missing_library_and_an_unknown_name_are_sentences(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"need bitsandbytes: pip install 'offload-decode\[quant\]'"):
        check_quantizer("int8", torch.device("cuda"))
    check_quantizer("auto", torch.device("cuda"))
    check_quantizer("int8", torch.device("cpu"))
    with pytest.raises(ConfigError, match="choose one of: auto, full, streamed, int8, int4"):
        load(str(folder / "model"), "cpu", weights="int3")
