"""Checkpoints in few bits, as they are published: what each format needs, and how transformers reads it.

A format runs packed, in its few bits, or its weights are widened to the model's dtype as they are read.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from offload_decode.common.errors import ConfigError, ModelError, UnsupportedModel
from offload_decode.common.memory import give_back
from offload_decode.config import STREAMED

_QUANT = "'offload-decode[quant]'"


@dataclass(frozen=True)
class Format:
    """`needs`: modules without which it is not read, and what to `install` for them. `packed_on`: where it
    runs in its few bits (`cpu`, `gpu`); elsewhere its weights are widened.
    """

    said: str
    needs: tuple[str, ...]
    install: str
    packed_on: frozenset[str]


_NOWHERE, _GPU, _EVERYWHERE = frozenset[str](), frozenset({"gpu"}), frozenset({"cpu", "gpu"})
GGUF = "gguf"
# By `quant_method`, as a config.json names it.
FORMATS = {
    "awq": Format("AWQ", ("accelerate", "gptqmodel"), "gptqmodel", _EVERYWHERE),
    "bitnet": Format("BitNet", ("accelerate",), _QUANT, _EVERYWHERE),
    "bitsandbytes": Format("bitsandbytes", ("accelerate", "bitsandbytes"), _QUANT, _EVERYWHERE),
    "compressed-tensors": Format(
        "compressed-tensors", ("accelerate", "compressed_tensors"), _QUANT, _NOWHERE
    ),
    "fp8": Format("FP8", ("accelerate",), _QUANT, _GPU),
    "gptq": Format("GPTQ", ("accelerate", "gptqmodel", "optimum"), "gptqmodel optimum", _EVERYWHERE),
    "mxfp4": Format("MXFP4", ("accelerate",), _QUANT, _GPU),
    "torchao": Format("torchao", ("accelerate", "torchao"), "accelerate torchao", _EVERYWHERE),
    GGUF: Format("GGUF", ("accelerate", "gguf"), _QUANT, _NOWHERE),
}
# What a GPU must have to run these packed: the least compute capability, and modules.
_ON_GPU = {"fp8": ((8, 9), ("kernels",)), "mxfp4": ((7, 5), ("kernels", "triton"))}


def quantization_of(config: Any) -> dict[str, Any] | None:
    """What a config says of its quantised weights, as plain values; None for a checkpoint of whole weights.

    Raises `UnsupportedModel` for a method that is none of `FORMATS`.
    """
    stated = getattr(config, "quantization_config", None)
    if stated is None:
        stated = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if stated is None:
        return None
    stated = stated if isinstance(stated, dict) else stated.to_dict()
    if stated.get("load_in_4bit") or stated.get("load_in_8bit"):  # older ones name no method
        return stated | {"quant_method": "bitsandbytes"}
    method = stated.get("quant_method")
    if not isinstance(method, str) or method not in FORMATS or method == GGUF:
        raise UnsupportedModel(
            f"the checkpoint's weights are quantised by '{str(method)[:40]}', which is not served; served "
            f"are: {', '.join(name for name in FORMATS if name != GGUF)}, and GGUF files"
        )
    return stated


def unquantised(config: Any) -> Any:
    """A copy of a config that says nothing of quantised weights: of the same model in whole ones."""
    plain = copy.deepcopy(config)
    for one in (plain, plain.get_text_config(decoder=True)):
        if hasattr(one, "quantization_config"):
            del one.quantization_config
    return plain


def check_packages(method: str) -> None:
    """`ModelError` where what a format needs is not installed."""
    form = FORMATS[method]
    if missing := [name for name in form.needs if find_spec(name) is None]:
        raise ModelError(
            f"the checkpoint's weights are in {form.said}, and reading them needs {' and '.join(missing)}: "
            f"pip install {form.install}"
        )


def check_weights_of(method: str, weights: str) -> None:
    """`ConfigError` for `--weights` of a checkpoint in few bits; GGUF is widened, so that it takes them."""
    if method and method != GGUF and weights not in ("auto", "full"):
        raise ConfigError(
            f"weights {weights} are for checkpoints of whole weights, and this one's are in few bits already "
            f"({FORMATS[method].said}): leave --weights out"
        )


def runs_packed(method: str, on_gpu: bool) -> bool:
    """Whether the weights stay in their few bits there. A GPU that is not here is taken to be new enough."""
    if ("gpu" if on_gpu else "cpu") not in FORMATS[method].packed_on:
        return False
    if not on_gpu or method not in _ON_GPU or not torch.cuda.is_available():
        return True
    capability, modules = _ON_GPU[method]
    return torch.cuda.get_device_capability() >= capability and all(map(find_spec, modules))


def reading(quantization: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is to be told beside the folder."""
    import transformers

    told: dict[str, Any] = {"device_map": {"": device}}
    widening = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}.get(quantization["quant_method"])
    if widening and not runs_packed(quantization["quant_method"], device.type == "cuda"):
        told["quantization_config"] = getattr(transformers, widening)(dequantize=True)
    return told


