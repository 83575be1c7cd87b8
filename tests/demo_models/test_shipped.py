"""Every shipped model loads offline, is small, reads what it was taught, and is known by its name alone. What
the engine says with it is what transformers generates with its files.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_decode import demo_models
from offload_decode.engine.engine import Engine
from offload_decode.models.checkpoint import source_of
from offload_decode.models.loading import load
from tests.tiny import token_store

MOST_BYTES = 8_000_000
STORED, NEW = 300, 6  # more than a sliding window of a shipped model
CLOSE = {"atol": 1e-3, "rtol": 0}


@pytest.fixture(scope="module", params=demo_models.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str) -> Path:
    return demo_models.path(name)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_the_folder_is_small_and_stored_in_half_precision(folder: Path) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) <= MOST_BYTES
    header = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + size])
    assert {t["dtype"] for key, t in tensors.items() if key != "__metadata__"} == {"F16"}


def test_it_has_a_card(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")


def test_it_loads_as_float32_with_grouped_queries(folder: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
    assert model.dtype == torch.float32
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.parametrize(
    "text", ["naïve café 🎉 漢字\t\n", "  two  spaces ", "a\x00b", "12345 -7.5e10", "VAR XQ_Z = 12"]
)
def test_the_tokenizer_gives_back_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_the_template_is_what_the_model_was_trained_on(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Text.\n\nWhat?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|bos|>Text.\n\nWhat?\nAnswer:"
    )
    turns += [{"role": "assistant", "content": "That"}, {"role": "user", "content": "And?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|bos|>Text.\n\nWhat?\nAnswer: That<|eos|>\nAnd?\nAnswer:"
    )


def test_its_name_means_the_shipped_model_wherever_a_folder_has_that_name_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert source_of(name) == str(demo_models.path(name))
    assert source_of(f"./{name}") == f"./{name}"
    assert load(name, "cpu").model_id == name


def test_a_copy_in_a_folder_is_known_by_its_path(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    copy, shipped = load(f"./{name}", "cpu"), load(name, "cpu")
    assert copy.model_id == str(folder.resolve())
    assert copy.weights_hash == shipped.weights_hash


def test_the_logits_of_every_generated_token(name: str, folder: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(300, 2000, STORED + 9))
    said = plain.generate(
        ids[None], max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    loaded = load(name, "cpu")
    store = token_store(tmp_path / "text.kv", loaded, ids[:STORED], 64)
    engine = Engine.open(store, loaded, options={"budget": str(STORED)})
    steps = [ids[STORED:].tolist(), *([token] for token in said.sequences[0, len(ids) : -1].tolist())]
    for tokens, expected in zip(steps, said.logits, strict=True):
        torch.testing.assert_close(engine.extend(tokens), expected[0], **CLOSE)
    with torch.inference_mode():
        without = plain(ids[None, STORED:]).logits[0, -1]
    assert (without - said.logits[0][0]).abs().max() > 0.01, "the control"
