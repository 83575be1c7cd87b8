"""The tiny model that all evaluations here measure."""

import pytest

from offload_decode.models.loading import LoadedModel, wrap
from tests.tiny import text_model, tiny_tokenizer


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap(text_model(), tiny_tokenizer(), "tiny")
