"""Checkpoints in few bits, as they are published: prefilled and asked as they are, with fingerprints of their
own, or refused in one sentence.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load as read_tensors
from safetensors.torch import load_file, save_file

from offload_decode.common.errors import ConfigError, ModelError, StoreMismatch, UnsupportedModel
from offload_decode.engine.engine import Engine
from offload_decode.models import quantization
from offload_decode.models.block_layers import BlockLinear
from offload_decode.models.fingerprints import weights_hash
from offload_decode.models.loading import load, wrap
from offload_decode.models.size_estimate import estimate_size
from offload_decode.planning import sizes
from offload_decode.planning.plan import Machine, plan
from offload_decode.planning.proposals import nearest, nearest_prefill
from offload_decode.planning.workload import Workload
from offload_decode.prefill_jobs.job import Settings, prefill
from tests.models import few_bits

QUESTION = "What is the colour of thing 7?"
CORPUS = "".join(f"Thing {n} has the colour {n * n}.\n" for n in range(12))
NF4 = partial(few_bits.bitsandbytes, load_in_4bit=True, bnb_4bit_quant_type="nf4")
MADE: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "bitsandbytes-4": (NF4, ("bitsandbytes",)),
    "bitsandbytes-4-twice": (partial(NF4, bnb_4bit_use_double_quant=True), ("bitsandbytes",)),
    "bitsandbytes-8": (partial(few_bits.bitsandbytes, load_in_8bit=True), ("bitsandbytes",)),
    "fp8": (few_bits.fp8, ()),
    "mxfp4": (few_bits.mxfp4, ()),
    "compressed-tensors": (few_bits.compressed, ("compressed_tensors",)),
    "bitnet": (few_bits.bitnet, ()),
    "gguf": (few_bits.gguf, ()),
    "gptq": (few_bits.gptq, ("optimum", "gptqmodel")),
    "awq": (few_bits.awq, ("gptqmodel",)),
    "torchao": (few_bits.torchao, ("torchao",)),
}
PACKED_ALREADY = [kind for kind in MADE if kind != "gguf"]

# torch compiles BitNet's layers when they first run.
KINDS = [pytest.param(kind, marks=[pytest.mark.slow] if kind == "bitnet" else []) for kind in MADE]
IN_BF16 = {"bitsandbytes-4": 0.02, "bitsandbytes-4-twice": 0.02}
ROUNDED = {"bitsandbytes-8": 0.1, "bitnet": 0.1, "gguf": 0.02, **IN_BF16}
"""They round their inputs too, to 8 bits or, on processors that multiply in bf16, to that; what is near then
turns either way. By how much, of the length of the logits.
"""
_NAMES = ("v_proj.weight", "v_proj.qweight", "v_proj.weight_packed", "v_proj._weight_qdata")
PACKED = (*_NAMES, "down_proj_blocks")


Made = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A checkpoint of a kind, for reading only; skips where its packages are not installed."""
    home = tmp_path_factory.mktemp("few-bits")

    @cache
    def make(kind: str) -> Path:
        build, needs = MADE[kind]
        for name in needs:
            pytest.importorskip(name)
        return build(home / kind)

    return make


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text(CORPUS)
    return file


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_stored_prefix_it_equals_plain_generation(made: Made, corpus: Path, kind, tmp_path) -> None:
    model, store = str(made(kind)), tmp_path / "s.kv"
    run = {"device": "cpu", "dtype": "float32"}
    prefill(str(corpus), model=model, out=store, settings=Settings(options={"chunk": 64}), **run)
    engine = Engine.open(store, device="cpu", selector="dense")
    question = torch.tensor([engine.question_tokens(QUESTION)])
    answer = engine.answer(QUESTION, max_new_tokens=6)
    logits = engine.ask(QUESTION)

    stored = torch.from_numpy(engine.store.tokens.astype("int64"))[None]
    prompt = torch.cat([stored, question], 1)
    theirs = transformers_own(Path(model))
    with torch.inference_mode():
        expected = theirs(prompt).logits[0, -1]
        generated = theirs.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
    if kind in ROUNDED and (kind not in IN_BF16 or few_bits.int4_rounds()):
        assert (logits - expected).norm() < ROUNDED[kind] * expected.norm()
        return
    assert (logits - expected).abs().max() < 1e-4
    assert list(answer.tokens) == generated[0, prompt.shape[1] :].tolist()


