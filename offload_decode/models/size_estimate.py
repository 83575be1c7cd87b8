"""The size estimate of a model without its weights: read from its config, counted on torch's meta device."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, get_type_hints

import torch

from offload_decode.attention.transfers import power_of_two
from offload_decode.hf.compat import DTYPES, stored_dtype
from offload_decode.hf.meta_device import Unfilled
from offload_decode.hf.positions import NO_LENGTHS, Lengths, lengths_of
from offload_decode.hf.rope_scaling import UNKNOWN, Trained, trained_of
from offload_decode.hf.shape import text_config, text_model
from offload_decode.hf.user_cache import cached
from offload_decode.models.checkpoint import CONFIG, bounded, model_errors, read_config, source_of
from offload_decode.models.gguf import SUFFIX
from offload_decode.models.gguf_cache import ARCHITECTURES, converted
from offload_decode.models.layer_streaming import layers_of
from offload_decode.models.quantization import GGUF, check_packages, quantization_of, replaceable, runs_packed
from offload_decode.store.format import FORMAT_VERSION, shape_from
from offload_decode.types import ModelShape

_FORM = 7
"""Version of a cached estimate."""
_LONGEST = 256  # characters of a pattern
_SKIPPED = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


def packed_bytes(model: Any, quantization: dict[str, Any], item: int) -> tuple[int, int]:
    """Bytes of all weights of a quantized checkpoint, and of the fused expert weights alone. `model` has
    whole weights, on any device; a number that is not packed takes `item` bytes. 0 where none stay packed.
    """
    if quantization.get("linear_class") == "autobitlinear":  # BitNet, unpacked as it is read
        return 0, 0
    total = experts = 0.0
    packed = {id(weight) for weight in _packed(model, quantization)}
    for weight in model.parameters():
        each = _bits(quantization, *weight.shape[-2:]) / 8 if id(weight) in packed else item
        size = weight.numel() * each
        total += size
        experts += size if weight.ndim == 3 else 0
    return round(total), round(experts)


def _packed(model: Any, quantization: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Weights that a format packs: linear layers but the output, and fused experts (MXFP4: these alone)."""
    method, output = quantization["quant_method"], model.get_output_embeddings()
    patterns = [name for field in _SKIPPED for name in quantization.get(field) or () if isinstance(name, str)]
    for name, module in model.named_modules():
        if module is output or any(_names(pattern, name) for pattern in patterns):
            continue
        if type(module) is torch.nn.Linear and method != "mxfp4":
            yield module.weight
        if method in ("mxfp4", "fp8"):
            yield from (weight for weight in module.parameters(recurse=False) if weight.ndim == 3)


def _names(pattern: str, name: str) -> bool:
    """Whether a pattern names a module: by its name, its start or end, or as a regular expression."""
    if name == pattern or name.endswith(f".{pattern}") or name.startswith(f"{pattern}."):
        return True
    try:
        return len(pattern) <= _LONGEST and bool(re.match(pattern.removeprefix("re:"), name))
    except re.error:
        return False


def _bits(quantization: dict[str, Any], rows: int, columns: int) -> float:
    """Bits of a weight of a matrix, with its part of the scales."""
    method = quantization["quant_method"]
    if method == "mxfp4":
        return 4 + 8 / 32
    if method == "bitnet":
        return 2.0
    if method == "fp8":
        block = quantization.get("weight_block_size") or (rows, columns)
        return 8 + 32 / (min(block[0], rows) * min(block[1], columns))
    if method == "bitsandbytes":
        if quantization.get("load_in_8bit"):
            return 8 + 32 / columns
        twice = quantization.get("bnb_4bit_use_double_quant")
        return 4 + (8 + 32 / 256 if twice else 32) / 64
    if method == "compressed-tensors":
        groups = [one["weights"] for one in quantization["config_groups"].values() if one.get("weights")]
        each = (one["num_bits"] + 16 / (one.get("group_size") or columns) for one in groups)
        return max(each, default=16.0)
    if method == "torchao":
        four = re.search("int4|fp4|float4", json.dumps(quantization.get("quant_type")), re.IGNORECASE)
        return 4 + 32 / 128 if four else 8 + 32 / columns
    bits, group = int(quantization.get("bits", 4)), int(quantization.get("group_size", 128))
    return bits + (16 + bits) / (group if group > 0 else columns)


@dataclass(frozen=True)
class SizeEstimate:
    """A model's shape and the sizes that memory and speed follow from.

    `dtype` is the checkpoint's. `parameters` counts all of them, `linear` those in the linear layers that a
    weight-only quantization packs, `linear_rows` these layers' outputs, `embeddings` those of a table that a
    token reads one row of, `experts` those in fused expert weights, of which a token reads the share
    `active`. `hidden`, `intermediate` and `vocabulary` are widths. Of the decoder layers `layered` counts the
    parameters, `layer` those of the largest one, and `pinned` those that pinned memory for each weight has
    room for, a power of two. `lengths`: of texts, at which the rotation changes; `trained`:
    for which the model was trained.
    `format`: of a quantized checkpoint (`models.quantization`), else empty; `packed` are the bytes of its
    weights (0 where they are always widened), `packed_experts` those of its fused expert weights among them.
    """

    model_id: str
    shape: ModelShape
    dtype: str
    parameters: int
    linear: int
    linear_rows: int
    embeddings: int
    experts: int
    active: float
    hidden: int
    intermediate: int
    vocabulary: int
    layered: int
    layer: int
    pinned: int
    format: str = ""
    packed: int = 0
    packed_experts: int = 0
    lengths: Lengths = NO_LENGTHS
    trained: Trained = UNKNOWN

    @property
    def output(self) -> int:
        """Parameters of an output layer that does not share the table of embeddings."""
        return self.vocabulary * self.hidden if self.embeddings else 0

    def runs_packed(self, on_gpu: bool) -> bool:
        """Whether the weights stay packed there."""
        return self.packed > 0 and runs_packed(self.format, on_gpu)


