"""Numbers that are not finite stop a prefill at their chunk, with the layer, and nothing is published."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offload_decode.common.errors import ModelError, StoreMismatch
from offload_decode.models.loading import wrap
from tests.tiny import random_ids, text_model, token_store

IDS = random_ids(40)
CHUNK = 16


def fill(weight: Any, value: float) -> None:
    with torch.no_grad():
        weight.fill_(value)


def prefill(model: Any, path: Path) -> None:
    token_store(path, wrap(model), IDS, CHUNK)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next", "deepseek_v3", "falcon_h1"])
def test_weights_that_are_all_nan_stop_at_the_first_layer(family, tmp_path):
    model = text_model(family=family)
    for weight in model.parameters():
        fill(weight, float("nan"))
    with pytest.raises(ModelError, match=r"layer 0 of the model .* not finite: the weight .* holds NaN"):
        prefill(model, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("damaged", "where"),
    [
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.layers.1.self_attn.v_proj.weight", "layer 1"),
        ("model.norm.weight", "what follows the last layer"),
        ("lm_head.weight", "what follows the last layer"),
    ],
)
def test_the_layer_and_the_weight_are_named(damaged, where, tmp_path):
    model = text_model(tie_word_embeddings=False)
    fill(model.get_parameter(damaged), float("inf"))
    with pytest.raises(ModelError, match=rf"^{where} of the model .* the weight {damaged} holds NaN or inf"):
        prefill(model, tmp_path / "store")


def test_an_overflow_of_float16_names_the_dtype(tmp_path):
    model = text_model().half()
    fill(model.model.layers[1].mlp.down_proj.weight, 6e4)
    with pytest.raises(ModelError, match=r"^layer 1 of the model .* too large for float16, so give --dtype"):
        prefill(model, tmp_path / "store")


def test_what_was_committed_before_goes_on_with_the_same_model_alone(tmp_path):
    """The embedding of a token that comes in the second chunk is damaged."""
    model, store = text_model(), tmp_path / "store"
    token = next(one for one in IDS[CHUNK : 2 * CHUNK] if one not in IDS[:CHUNK])
    fill(model.get_input_embeddings().weight[token], float("nan"))
    for _ in range(2):
        with pytest.raises(ModelError, match="layer 0"):
            prefill(model, store)
        assert '"tokens": 16' in (tmp_path / "store.partial" / "progress.json").read_text()
    with pytest.raises(StoreMismatch, match="begun with another weights_hash"):
        prefill(text_model(), store)
