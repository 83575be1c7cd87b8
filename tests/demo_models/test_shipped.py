"""Every shipped model loads offline, is small, reads what it was taught, and is known by its name alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_decode import demo_models
from offload_decode.models.checkpoint import source_of
from offload_decode.models.loading import load

MOST_BYTES = 8_000_000


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
