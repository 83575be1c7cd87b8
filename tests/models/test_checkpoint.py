"""Checkpoints that are broken, absurd or hostile end in one sentence; nothing is unpickled."""

import json
import os
import pickle
import shutil

import pytest
import torch

from offload_decode.common.errors import ConfigError, ModelError, UnsupportedModel
from offload_decode.models.checkpoint import CONFIG, INDEX, WEIGHTS
from offload_decode.models.loading import Processors, load
from offload_decode.models.size_estimate import estimate_size
from tests.tiny import saved_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "checkpoint")


def changed(folder, **fields):
    held = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in held.items() if value != "gone"}))


def refused(folder, match):
    for read in (lambda: estimate_size(str(folder)), lambda: load(str(folder), "cpu")):
        with pytest.raises(ModelError, match=match) as raised:
            read()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", [0, -1, 10**9, 10**30, "7", 1.5, None, [4], True])
def test_absurd_sizes_are_refused(folder, field, value):
    changed(folder, **{field: value})
    refused(folder, f"{field} is .* a whole number from 1 to")


@pytest.mark.parametrize(
    "fields",
    [
        {"head_dim": 0},
        {"num_key_value_heads": -2},
        {"num_key_value_heads": 3},
        {"rms_norm_eps": "small"},
        {"rms_norm_eps": float("nan")},
        {"rope_parameters": "none"},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "unheard of", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e999}},
        {"hidden_act": "unheard of"},
        {"transformers_weights": "pytorch_model.bin"},
        {"model_type": "gone"},
        {"model_type": ["llama"]},
        {"layer_types": ["full_attention"]},
        {"layer_types": "full"},
    ],
    ids=str,
)
def test_absurd_fields_are_refused(folder, fields):
    changed(folder, **fields)
    refused(folder, None)


@pytest.mark.parametrize(
    "field", ["num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"]
)
def test_a_field_that_is_missing_is_not_made_up(folder, field):
    changed(folder, **{field: "gone"})
    with pytest.raises(ModelError):
        load(str(folder), "cpu")


@pytest.mark.parametrize(
    "text", ["[]", "[1]", '"llama"', "null", "", "{", "[" * 100_000, '{"a": ' * 100_000, "\xff", "1" * 5000]
)
def test_a_config_that_is_no_object_is_refused(folder, text):
    (folder / CONFIG).write_text(text, encoding="latin-1")
    refused(folder, "config.json")


def test_a_config_of_a_gigabyte_is_not_read(folder):
    with open(folder / CONFIG, "r+b") as file:
        file.truncate(1 << 30)
    refused(folder, "config.json has 1,024 MiB")


TEMPLATES = "additional_chat_templates"


@pytest.mark.parametrize(
    "name", [CONFIG, WEIGHTS, "tokenizer.json", "tokenizer_config.json", f"{TEMPLATES}/tools.jinja"]
)
def test_a_pipe_is_not_waited_for(folder, name):
    (folder / TEMPLATES).mkdir()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="is not a regular file"):
        load(str(folder), "cpu")
    if name != WEIGHTS:
        refused(folder, "is not a regular file")


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("how", ["alone", "as shards", "under a safe name", "as an adapter"])
def test_nothing_is_unpickled(folder, how, tmp_path):
    (folder / WEIGHTS).unlink()
    hurt = tmp_path / "hurt"
    torch.save({"model.norm.weight": Bomb(hurt)}, folder / "pytorch_model.bin")
    if how == "as shards":
        index = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}, "metadata": {"total_size": 1}}
        (folder / INDEX).write_text(json.dumps(index))
    if how == "under a safe name":
        (folder / WEIGHTS).write_bytes(pickle.dumps(Bomb(hurt)))
    if how == "as an adapter":
        (folder / "adapter_config.json").write_text("{}")
    says = {
        "alone": "pickled .pytorch_model.bin.*save_pretrained",
        "as an adapter": "this folder with --adapter",
    }
    with pytest.raises(ModelError, match=says.get(how)):
        load(str(folder), "cpu")
    assert not hurt.exists()


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"num_hidden_layers": 4}, r"lack \d+ of those that its config.json asks for"),
        ({"vocab_size": 1 << 24}, "and the files of its weights have"),  # for which no room is made
    ],
)
def test_weights_that_are_not_all_there_are_refused(folder, field, says):
    changed(folder, **field)
    with pytest.raises(ModelError, match=says):
        load(str(folder), "cpu")


