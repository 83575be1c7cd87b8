"""The tiny configs say what the families are: each is valid, and its model generates."""

import pytest
import torch

from tests.families import FAMILIES, LISTED, VOCAB, config_of
from tests.tiny import tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_config_is_valid_and_is_of_its_family(family: str) -> None:
    config = config_of(family)
    assert config.model_type == FAMILIES[family].model_type
    assert config.vocab_size == VOCAB


def test_a_changed_field_reaches_the_text_config_through_a_wrapper() -> None:
    assert LISTED["gemma3-wrapper"].wrapper == "gemma3"
    assert config_of("gemma3-wrapper", sliding_window=9).sliding_window == 9


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_model_generates(family: str) -> None:
    ids = torch.arange(3, 48)[None]
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    answer = tiny_model(family).generate(ids, **how)
    assert answer.shape == (1, 48)
