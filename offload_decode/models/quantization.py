"""Quantization: of checkpoints as they are published, or of whole weights as they are loaded.

A published format runs packed, or its weights are widened to the model's dtype as they are read. Whole
weights are quantized for a CPU to GGUF's blocks (`block_layers.quantize`), and for a GPU by bitsandbytes: the
linear layers alone, while embeddings, norms and the output layer stay as they are. Its int8 is LLM.int8()
(arXiv 2208.07339), a scale for every output row; its int4 is NF4 with quantized scales (QLoRA, arXiv
2305.14314).
"""

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from offload_decode.common.errors import ConfigError, ModelError, UnsupportedModel
from offload_decode.common.memory import give_back
from offload_decode.common.slow_work import SlowWork
from offload_decode.config import FULL, STREAMED

_QUANT = "'offload-decode[quant]'"
FEW_BITS = ("int8", "int4")
WEIGHTS = ("auto", FULL, STREAMED, *FEW_BITS)
BLOCK = 64
"""Weights that share a scale in int4: a row holds whole blocks."""
_ROWS = 32
"""Rows that bitsandbytes multiplies at a time in int4 on processors with bf16: a layer needs whole groups."""
_OUTLIER = 6.0  # larger inputs are multiplied unquantized: LLM.int8()'s own threshold


@dataclass(frozen=True)
class Format:
    """A published format: modules it `needs`, what to `install`, and where it runs packed (`packed_on`)."""

    name: str
    needs: tuple[str, ...]
    install: str
    packed_on: frozenset[str]


_NONE, _GPU, _EVERYWHERE = frozenset[str](), frozenset({"gpu"}), frozenset({"cpu", "gpu"})
GGUF = "gguf"
# By `quant_method`, as a config.json names it.
FORMATS = {
    "awq": Format("AWQ", ("gptqmodel",), "gptqmodel", _EVERYWHERE),
    "bitnet": Format("BitNet", (), "", _EVERYWHERE),
    "bitsandbytes": Format("bitsandbytes", ("bitsandbytes",), _QUANT, _EVERYWHERE),
    "compressed-tensors": Format("compressed-tensors", ("compressed_tensors",), _QUANT, _NONE),
    "fp8": Format("FP8", (), "", _GPU),
    "gptq": Format("GPTQ", ("gptqmodel", "optimum"), "gptqmodel optimum", _EVERYWHERE),
    "mxfp4": Format("MXFP4", (), "", _GPU),
    "torchao": Format("torchao", ("torchao",), "torchao", _EVERYWHERE),
    GGUF: Format("GGUF", (), "", frozenset({"cpu"})),
}
# What a GPU must have to run these packed: the least compute capability, and modules.
_ON_GPU = {"fp8": ((8, 9), ("kernels",)), "mxfp4": ((7, 5), ("kernels", "triton"))}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """A config's quantization as plain values; None for a checkpoint of whole weights.

    Raises `UnsupportedModel` for a method that is none of `FORMATS`.
    """
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if found is None:
        return None
    fields: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    if fields.get("load_in_4bit") or fields.get("load_in_8bit"):  # older ones name no method
        return fields | {"quant_method": "bitsandbytes"}
    method = fields.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS or method == GGUF:
        raise UnsupportedModel(
            f"the checkpoint's weights are quantized by '{str(method)[:40]}', which is not served; served "
            f"are: {', '.join(name for name in FORMATS if name != GGUF)}, and GGUF files"
        )
    return fields


def check_packages(method: str) -> None:
    """`ModelError` where a module that a format needs is not installed."""
    form = FORMATS[method]
    if missing := [name for name in form.needs if find_spec(name) is None]:
        raise ModelError(
            f"the checkpoint's weights are in {form.name}, and reading them needs {' and '.join(missing)}: "
            f"pip install {form.install}"
        )


def check_weights_of(method: str, weights: str) -> None:
    """`ConfigError` for `--weights` of a quantized checkpoint; GGUF is widened, and takes them."""
    if method and method != GGUF and weights not in ("auto", FULL):
        raise ConfigError(
            f"weights {weights} are for checkpoints of whole weights, and this one's are in few bits already "
            f"({FORMATS[method].name}): leave --weights out"
        )