@pytest.mark.parametrize("index", [None, "[]", "{}", '{"weight_map": {"a": "../up.safetensors"}}', "no JSON"])
def test_a_folder_without_weights_or_with_an_index_of_other_files_is_refused(folder, index):
    (folder / WEIGHTS).unlink()
    if index is not None:
        (folder / INDEX).write_text(index)
    with pytest.raises(ModelError, match="has no weights" if index is None else INDEX):
        load(str(folder), "cpu")


@pytest.mark.parametrize("model", ["", " "])
def test_an_empty_model_is_refused(model):
    for read in (estimate_size, load):
        with pytest.raises(ConfigError, match="the model is empty"):
            read(model)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"model_type": "gpt2", "n_layer": 10**9}, ModelError, "num_hidden_layers is 1000000000"),
        ({"model_type": "t5"}, UnsupportedModel, "'t5' is an encoder-decoder model"),
        ({"model_type": "whisper"}, UnsupportedModel, "'whisper' is an encoder-decoder model"),
        ({"model_type": "siglip_vision_model"}, UnsupportedModel, "no language model"),
    ],
)
def test_a_config_of_what_is_not_served_is_refused_whatever_its_fields_are_named(folder, config, error, says):
    (folder / CONFIG).write_text(json.dumps(config))
    with pytest.raises(error, match=says):
        estimate_size(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}}', ""])
def test_a_broken_tokenizer_is_a_sentence(folder, text):
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(
        ModelError, match=r"cannot be used, because (it is no JSON|the tokenizers library fails)"
    ):
        load(str(folder), "cpu")


WORDS = {"type": "WordPiece", "unk_token": "?", "vocab": {"a": 0}}


def test_weights_of_other_shapes_are_told_without_a_report_that_nobody_sees(folder):
    changed(folder, intermediate_size=24)
    with pytest.raises(ModelError, match=r"its weights have other shapes than its config\.json states"):
        load(str(folder), "cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AA=="}},
            "the tokenizers library fails",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 1_000_000}}, "its normalizer has more than"),
        (
            {"model": WORDS | {"continuing_subword_prefix": "", "max_input_chars_per_word": 9}},
            "the tokenizers library fails",
        ),
    ],
    ids=["a library panics", "rules of no tokenizer", "no unknown word"],
)
def test_a_tokenizer_that_cannot_be_used_is_a_sentence(folder, changes, says):
    held = json.loads((folder / "tokenizer.json").read_text()) | changes
    (folder / "tokenizer.json").write_text(json.dumps(held))
    with pytest.raises(ModelError, match=says):
        _ = load(str(folder), "cpu").prompt


@pytest.mark.parametrize("fields", [{"eos_token_id": [2] * 40_000}, {"num_labels": 10**8}])
def test_a_config_does_not_list_without_end(folder, fields):
    changed(folder, **fields)
    refused(folder, "its config.json")


@pytest.mark.parametrize(
    "stated",
    [
        {"eos_token_id": ["x"]},
        {"bad_words_ids": "x"},
        {"bad_words_ids": [[1 << 40]]},
        {"repetition_penalty": 0},
        {"stop_strings": 5},
    ],
)
def test_a_generation_config_that_cannot_be_obeyed_is_a_sentence(folder, stated):
    model = load(str(folder), "cpu")
    model.model.generation_config.update(**stated)
    ends = frozenset(stated.get("eos_token_id", ()))
    with pytest.raises(ModelError, match="generation_config cannot be obeyed"):
        Processors(model.model, model.tokenizer, [1, 2], ends, 3)(torch.zeros(model.model.config.vocab_size))
