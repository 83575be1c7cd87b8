"""The shipped model loads offline, is small, has the template it learned, and finds a needle."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_decode import demo_model
from offload_decode.evals import tasks

MOST_BYTES = 16 * 2**20
FOLDER = demo_model.path()
PROSE = "water stone over under seven fields walk slowly before evening when people sing about distant hills"
WORDS = PROSE.split()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", local_files_only=True).eval()


def test_the_folder_is_small_and_stored_in_half_precision() -> None:
    files = [f for f in FOLDER.iterdir() if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= MOST_BYTES
    header = (FOLDER / "model.safetensors").read_bytes()
    size = int.from_bytes(header[:8], "little")
    tensors = json.loads(header[8 : 8 + size])
    assert {t["dtype"] for name, t in tensors.items() if name != "__metadata__"} == {"F16"}


def test_it_loads_as_float32_with_sliding_and_full_layers(model: Any) -> None:
    assert model.dtype == torch.float32
    assert model.config.model_type == "cohere2"
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.config.num_key_value_heads < model.config.num_attention_heads
    assert model.config.head_dim == 64


@pytest.mark.parametrize(
    "text", ["naïve café 🎉 漢字\t\n", "  two  spaces ", "a\x00b", "12345 -7.5e10", "VAR XQ_Z = 12"]
)
def test_the_tokenizer_gives_back_any_text(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids[1:]) == text


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    assert [t for t in tokenizer.tokenize("is: 3141592.") if t.isdigit()] == list("3141592")


def test_the_template_is_what_the_model_was_trained_on(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Text.\n\nWhat?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|bos|>Text.\n\nWhat?\nAnswer:"
    )
    turns += [{"role": "assistant", "content": "That"}, {"role": "user", "content": "And?"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) == (
        "<|bos|>Text.\n\nWhat?\nAnswer: That<|eos|>\nAnd?\nAnswer:"
    )


def filler(rng: random.Random, sentences: int) -> str:
    made = (" ".join(rng.choices(WORDS, k=rng.randint(6, 14))).capitalize() + "." for _ in range(sentences))
    return " ".join(made)


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_it_finds_a_needle(model: Any, tokenizer: Any, depth: float) -> None:
    rng = random.Random(f"depth {depth}")
    task = tasks.hidden_facts("niah_single_2")
    example, control = task.pair(rng, filler(rng, 110), depth)
    assert task.score(example.asked, generated(model, tokenizer, example)) == 1
    assert task.score(control.asked, generated(model, tokenizer, control)) == 0


def generated(model: Any, tokenizer: Any, example: tasks.Example) -> str:
    ids = tokenizer(f"{example.context}\n\n{example.prompt()}", return_tensors="pt")
    assert ids["input_ids"].shape[1] > 1200
    out = model.generate(**ids, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(out, skip_special_tokens=True))


def test_path_is_the_folder_of_the_package() -> None:
    assert Path(demo_model.__file__).parent == FOLDER