def estimate_size(model_id: str, rope: str = "") -> SizeEstimate:
    """The estimate of a shipped model, a folder, a .gguf file or a transformers id, its RoPE scaled as `rope`
    says (`hf.rope_scaling`); only the config is read.

    Counting parameters takes seconds of imports: the estimate of a folder or file is cached by its config's
    bytes. Raises `ConfigError`, `ModelError` or `UnsupportedModel`.
    """
    source = source_of(model_id)
    size = 0
    if source.endswith(SUFFIX):
        with model_errors(f"cannot read the config of '{model_id}'"):
            check_packages(GGUF)
            path, size = converted(Path(source)).folder / CONFIG, Path(source).stat().st_size
    else:
        path = Path(source) / CONFIG
    if not path.is_file():  # a transformers id, or an error that is raised below
        return _counted(model_id, rope)
    of = ["estimate", _FORM, rope, size, sha256(bounded(path)).hexdigest()]
    found = cached(
        of, lambda: _counted(model_id, rope), lambda it: [asdict(it.shape), *astuple(it)[2:]], _parsed
    )
    return replace(found, model_id=model_id)


def _parsed(stored: Any) -> SizeEstimate:
    """A cached estimate, without the name of its model; TypeError or ValueError for anything else."""
    shape, *numbers, (switches, grows, table), trained = stored
    lengths = Lengths(tuple(map(int, switches)), *(one and int(one) for one in (grows, table)))
    found = SizeEstimate("", shape_from(shape, FORMAT_VERSION, DTYPES), *numbers)
    found = replace(found, lengths=lengths, trained=Trained(*map(int, trained)))
    if any(type(getattr(found, name)) is not kind for name, kind in get_type_hints(SizeEstimate).items()):
        raise TypeError("not an estimate")
    return found


def _counted(model_id: str, rope: str) -> SizeEstimate:
    config, shape = read_config(model_id, rope)
    with model_errors(f"cannot read the config of '{model_id}'"):
        with Unfilled(), torch.device("meta"):
            model = text_model(text_config(config))
        found = replace(estimate_of(model, model_id, shape), trained=trained_of(config, rope))
        if (quantization := quantization_of(config)) is None:
            return _of_file(found, Path(source_of(model_id)))
        packed, experts = packed_bytes(model, quantization, DTYPES[found.dtype].itemsize)
    method = quantization["quant_method"]
    return replace(found, linear=0, linear_rows=0, format=method, packed=packed, packed_experts=experts)


def _of_file(found: SizeEstimate, source: Path) -> SizeEstimate:
    """Of a GGUF file, whose blocks are mapped as they are where its architecture is known."""
    if source.suffix != SUFFIX:
        return found
    from offload_decode.common.rows.ggml_blocks import FORMATS

    kept, packed = converted(source), 0
    if kept.architecture in ARCHITECTURES:
        for kind, shape, _ in kept.tensors.values():
            form = FORMATS.get(kind) if len(shape) == 2 else None
            numbers = math.prod(shape)
            packed += 2 * numbers if form is None else numbers // form.weights * form.bytes
    return replace(found, format=GGUF, dtype="bfloat16", packed=packed)


def estimate_of(model: Any, model_id: str, shape: ModelShape) -> SizeEstimate:
    """The estimate of a transformers model, on whatever device."""
    config = model.config
    linear = [layer for _, _, layer in replaceable(model)]
    weights = list(model.parameters())
    output = model.get_output_embeddings()
    table = model.get_input_embeddings().weight
    tied = output is not None and output.weight is table
    layers = layers_of(model)
    in_layers = list({weight for layer in layers for weight in layer.parameters()})
    intermediate = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0
    return SizeEstimate(
        model_id=model_id,
        shape=shape,
        dtype=stored_dtype(config.dtype or torch.float32),  # which transformers takes where none is stated
        parameters=sum(weight.numel() for weight in weights),
        linear=sum(layer.weight.numel() for layer in linear),
        linear_rows=sum(layer.out_features for layer in linear),
        embeddings=0 if tied else table.numel(),
        experts=sum(weight.numel() for weight in weights if weight.ndim == 3),
        active=min(1.0, getattr(config, "num_experts_per_tok", 1) / count) if count else 1.0,
        hidden=config.hidden_size,
        # The widest where layers differ, and what families that do not state it take.
        intermediate=int(max(intermediate) if isinstance(intermediate, list) else intermediate),
        vocabulary=config.vocab_size,
        layered=sum(weight.numel() for weight in in_layers),
        layer=max((sum(weight.numel() for weight in layer.parameters()) for layer in layers), default=0),
        pinned=sum(power_of_two(weight.numel()) for weight in in_layers),
        lengths=lengths_of(config, model.base_model),
    )