def transformers_own(path: Path) -> Any:
    """The checkpoint in float32, as transformers reads it without this project."""
    from transformers import AutoModelForCausalLM

    if path.suffix == ".gguf":
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"})
    if getattr(model.config, "quantization_config", None) is None:  # widened
        return model.float()
    return AutoModelForCausalLM.from_pretrained(path, device_map={"": "cpu"}, dtype=torch.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_its_fingerprint_is_its_own_and_stable(made: Made, kind: str, tmp_path: Path) -> None:
    folder = made(kind)
    first, second = (load(str(folder), "cpu", dtype) for dtype in ("float32", "bfloat16"))
    assert first.weights_hash == second.weights_hash, "whatever it is widened to"
    assert (first.dtype, second.dtype) == ("float32", "bfloat16")
    assert first.config_hash == second.config_hash
    whole = few_bits.plain(tmp_path / "whole", "gpt-oss" if kind == "mxfp4" else "llama")
    assert load(str(whole), "cpu").weights_hash != first.weights_hash
    if kind == "gguf":
        return
    copied = shutil.copytree(folder, tmp_path / "copied")
    file = copied / "model.safetensors"
    with safe_open(file, "pt") as held:
        said = held.metadata()
    tensors = read_tensors(file.read_bytes())
    packed = next(tensor for name, tensor in tensors.items() if name.endswith(PACKED))
    packed.view(torch.uint8).view(-1)[0] ^= 1
    save_file(tensors, file, metadata=said)
    assert load(str(copied), "cpu").weights_hash != first.weights_hash


def test_a_store_of_whole_weights_is_not_one_of_few_bits(made: Made, corpus: Path, tmp_path: Path) -> None:
    whole = few_bits.plain(tmp_path / "whole")
    prefill(str(corpus), model=str(whole), out=tmp_path / "s.kv", device="cpu")
    with pytest.raises(StoreMismatch, match="other weights"):
        Engine.open(tmp_path / "s.kv", model=str(made("bitsandbytes-4")), device="cpu")


@pytest.mark.parametrize("kind", PACKED_ALREADY)
def test_weights_in_fewer_bits_are_for_whole_ones(made: Made, kind: str) -> None:
    folder = str(made(kind))
    with pytest.raises(ConfigError, match=r"in few bits already \(.*\): leave --weights out$"):
        load(folder, "cpu", weights="int8")
    with pytest.raises(ConfigError, match="in few bits already"):
        plan(estimate_size(folder), Workload(1024, weights="int4"), Machine(None, 1 << 34, 1 << 34, 0))


def test_gguf_is_widened_and_takes_them(made: Made) -> None:
    file = str(made("gguf"))
    small, whole = load(file, "cpu", weights="int4"), load(file, "cpu")
    assert small.weights_hash == whole.weights_hash
    blocks = [layer for layer in small.model.model.layers.modules() if isinstance(layer, BlockLinear)]
    assert {layer.kind for layer in blocks} == {3}, "Q4_1"


@pytest.mark.parametrize("kind", PACKED_ALREADY)
def test_its_bytes_are_counted_from_its_config(made: Made, kind: str) -> None:
    folder = made(kind)
    found = estimate_size(str(folder))
    family = "gpt-oss" if kind == "mxfp4" else "llama"
    whole = estimate_size(str(few_bits.plain(folder.with_name(f"{kind}-counted"), family)))
    assert (found.parameters, found.shape) == (whole.parameters, whole.shape)
    weights = load_file(folder / "model.safetensors")
    held = sum(tensor.nbytes for tensor in weights.values())
    tables = 4 * (16 + 256) * sum(name.endswith("quant_map") for name in weights)
    assert found.packed == pytest.approx(held - tables / 2, rel=0.06)
    in_bits = found.runs_packed(on_gpu=False)
    assert in_bits == (kind.partition("-")[0] not in ("fp8", "mxfp4", "compressed"))
    counted = sizes.weights_bytes(found, "auto")
    assert counted == (found.packed if in_bits else found.parameters * sizes.itemsize(found.dtype))


def test_weights_that_are_unpacked_as_they_are_read_are_counted_so(tmp_path: Path) -> None:
    folder = few_bits.bitnet(tmp_path / "bitnet", "autobitlinear")
    found = estimate_size(str(folder))
    assert not found.runs_packed(on_gpu=False)
    assert sizes.weights_bytes(found, "auto") == found.parameters * 2


def test_nothing_in_fewer_bits_is_proposed_for_it(made: Made) -> None:
    found = estimate_size(str(made("bitsandbytes-4")))
    tight = plan(found, Workload(1024), Machine(None, 1 << 20, 1 << 30, 0))
    assert not tight.fits
    assert nearest(tight) is nearest_prefill(tight) is None


@pytest.mark.parametrize(
    ("kind", "missing", "install"),
    [
        ("compressed-tensors", "compressed_tensors", r"'offload-decode\[quant\]'"),
        ("gptq", "gptqmodel", "gptqmodel optimum"),
        ("awq", "gptqmodel", "gptqmodel"),
        ("torchao", "torchao", "torchao"),
        ("bitsandbytes", "bitsandbytes", r"'offload-decode\[quant\]'"),
    ],
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch, kind: str, missing: str, install) -> None:
    monkeypatch.setattr(quantization, "find_spec", lambda name: None if name == missing else object())
    stated = {"quant_method": kind, "bits": 4, "load_in_4bit": kind == "bitsandbytes"}
    folder = few_bits.state(few_bits.plain(tmp_path / "model"), stated)
    with pytest.raises(ModelError, match=f"reading them needs {missing}: pip install {install}$"):
        load(str(folder), "cpu")


@pytest.mark.parametrize("method", ["hqq", "unheard of", "gguf", "", None, 7, ["fp8"]])
def test_a_format_that_is_not_served_is_refused_by_name(tmp_path: Path, method: Any) -> None:
    folder = few_bits.state(few_bits.plain(tmp_path / "model"), {"quant_method": method})
    for read in (lambda: estimate_size(str(folder)), lambda: load(str(folder), "cpu")):
        with pytest.raises(UnsupportedModel, match="which is not served; served are: awq, ") as raised:
            read()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("stated", [7, "fp8", [], ["fp8"]])
def test_a_quantization_that_is_no_object_is_refused(tmp_path: Path, stated: Any) -> None:
    few_bits.state(few_bits.plain(tmp_path / "model"), stated)
    with pytest.raises(ModelError):
        load(str(tmp_path / "model"), "cpu")


def test_whole_weights_that_are_said_to_be_fp8_are_refused(made: Made, tmp_path: Path) -> None:
    folder = shutil.copytree(made("fp8"), tmp_path / "fp8")
    weights = load_file(folder / "model.safetensors")
    whole = {name: weight.half() for name, weight in weights.items() if not name.endswith("_scale_inv")}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="says that its weights are FP8, and they have no scales"):
        load(str(folder), "cpu")


def test_fp8_that_is_not_of_whole_blocks_is_refused(made: Made, tmp_path: Path) -> None:
    """Of 64 rows, two blocks of 48: transformers would take each scale for 32 of them."""
    folder = shutil.copytree(made("fp8"), tmp_path / "fp8")
    stated = json.loads((folder / "config.json").read_text())["quantization_config"]
    few_bits.state(folder, stated | {"weight_block_size": [48, 48]})
    with pytest.raises(ModelError, match=r"is not of whole blocks, .* pip install kernels$"):
        load(str(folder), "cpu")


def test_a_quantized_model_in_memory_has_a_fingerprint(made: Made) -> None:
    pytest.importorskip("torchao")
    from transformers import AutoModelForCausalLM

    first, second = (AutoModelForCausalLM.from_pretrained(made("torchao")) for _ in range(2))
    assert weights_hash(first) == weights_hash(second)
    assert wrap(first).weights_hash != weights_hash(
        AutoModelForCausalLM.from_pretrained(few_bits.plain(made("torchao").with_name("other")))
    )
