"""Multimodal checkpoints for text alone: they answer as the whole model does, open the stores of the text
model's own checkpoint, and nothing of what sees or hears is loaded.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from offload_decode.common.errors import ModelError, UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import class_of, text_of
from offload_decode.models.fingerprints import config_hash, weights_hash
from offload_decode.models.loading import load, wrap
from offload_decode.models.quantized_loading import whole_model
from offload_decode.models.size_estimate import estimate_size
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from tests.models import few_bits
from tests.multimodal import VOCAB, WRAPPERS, tiny_wrapper
from tests.tiny import saved

TEXT = "Facts: " + " ".join(f"thing {n} is number {n * n}." for n in range(12))


@pytest.fixture(params=WRAPPERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the tiny Gemma 3."""
    return saved(tiny_wrapper("gemma3"), tmp_path / "gemma3")


def text_alone(folder: Path) -> Any:
    return whole_model(str(folder), text_of(AutoConfig.from_pretrained(folder)))


def text_only(folder: Path, out: Path) -> Path:
    """A checkpoint of the text model alone, made of a wrapper's."""
    model = text_alone(folder)
    own = class_of(model.config)(model.config)
    own.load_state_dict(model.state_dict())
    own.tie_weights()
    return saved(own, out)


def renamed(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


def run_whole(whole: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits by transformers alone, where it can run the model."""
    try:
        with torch.inference_mode():
            return whole(input_ids=ids).logits
    except AttributeError as error:
        if "image_outputs" not in str(error):
            raise
        pytest.skip("transformers 5.24 asks Llama 4's text for what it saw: without an image it does not run")


def test_text_is_read_as_by_the_whole_model(name: str, tmp_path: Path) -> None:
    whole = tiny_wrapper(name)
    model = text_alone(saved(whole, tmp_path))
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    expected = run_whole(whole, ids)
    with torch.inference_mode():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
    own = sum(weight.numel() for weight in model.parameters())
    assert own <= sum(weight.numel() for weight in whole.parameters())
    assert not [path for path, _ in model.named_modules() if "vision" in path or "audio" in path]


def test_a_text_only_checkpoint_of_the_same_weights_is_the_same_model(name: str, tmp_path: Path) -> None:
    wrapper = text_alone(saved(tiny_wrapper(name), tmp_path / "wrapper"))
    alone = text_alone(text_only(tmp_path / "wrapper", tmp_path / "text"))
    assert config_hash(alone.config) == config_hash(wrapper.config)
    assert weights_hash(alone) == weights_hash(wrapper)


@pytest.mark.parametrize(
    "family", ["gemma3", "gemma4", "mistral3", "llama4", "llava", "lfm2_vl", "qwen3_vl", "glm4v"]
)
def test_a_store_of_the_one_is_opened_by_the_other(family: str, tmp_path: Path) -> None:
    whole = tiny_wrapper(family)
    folder = saved(whole, tmp_path / "wrapper")
    served = load(str(folder), "cpu")
    prefill_texts(served, [TextDocument("all", TEXT)], tmp_path / "store")
    question = "Which?"
    answers = []
    for model in (folder, text_only(folder, tmp_path / "text")):
        engine = Engine.open(tmp_path / "store", str(model), device="cpu", selector="dense")
        answers.append(list(engine.answer(question, max_new_tokens=8).tokens))
    tokenizer, prompt = served.known_tokenizer, served.prompt
    ids = prompt.document(tokenizer, TEXT, first=True)
    ids += prompt.first(tokenizer, question)
    run_whole(whole, torch.tensor([ids]))
    out = whole.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    expected = [token for token in out[0, len(ids) :].tolist() if token != 2]
    assert answers == [expected, expected]


@pytest.mark.parametrize(
    ("base", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.language_model.model.", "model.language_model.lm_head."),
        ("model.text_model.", "lm_head."),
        ("thinker.model.", "thinker.lm_head."),
        ("model.", "lm_head."),
        ("", "lm_head."),
    ],
)
def test_weights_are_found_under_the_names_that_are_published(base: str, head: str, folder: Path) -> None:
    expected = text_alone(folder)
    own = {name.removeprefix("model."): weight for name, weight in expected.model.state_dict().items()}
    other = {"vision_tower.layers.0.weight": torch.ones(3), "model.visual.embed_tokens.weight": torch.ones(2)}
    untied = torch.randn(VOCAB, 32)

    def published(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        named = {base + name: weight for name, weight in own.items()}
        return {**named, head + "weight": untied, **other}

    renamed(folder, published)
    found = text_alone(folder)
    assert found.config.tie_word_embeddings is False
    torch.testing.assert_close(found.lm_head.weight, untied, atol=0, rtol=0)
    for name, weight in found.model.state_dict().items():
        torch.testing.assert_close(weight, own[name], atol=0, rtol=0)


def test_several_files_are_read(folder: Path, tmp_path: Path) -> None:
    several = saved(tiny_wrapper("gemma3"), tmp_path / "several", max_shard_size="40kB")
    assert (several / "model.safetensors.index.json").exists()
    assert weights_hash(text_alone(folder)) == weights_hash(text_alone(several))


def test_what_sees_may_be_missing_and_what_writes_may_not(folder: Path) -> None:
    renamed(folder, lambda weights: {name: own for name, own in weights.items() if "language_model" in name})
    text_alone(folder)
    renamed(folder, lambda weights: {name: own for name, own in weights.items() if "q_proj" not in name})
    with pytest.raises(ModelError, match=r"lack 2 of those .*self_attn.q_proj.weight"):
        text_alone(folder)


@pytest.mark.parametrize(
    ("weight", "known"),
    [
        ("layers.0.self_attn.q_proj.bias", False),
        ("per_layer_projection.weight", False),
        ("layers.2.self_attn.q_proj.weight", True),  # of a further layer: predicts further tokens
    ],
)
def test_a_weight_of_the_text_that_the_config_does_not_know_is_refused(weight, known, folder) -> None:
    base = next(name for name in load_file(folder / "model.safetensors") if "embed_tokens" in name)
    added = base.removesuffix("embed_tokens.weight") + weight
    renamed(folder, lambda weights: {**weights, added: torch.ones(32)})
    if known:
        text_alone(folder)
        return
    with pytest.raises(ModelError, match=r"hold 1 that its config.json knows nothing of"):
        text_alone(folder)


def test_only_the_text_is_planned(folder: Path) -> None:
    assert estimate_size(str(folder)).parameters == sum(
        own.numel() for own in text_alone(folder).parameters()
    )


def test_end_tokens_and_chat_template_of_the_wrapper(tmp_path: Path) -> None:
    folder = saved(tiny_wrapper("gemma3", eos_token_id=[2, 9]), tmp_path)
    (folder / "generation_config.json").unlink()
    parts = "{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    template = "{% for m in messages %}<{{ m['role'] }}>" + parts + "{% endfor %}"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    served = load(str(folder), "cpu")
    prefill_texts(served, [TextDocument("all", TEXT)], tmp_path / "store")
    engine = Engine.open(tmp_path / "store", served)
    assert engine.end_tokens == {2, 9}
    assert engine.store.manifest.template == "chat"
    assert engine.tokenizer.decode(engine.question_tokens("Who?")).endswith("Who?")


def test_a_multimodal_model_in_memory_is_refused_with_the_way_out() -> None:
    with pytest.raises(UnsupportedModel, match="'gemma3' model is loaded with its encoders"):
        wrap(tiny_wrapper("gemma3"))


def test_layers_that_are_listed_by_a_wrappers_names_are_known_by_their_own(tmp_path: Path) -> None:
    """compressed-tensors lists the layers that it leaves whole."""
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    packed = few_bits.compressed(tmp_path / "text")
    whole = "model.layers.0.mlp.down_proj"
    weights = load_file(packed / "model.safetensors")
    weights = {name: own for name, own in weights.items() if not name.startswith(whole)}
    weights[f"{whole}.weight"] = torch.randn(64, 64)
    config = json.loads((packed / "config.json").read_text())
    stated = config.pop("quantization_config")

    def published(folder: Path, own: dict[str, Any], before: str) -> Any:
        shutil.copytree(packed, folder)
        named = {before + name: weight for name, weight in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        listed = {"ignore": [f"{before}lm_head", before + whole]}
        (folder / "config.json").write_text(json.dumps(own | {"quantization_config": stated | listed}))
        return load(str(folder), "cpu").model

    vision = WRAPPERS["llava"]["vision_config"]
    wrapper = {"model_type": "llava", "text_config": config, "vision_config": vision}
    alone = published(tmp_path / "alone", config, "")
    within = published(tmp_path / "within", wrapper, "language_model.")
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        ours, theirs = (model(ids, use_cache=False).logits for model in (within, alone))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
