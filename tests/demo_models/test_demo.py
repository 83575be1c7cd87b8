"""`demo` has sliding and full layers, and finds a needle."""

import random
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload_decode import demo_models
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.ruler import Needle

FOLDER = demo_models.path("demo")
PROSE = "water stone over under seven fields walk slowly before evening when people sing about distant hills"
WORDS = PROSE.split()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype="auto", local_files_only=True).eval()


def test_it_has_sliding_and_full_layers(model: Any) -> None:
    assert model.config.model_type == "cohere2"
    assert set(model.config.layer_types) == {"sliding_attention", "full_attention"}
    assert model.config.head_dim == 64


def test_numbers_are_groups_of_three_digits(tokenizer: Any) -> None:
    assert [t for t in tokenizer.tokenize("is: 3141592.") if t.isdigit()] == ["314", "159", "2"]
    vocabulary = tokenizer.get_vocab()
    assert all(f"{n:0{size}}" in vocabulary for size in (1, 2, 3) for n in range(10**size))


def filler(rng: random.Random, sentences: int) -> str:
    made = (" ".join(rng.choices(WORDS, k=rng.randint(6, 14))).capitalize() + "." for _ in range(sentences))
    return " ".join(made)


@pytest.mark.parametrize("depth", [0.1, 0.5, 0.9])
def test_it_finds_a_needle(model: Any, tokenizer: Any, depth: float) -> None:
    rng = random.Random(f"depth {depth}")
    prose = filler(rng, 110)
    hidden = Needle().sample(rng)
    text, asked = Needle().placed(prose, hidden.facts, [depth]), hidden.questions[0]
    assert Needle().score(asked, generated(model, tokenizer, text, asked)) == 1
    assert Needle().score(asked, generated(model, tokenizer, prose, asked)) == 0


def generated(model: Any, tokenizer: Any, text: str, asked: Question) -> str:
    ids = tokenizer(f"{text}\n\n{asked.text}\nAnswer:", return_tensors="pt")
    assert ids["input_ids"].shape[1] > 1200
    out = model.generate(**ids, max_new_tokens=40)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(out, skip_special_tokens=True))
