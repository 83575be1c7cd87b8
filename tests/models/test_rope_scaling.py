"""RoPE scaled for longer texts: as transformers with that config, in the manifest and in the fingerprint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offload_decode.common.errors import ConfigError, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.hf.rope_scaling import Trained, parse_rope, scale_rope, trained_of
from offload_decode.models.loading import load
from offload_decode.prefill_jobs.append import append
from offload_decode.prefill_jobs.job import Settings, prefill
from offload_decode.store.reader import KVStore
from tests.families import config_of
from tests.tiny import eager, saved_model

TEXT = "".join(f"Thing {n} has the colour {n * n}. " for n in range(30))
QUESTION = "What colour has thing 3?"


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("rope") / request.param, request.param)


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


def transformers_own(folder: Path, rope: dict[str, Any]) -> Any:
    config = AutoConfig.from_pretrained(folder)
    if "full_attention" in config.rope_parameters:
        config.rope_parameters["full_attention"] |= rope
    else:
        config.rope_parameters |= rope
    return eager(AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32))


@pytest.mark.parametrize(
    ("asked", "stated"),
    [
        ("yarn:4", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}),
        ("linear:2.5", {"rope_type": "linear", "factor": 2.5}),
        ("dynamic:2", {"rope_type": "dynamic", "factor": 2.0}),
    ],
)
def test_a_store_equals_transformers_with_that_config(
    model: Path, corpus: str, tmp_path: Path, asked: str, stated: dict[str, Any]
) -> None:
    run: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    settings = Settings(options={"chunk": 64}, rope=asked)
    prefill(corpus, model=str(model), out=tmp_path / "s.kv", settings=settings, **run)
    engine = Engine.open(tmp_path / "s.kv", device="cpu", selector="dense")
    assert engine.store.manifest.scaled == asked
    stored = torch.from_numpy(engine.store.tokens.astype("int64"))
    prompt = torch.cat([stored, torch.tensor(engine.question_tokens(QUESTION))])[None]
    with torch.inference_mode():
        expected = transformers_own(model, stated)(prompt).logits[0, -1]
        plain = transformers_own(model, {})(prompt).logits[0, -1]
    assert (engine.ask(QUESTION) - expected).abs().max() < 1e-4
    if not asked.startswith("dynamic"):  # which begins to scale beyond the length of the training
        assert (plain - expected).abs().max() > 1e-3


def test_a_store_knows_its_scaling_and_refuses_a_model_without(
    model: Path, corpus: str, tmp_path: Path
) -> None:
    store = tmp_path / "s.kv"
    prefill(corpus, model=str(model), out=store, settings=Settings(rope="yarn:2"), device="cpu")
    (tmp_path / "more.txt").write_text("Another thing has none.")
    assert append(store, str(tmp_path / "more.txt"), device="cpu").documents == 2
    assert KVStore.open(store).manifest.scaled == "yarn:2"
    assert Engine.open(store, model=str(model), device="cpu").answer(QUESTION, 2).tokens
    with pytest.raises(StoreMismatch, match="config"):
        Engine.open(store, load(str(model), "cpu"))
    scaled, plain = load(str(model), "cpu", rope="yarn:2"), load(str(model), "cpu")
    assert (scaled.config_hash != plain.config_hash, scaled.weights_hash) == (True, plain.weights_hash)


@pytest.mark.parametrize(
    "rope", ["yarn", "yarn:", "yarn:1", "yarn:nan", "yarn:1e9", "ntk:4", "4", "linear:-2"]
)
def test_what_is_no_scaling_is_refused_in_a_sentence(rope: str) -> None:
    with pytest.raises(ConfigError, match=r"is none: give yarn, linear or dynamic with .* such as yarn:4"):
        parse_rope(rope)
    with pytest.raises(ConfigError):
        Settings(rope=rope)


def test_models_that_scale_already_or_have_no_rope_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scales its RoPE already \(yarn\): leave --rope out"):
        scale_rope(config_of("llama-yarn"), "linear:2")
    with pytest.raises(ConfigError, match="not those of RoPE"):
        scale_rope(config_of("gpt2"), "yarn:2")


@pytest.mark.parametrize(
    ("family", "rope", "scaled", "expected"),
    [
        ("llama", {}, "", (4096, 4096)),
        ("llama", {"rope_type": "linear", "factor": 4.0}, "", (16_384, 0)),
        ("llama", {"rope_type": "dynamic", "factor": 2.0}, "", (8192, 0)),
        (
            "llama",
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096},
            "",
            (32_768, 0),
        ),
        (
            "llama",
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512},
            "",
            (4096, 0),
        ),
        ("llama", {"rope_type": "llama3", "factor": 8.0}, "", (4096, 0)),
        ("llama", {}, "yarn:4", (16_384, 4096)),
        ("gemma3", {}, "linear:2", (8192, 4096)),
        (
            "gemma3",
            {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}},
            "",
            (4096, 0),
        ),
        ("gpt2", {}, "", (0, 0)),
    ],
)
def test_the_length_of_the_training_is_known_with_its_scaling(family, rope, scaled, expected):
    config = config_of(family, max_position_embeddings=4096)
    config.rope_parameters = {**(getattr(config, "rope_parameters", None) or {}), **rope}
    if scaled:
        scale_rope(config, scaled)
    assert trained_of(config, scaled) == Trained(*expected)


def test_the_note_is_on_texts_that_are_too_long_with_a_question_and_names_the_way_out():
    assert Trained(4096, 4096).note(3584) == Trained().note(10**9) == ""
    note = Trained(4096, 4096).note(3585)
    assert note.startswith("3,585 tokens with a question and an answer are more than the 4,096")
    assert "--rope yarn:2," in note
    assert "--rope yarn:8," in Trained(8192, 4096).note(16_384)
    assert "--rope" not in Trained(4096).note(16_384) + Trained(16, 16).note(10**6)
