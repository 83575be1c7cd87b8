"""A cache is taken by each name that a release of transformers, or a model's own code, knows it by."""

import copy
from typing import Any

import pytest
import torch

from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import CACHE_NAMES, cache_in, cache_name, generate_name, in_its_name
from tests.tiny import served_model, token_store

ASKED = torch.tensor([[5, 9, 7]])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    served = served_model()
    store = token_store(tmp_path_factory.mktemp("arguments") / "store", served, range(3, 33))
    return Engine.open(store, served, selector="dense")


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...


class Newer:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Wrapper:
    def forward(self, *args: Any, **given: Any) -> None: ...


def test_a_class_says_its_name_and_a_wrapper_takes_that_of_generate() -> None:
    names = [cache_name(kind) for kind in (Older, Newer, Wrapper)]
    assert names == ["past_key_values", "cache", generate_name()]


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_found_and_handed_on_by_the_modules_own_name(name: str) -> None:
    held = object()
    given = {"input_ids": 1, name: held, **{other: None for other in CACHE_NAMES if other != name}}
    assert cache_in(given) is held
    assert in_its_name(Newer(), given) == {"input_ids": 1, "cache": held}
    assert in_its_name(Older(), given) == {"input_ids": 1, "past_key_values": held}
    assert cache_in({name: None}) is cache_in({}) is None


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_decoder_attends_to_what_is_stored_by_any_name(engine: Engine, name: str) -> None:
    decoder = engine.loaded.model.base_model
    expected = engine.loaded.forward(ASKED, engine.new_cache())
    assert not torch.allclose(expected, engine.loaded.model(ASKED).logits[:, -1]), "what is stored counts"
    with torch.inference_mode():
        states = decoder(input_ids=ASKED, use_cache=True, **{name: engine.new_cache()}).last_hidden_state
        logits = engine.loaded.model.lm_head(states[:, -1])
    torch.testing.assert_close(logits, expected)


def test_what_a_pass_returns_holds_the_cache(engine: Engine) -> None:
    given = engine.inputs("Who?")
    cache = given[generate_name()]
    with torch.inference_mode():
        output = engine.loaded.model(**copy.copy(given))
    assert cache_in(output) is cache
    assert cache.generated_length == given["input_ids"].shape[1]
