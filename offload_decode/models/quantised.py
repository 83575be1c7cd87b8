"""Weights in few bits, by bitsandbytes: the linear layers' alone, so that embeddings, norms and the output
layer stay as they are.

int8 is LLM.int8() (arXiv 2208.07339), a scale for every output row; int4 is NF4 with quantised scales
(QLoRA, arXiv 2305.14314). Both are there for CPUs and CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch

from offload_decode.config import STREAMED
from offload_decode.errors import ConfigError
from offload_decode.memory import give_back

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