def in_dtype(model: Any, dtype: torch.dtype) -> None:
    """Bring what is not packed to another dtype; rotary frequencies stay as they are."""
    own = model.dtype
    for weight in model.parameters():
        if weight.dtype == own != dtype:
            weight.data = weight.data.to(dtype)


def run_once(model: Any) -> None:
    """One token through a model: what its format lacks shows now, and what is unpacked at first use is."""
    with torch.inference_mode():
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keep what the formats' libraries print out of answers and of progress."""
    from transformers.utils import logging as theirs

    # It says at every layer of every step that int8 rounds its inputs.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    before = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        theirs.set_verbosity(before)


# Weights in few bits, by bitsandbytes: the linear layers' alone, so that embeddings, norms and the output
# layer stay as they are.
#
# int8 is LLM.int8() (arXiv 2208.07339), a scale for every output row; int4 is NF4 with quantised scales
# (QLoRA, arXiv 2305.14314). Both are there for CPUs and CUDA.

WEIGHTS = ("auto", STREAMED, "int8", "int4")
BLOCK = 64
"""Weights that share a scale in int4: a row holds whole blocks."""
_ROWS = 32
"""Rows that int4 multiplies at a time on processors with bf16: bitsandbytes cannot do with a part of them."""
_OUTLIER = 6.0  # inputs beyond it are multiplied unquantised: LLM.int8()'s own threshold


def check_weights(weights: str) -> None:
    """ConfigError for a name that is none of `WEIGHTS`, or where the library is missing."""
    if weights not in WEIGHTS:
        raise ConfigError(f"unknown weights '{weights}'; choose one of: {', '.join(WEIGHTS)}")
    if weights in ("int8", "int4"):
        _library()


def replaceable(model: Any) -> Iterator[tuple[Any, str, Any]]:
    """The linear layers but for the output layer and those of no whole blocks: parent, name in it, layer."""
    output = model.get_output_embeddings()
    for parent in model.modules():
        for name, layer in parent.named_children():
            plain = type(layer) is torch.nn.Linear and layer is not output
            whole = plain and layer.in_features % BLOCK == 0 and layer.out_features % _ROWS == 0
            if whole:
                yield parent, name, layer


def quantise(model: Any, weights: str, device: torch.device) -> Any:
    """Put `model`, which is on the CPU, on `device` with its linear layers' weights in `weights`.

    Layer by layer, so that the device never holds a whole unquantised model; nor does the host, where the
    weights are a map of their file.
    """
    library = _library()
    for parent, name, layer in list(replaceable(model)):
        setattr(parent, name, _taken(library, layer, weights).to(device))
    give_back()
    return model.to(device)


def _taken(library: Any, layer: Any, weights: str) -> Any:
    shape = {"input_features": layer.in_features, "output_features": layer.out_features}
    weight = layer.weight.detach()
    with torch.device("meta"):
        if weights == "int8":
            taken = library.nn.Linear8bitLt(
                **shape, bias=layer.bias is not None, has_fp16_weights=False, threshold=_OUTLIER
            )
        else:
            taken = library.nn.Linear4bit(
                **shape, bias=layer.bias is not None, compute_dtype=weight.dtype, quant_type="nf4"
            )
    taken.weight = (
        library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
        if weights == "int8"
        else library.nn.Params4bit(
            weight, requires_grad=False, quant_type="nf4", compress_statistics=True, module=taken
        )
    )
    taken.bias = layer.bias
    return taken.requires_grad_(False)


def _library() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            "weights in int8 or int4 need bitsandbytes: pip install 'offload-decode[quant]', "
            "or leave --weights out"
        ) from error
    # It says at every layer of every step that int8 rounds its inputs.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return bitsandbytes
