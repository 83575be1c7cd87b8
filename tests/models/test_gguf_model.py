"""A GGUF file's weights stay in its blocks, with transformers' own numbers; its header is converted once."""

import errno
import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from offload_decode.common.errors import ModelError, OffloadDecodeWarning, StoreMismatch
from offload_decode.engine.engine import Engine
from offload_decode.models import gguf_cache
from offload_decode.models.block_layers import FEW_ROWS, BlockEmbedding, BlockLinear
from offload_decode.models.fingerprints import config_hash, tokenizer_hash
from offload_decode.models.gguf_cache import ARCHITECTURES, converted, headers_folder
from offload_decode.models.loading import load
from offload_decode.models.size_estimate import estimate_size
from offload_decode.prefill_jobs.corpus import TextDocument
from offload_decode.prefill_jobs.job import prefill_texts
from tests.models import few_bits

LONG = FEW_ROWS + 8  # tokens of a pass whose weights are unpacked


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("gguf")
    return cache(lambda name, form="Q8_0": few_bits.gguf(home / f"{name}-{form}", name, form))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_cache, "_known", {})
    monkeypatch.setattr(gguf_cache, "settled", lambda seen: True)
    return tmp_path / "cache"


def logits(model: Any, tokens: int) -> torch.Tensor:
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, 250, (1, tokens)))
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits.float()
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_its_numbers_are_those_of_transformers(made: Any, name: str) -> None:
    file = made(name)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = load(str(file), "cpu", "float32")
    layers = [type(layer) for layer in ours.model.modules()]
    assert layers.count(BlockLinear) == 7 * ours.model.config.num_hidden_layers + 1
    assert isinstance(ours.model.get_input_embeddings(), BlockEmbedding)
    assert sum(weight.numel() for weight in ours.model.parameters()) < 64 * 64, "norms alone"
    # A long pass is unpacked and exact; of a short one inputs are rounded to 8 bits.
    assert (logits(ours.model, LONG) - logits(theirs, LONG)).abs().max() < 1e-4
    short = logits(theirs, 5)
    assert 0 < (logits(ours.model, 5) - short).norm() < 0.02 * short.norm()
    assert (ours.config_hash, ours.tokenizer_hash) == (
        config_hash(AutoConfig.from_pretrained(file.parent, gguf_file=file.name)),
        tokenizer_hash(AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_unpacked_weights_are_those_of_transformers(made: Any, name: str, dtype: str) -> None:
    file = made(name)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = load(str(file), "cpu", dtype, "full")
    held = ours.model.state_dict()
    for weight, tensor in theirs.state_dict().items():
        assert torch.equal(held.pop(weight), tensor.to(getattr(torch, dtype))), weight
    assert not held
    if dtype == "float32":
        assert (logits(ours.model, 5) - logits(theirs, 5)).abs().max() < 1e-4
    assert ours.weights == "auto"
    assert ours.weights_hash == load(str(file), "cpu").weights_hash


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_forms_of_32_weights(made: Any, form: str) -> None:
    file = made("qwen2", form)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    assert (logits(load(str(file), "cpu", "float32").model, LONG) - logits(theirs, LONG)).abs().max() < 1e-4


def test_without_a_dtype_it_is_bfloat16(made: Any) -> None:
    loaded = load(str(made("gemma3")), "cpu")
    assert loaded.dtype == "bfloat16"
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}
    theirs = load(str(made("gemma3")), "cpu", weights="full")
    assert (logits(loaded.model, LONG) - logits(theirs.model, LONG)).norm() < 0.02 * logits(
        theirs.model, LONG
    ).norm()


def test_a_header_is_converted_once(made: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, asked = made("llama"), []
    convert = gguf_cache._convert
    monkeypatch.setattr(gguf_cache, "_convert", lambda *given: asked.append(given) or convert(*given))
    first = load(str(file), "cpu")
    monkeypatch.setattr(gguf_cache, "_known", {})  # another process
    again = load(str(file), "cpu")
    assert len(asked) == 1
    text = "The fox, it's 12 é字 </s>\n"
    assert first.tokenizer.encode(text) == again.tokenizer.encode(text)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert theirs.encode(text) == again.tokenizer.encode(text)
    assert again.tokenizer_hash == tokenizer_hash(again.tokenizer)


def test_transformers_reads_a_header_as_plain_arrays(
    made: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slices of a mapped one cost four times as much, and there are a million."""
    kinds = []

    class Watched(gguf.GGUFReader):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            kinds.append(type(self.data))

    monkeypatch.setattr(gguf, "GGUFReader", Watched)
    converted(made("llama"))
    assert set(kinds) == {np.ndarray}
    assert gguf.GGUFReader is Watched, "others get gguf's own again"


def test_a_copy_of_its_weights_is_told_why_it_cannot_open_the_store(made: Any, tmp_path: Path) -> None:
    file = made("llama")
    unpacked = load(str(file), "cpu", weights="full")
    for part in (unpacked.model, unpacked.tokenizer):
        part.save_pretrained(tmp_path / "copy")
    store = tmp_path / "store.kv"
    prefill_texts(load(str(file.parent), "cpu"), [TextDocument("text", "Some words. " * 9)], store)
    assert Engine.open(store).loaded.model_id == str(file), "a folder stands for the file in it"
    with pytest.raises(
        StoreMismatch, match=r"\.gguf, which is a GGUF file, and .*/copy is not: a GGUF file is known"
    ):
        Engine.open(store, str(tmp_path / "copy"))
    other = tmp_path / "other.kv"
    prefill_texts(load(str(tmp_path / "copy"), "cpu"), [TextDocument("text", "Some words. " * 9)], other)
    with pytest.raises(StoreMismatch, match=r"/copy, which is not a GGUF file, and .*\.gguf is: a"):
        Engine.open(other, str(file))


@pytest.mark.parametrize("how", ["no folder", "full"])
def test_a_cache_that_cannot_be_written_is_done_without(
    made: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The header is converted once a process, and a warning says that this comes again."""
    asked, convert = [], gguf_cache._convert
    monkeypatch.setattr(gguf_cache, "_convert", lambda *given: asked.append(given) or convert(*given))
    if how == "full":

        def full(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(shutil, "copyfile", full)
    else:
        empty_cache.write_text("no folder")
    why = os.strerror({"full": errno.ENOSPC, "no folder": errno.ENOTDIR}[how])
    with pytest.warns(
        OffloadDecodeWarning, match=rf"cannot be kept in .*gguf \({why}\), so that every command"
    ):
        loaded = load(str(made("llama")), "cpu")
    assert loaded.tokenizer.encode("ab")
    assert len(asked) == 1
    assert not list(headers_folder().glob("*"))


def test_two_commands_convert_one_file_at_once(made: Any, empty_cache: Path) -> None:
    code = (
        f"from offload_decode.models.loading import load\nprint(load({str(made('llama'))!r}, 'cpu').model_id)"
    )
    asked = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [one.communicate(timeout=120)[0].strip() for one in asked] == [str(made("llama"))] * 2
    (kept,) = headers_folder().iterdir()
    assert gguf_cache._whole(kept)


def test_no_more_headers_are_kept_than_so_many(
    made: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gguf_cache, "KEPT", 2)
    for number in range(4):
        converted(Path(shutil.copy(made("llama"), tmp_path / f"{number}.gguf")))
    kept = [path.name for path in headers_folder().iterdir()]
    assert len(kept) == 2
    assert not [name for name in kept if name.startswith(".")]


def test_a_file_whose_tensors_lie_beyond_its_end_is_refused(
    made: Any, empty_cache: Path, tmp_path: Path
) -> None:
    whole = made("llama")
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole.read_bytes())
    folder = converted(file).folder
    record = json.loads((folder / "gguf.json").read_text())
    name = record["names"]["model.layers.0.mlp.up_proj.weight"]
    record["tensors"][name][2] = file.stat().st_size - 10
    (folder / "gguf.json").write_text(json.dumps(record))
    gguf_cache._known.clear()
    with pytest.raises(ModelError, match="cut off"):
        load(str(file), "cpu")


@pytest.mark.parametrize(("name", "form", "whole"), [("gemma2", "F16", False), ("gemma2", "Q8_0", True)])
def test_an_output_that_shares_a_table_without_blocks_stays_with_it(
    tmp_path: Path, name: str, form: str, whole: bool
) -> None:
    file = few_bits.gguf(tmp_path / "made", name, form, whole_table=whole)
    theirs = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    ours = load(str(file), "cpu", "float32").model
    assert (logits(ours, LONG) - logits(theirs, LONG)).abs().max() < 1e-4
    assert ours.get_output_embeddings().weight is ours.get_input_embeddings().weight


def test_a_view_of_several_rows_is_multiplied_too(made: Any) -> None:
    loaded = load(str(made("llama")), "cpu", "float32")
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    together = loaded.model(input_ids=ids, logits_to_keep=1).logits  # gradients are off in such a model
    apart = torch.cat([loaded.model(input_ids=row[None], logits_to_keep=1).logits for row in ids])
    assert (together - apart).abs().max() < 1e-4
    with pytest.raises(IndexError):
        loaded.model(input_ids=-ids)


def test_tensors_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    file = few_bits.gguf(tmp_path / "made", tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)})
    with pytest.raises(
        ModelError, match=r"holds 1 tensors that transformers does not read, blk.0.attn_q.bias"
    ):
        load(str(file), "cpu")


def test_a_special_token_that_the_vocabulary_lacks_is_named(made: Any, tmp_path: Path) -> None:
    whole, key = made("llama").read_bytes(), b"tokenizer.ggml.eos_token_id"
    at = whole.index(key) + len(key) + 4  # behind the type of the number
    file = tmp_path / "odd.gguf"
    file.write_bytes(whole[:at] + (999_999).to_bytes(4, "little") + whole[at + 4 :])
    with pytest.raises(ModelError, match=r"names token 999999 as its eos_token_id, and has \d+ tokens"):
        load(str(file), "cpu")


def test_scaling_that_a_header_states_is_done(tmp_path: Path) -> None:
    from gguf import RopeScalingType

    told = {"rope_scaling_type": RopeScalingType.YARN, "rope_scaling_factor": 4.0}
    file = few_bits.gguf(tmp_path / "yarn", "qwen2", **told, rope_scaling_orig_ctx_len=1024)
    rope = load(str(file), "cpu").rope
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["original_max_position_embeddings"] == 1024
    other = few_bits.gguf(tmp_path / "other", "qwen2", **told, rope_scaling_yarn_beta_fast=8.0)
    with pytest.raises(ModelError, match=r"its RoPE is scaled with yarn_beta_fast=8\.0"):
        load(str(other), "cpu")
    odd = few_bits.gguf(tmp_path / "odd", "qwen2", rope_scaling_type=RopeScalingType.LONGROPE)
    with pytest.raises(ModelError, match="its RoPE is scaled by 'longrope'"):
        load(str(odd), "cpu")


@pytest.mark.parametrize("field", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_alone_is_of_linear_scaling(tmp_path: Path, field: str) -> None:
    """As older converters state it."""
    file = few_bits.gguf(tmp_path / "made", "qwen2", float32=(f"qwen2.{field}", 4.0))
    rope = load(str(file), "cpu").rope
    assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)
    file = few_bits.gguf(tmp_path / "one", "qwen2", float32=(f"qwen2.{field}", 1.0))
    assert load(str(file), "cpu").rope.get("rope_type", "default") == "default"
    file = few_bits.gguf(tmp_path / "none", "qwen2", float32=(f"qwen2.{field}", 0.0))
    assert load(str(file), "cpu").rope.get("rope_type", "default") == "default"
    for number, odd in enumerate([-2.0, float("nan"), float("inf")]):
        file = few_bits.gguf(tmp_path / f"odd{number}", "qwen2", float32=(f"qwen2.{field}", odd))
        with pytest.raises(ModelError, match="its RoPE is scaled by 'linear'"):
            load(str(file), "cpu")


def test_llama_3_is_known_by_its_frequencies(tmp_path: Path) -> None:
    """By the formula of its makers: long waves are divided by the factor, short ones are not."""
    waves = 2 * np.pi * 500000.0 ** (np.arange(8) / 8)
    smooth = np.clip((8192 / waves - 1) / 3, 0, 1)
    divisors = (1 / (smooth + (1 - smooth) / 8)).astype(np.float32)
    file = few_bits.gguf(tmp_path / "a", tensors={"rope_freqs.weight": divisors}, rope_freq_base=5e5)
    rope = load(str(file), "cpu").rope
    assert (rope["rope_type"], rope["factor"], rope["high_freq_factor"]) == ("llama3", 8.0, 4.0)
    divisors[0] = 2  # a short wave
    odd = few_bits.gguf(tmp_path / "b", tensors={"rope_freqs.weight": divisors}, rope_freq_base=5e5)
    with pytest.raises(ModelError, match="scales its RoPE in a way of its own"):
        load(str(odd), "cpu")


@pytest.mark.parametrize("damage", ["gguf.json", "tokenizer.json", "config.json"])
def test_what_was_kept_in_part_is_made_again(
    made: Any, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    file, asked = made("llama"), []
    convert = gguf_cache._convert
    monkeypatch.setattr(gguf_cache, "_convert", lambda *given: asked.append(given) or convert(*given))
    folder = converted(file).folder
    (folder / damage).write_text("")
    for _ in range(2):
        monkeypatch.setattr(gguf_cache, "_known", {})
        assert load(str(file), "cpu").tokenizer.encode("ab")
    assert len(asked) == 2
    shutil.rmtree(folder)  # somebody clears the cache beside this process
    assert load(str(file), "cpu").tokenizer.encode("ab")
    assert len(asked) == 3


def test_a_file_without_known_blocks_is_planned_unpacked(tmp_path: Path) -> None:
    file = few_bits.gguf(tmp_path / "made", form="BF16")
    assert estimate_size(str(file)).packed == 2 * estimate_size(str(file)).parameters