def runs_packed(method: str, on_gpu: bool) -> bool:
    """Whether the weights stay packed there. A GPU that is not here is assumed to be new enough."""
    if ("gpu" if on_gpu else "cpu") not in FORMATS[method].packed_on:
        return False
    if not on_gpu or method not in _ON_GPU or not torch.cuda.is_available():
        return True
    capability, modules = _ON_GPU[method]
    return torch.cuda.get_device_capability() >= capability and all(map(find_spec, modules))


def reading(quantization: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a quantized checkpoint."""
    import transformers

    arguments: dict[str, Any] = {"device_map": {"": device}}
    widening = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}.get(quantization["quant_method"])
    if widening and not runs_packed(quantization["quant_method"], device.type == "cuda"):
        arguments["quantization_config"] = getattr(transformers, widening)(dequantize=True)
    return arguments


def in_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert the weights that are not packed; rotary frequencies stay as they are."""
    before = model.dtype
    for weight in model.parameters():
        if weight.dtype == before != dtype:
            weight.data = weight.data.to(dtype)


def run_once(model: Any) -> None:
    """Run one token: a missing kernel fails now, and weights that are unpacked at first use are."""
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Suppress the output of the formats' libraries."""
    from transformers import utils

    _quieten_bitsandbytes()
    before = utils.logging.get_verbosity()
    utils.logging.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        utils.logging.set_verbosity(before)


def _quieten_bitsandbytes() -> None:
    """It warns at every layer of every step that int8 rounds its inputs."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def check_weights(weights: str) -> None:
    """ConfigError for a name that is none of `WEIGHTS`."""
    if weights not in WEIGHTS:
        raise ConfigError(f"unknown weights '{weights}'; choose one of: {', '.join(WEIGHTS)}")


def check_quantizer(weights: str, device: torch.device) -> None:
    """ConfigError where the library that quantizes whole weights for a device is missing."""
    if weights in FEW_BITS and device.type != "cpu" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"weights in int8 or int4 need bitsandbytes: pip install {_QUANT}, or leave --weights out"
        )


def replaceable(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """Linear layers of whole blocks but for the output layer: parent, name in it, layer."""
    output = model.get_output_embeddings()
    for parent in model.modules():
        for name, layer in parent.named_children():
            plain = type(layer) is torch.nn.Linear and layer is not output
            if plain and layer.in_features % BLOCK == 0 and layer.out_features % _ROWS == 0:
                yield parent, name, layer


def quantize_on_gpu(model: Any, weights: str, device: torch.device) -> Any:
    """Put `model`, which is on the CPU, on a GPU with its linear layers' weights in `weights`.

    Layer by layer, so that the device never holds a whole unquantized model; nor does the host, where the
    weights are memory-mapped.
    """
    layers = list(replaceable(model))
    work = SlowWork(
        f"quantizing the weights to {weights}", sum(layer.weight.nbytes for _, _, layer in layers)
    )
    for parent, name, layer in layers:
        setattr(parent, name, packed(layer, weights).to(device))
        work.add(layer.weight.nbytes)
    give_back()
    return model.to(device)


def packed(layer: Any, weights: str) -> Any:
    """A linear layer on the CPU that is quantized once it is sent to its device."""
    import bitsandbytes

    nn: Any = bitsandbytes.nn
    _quieten_bitsandbytes()
    weight = layer.weight.detach()
    shape = layer.in_features, layer.out_features, layer.bias is not None
    nf4 = {"quant_type": "nf4", "compress_statistics": True}
    with torch.device("meta"):
        if weights == "int8":
            made = nn.Linear8bitLt(*shape, has_fp16_weights=False, threshold=_OUTLIER)
        else:
            made = nn.Linear4bit(*shape, compute_dtype=weight.dtype, **nf4)
    if weights == "int8":
        made.weight = nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    else:
        made.weight = nn.Params4bit(weight, requires_grad=False, module=made, **nf4)
    made.bias = layer.bias
    return made.requires_grad_(False)
