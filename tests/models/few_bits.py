"""Tiny checkpoints in few bits, as they are published: of one model, packed by hand or by their libraries."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from tests.tiny import saved, text_model, tiny_tokenizer

GROUP = 32
SIZES = {"hidden_size": 64, "intermediate_size": 64, "initializer_range": 0.05}
_FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def plain(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """The whole weights, of rows that hold whole blocks."""
    return saved(text_model(family=family, **SIZES).to(dtype), folder)


def int4_rounds() -> bool:
    """Whether bitsandbytes rounds the inputs of int4 to bf16: on processors that multiply in it."""
    from bitsandbytes import functional

    return bool(functional.has_avx512bf16())


def bitsandbytes(folder: Path, **settings: Any) -> Path:
    """In 4 or 8 bits, by transformers itself."""
    from transformers import BitsAndBytesConfig

    return _by_transformers(folder, BitsAndBytesConfig(**settings), device_map={"": "cpu"})


def fp8(folder: Path) -> Path:
    """Fine-grained: a scale for each block of 32 by 32."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = (size // GROUP for size in weight.shape)
        blocks = weight.float().view(rows, GROUP, columns, GROUP)
        scales = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        return {name: packed, f"{name}_scale_inv": scales}

    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [GROUP, GROUP]}
    return _packed(plain(folder, dtype=torch.bfloat16), pack, stated)


def mxfp4(folder: Path) -> Path:
    """gpt-oss: the experts in blocks of 32 with a power of two for each."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.float().transpose(1, 2).unflatten(-1, (-1, GROUP))
        powers = blocks.abs().amax(-1).log2().floor() - 2
        codes = ((blocks / powers.exp2()[..., None])[..., None] - _FP4).abs().argmin(-1).to(torch.uint8)
        pairs = codes[..., 0::2] | codes[..., 1::2] << 4
        return {f"{name}_blocks": pairs.contiguous(), f"{name}_scales": (powers + 127).to(torch.uint8)}

    whole = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": whole}
    return _packed(plain(folder, "gpt-oss", torch.bfloat16), pack, stated, ("gate_up_proj", "down_proj"))


def compressed(folder: Path) -> Path:
    """compressed-tensors in 4 bits, packed, with a scale for each group of 32."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _codes(weight)
        of = name.removesuffix("weight")
        packed = {"packed": _joined(codes, range(8)), "scale": scales, "shape": torch.tensor(weight.shape)}
        return {f"{of}weight_{part}": own for part, own in packed.items()}

    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    stated = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    stated |= {"format": "pack-quantized", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return _packed(plain(folder), pack, stated)


def gptq(folder: Path) -> Path:
    """In 4 bits with a scale for each group of 32 inputs."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _codes(weight)
        of, zeros = name.removesuffix("weight"), torch.full_like(scales, 7, dtype=torch.int64)
        return {
            f"{of}qweight": _joined(codes, range(8)).t().contiguous(),
            f"{of}qzeros": _joined(zeros.t(), range(8)),
            f"{of}scales": scales.half().t().contiguous(),
            f"{of}g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
        }

    stated = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return _packed(plain(folder, dtype=torch.float16), pack, stated | {"checkpoint_format": "gptq"})


def awq(folder: Path) -> Path:
    """In 4 bits, eight outputs in an order of their own."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scales = _codes(weight)
        of, zeros = name.removesuffix("weight"), torch.full_like(scales, 8, dtype=torch.int64)
        return {
            f"{of}qweight": _joined(codes.t(), order),
            f"{of}qzeros": _joined(zeros.t(), order),
            f"{of}scales": scales.half().t().contiguous(),
        }

    stated = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return _packed(plain(folder, dtype=torch.float16), pack, stated)


def bitnet(folder: Path, linear: str = "bitlinear") -> Path:
    """Weights of -1, 0 and 1, four in a byte, with a scale for each matrix."""

    def pack(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = weight.float().abs().mean()
        codes = (weight.float() / scale).round().clamp(-1, 1).to(torch.uint8) + 1
        first, second, third, fourth = codes.chunk(4)
        packed = first | second << 2 | third << 4 | fourth << 6
        return {name: packed, name.replace("weight", "weight_scale"): scale.to(weight.dtype)[None]}

    stated = {"quant_method": "bitnet", "linear_class": linear, "quantization_mode": "offline"}
    return _packed(plain(folder, dtype=torch.bfloat16), pack, stated)


def torchao(folder: Path) -> Path:
    """In int8, by transformers itself."""
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]
    from transformers import TorchAoConfig

    return _by_transformers(folder, TorchAoConfig(Int8WeightOnlyConfig()))


def _by_transformers(folder: Path, asked: Any, **how: Any) -> Path:
    from transformers import AutoModelForCausalLM

    source = plain(folder.with_name(f"{folder.name}-whole"))
    return saved(AutoModelForCausalLM.from_pretrained(source, quantization_config=asked, **how), folder)


def gguf(
    folder: Path, architecture: str = "llama", form: str = "Q8_0", whole_table: bool = False, **more: Any
) -> Path:
    """A file in one form with its tokenizer; the vocabulary has two merges, without which there is none.
    `more`: further fields, and `tensors`.
    """
    from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants

    merges = ["a b", "c d"]
    sizes = SIZES | ({"head_dim": 128} if architecture == "qwen3" else {})  # transformers reads no other
    model, kind = text_model(family=architecture, **sizes), GGMLQuantizationType[form]
    layers = model.config.num_hidden_layers
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    words = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    vocabulary = [word for word, _ in words] + [merge.replace(" ", "") for merge in merges]
    folder.mkdir(parents=True)
    file = GGUFWriter(folder / f"tiny-{form}.gguf", architecture)
    dim = getattr(model.config, "head_dim", None) or 16
    stated: dict[str, Any] = {"context_length": 4096, "embedding_length": 64, "block_count": layers}
    stated |= {"vocab_size": len(vocabulary), "feed_forward_length": 64, "head_count": 4, "head_count_kv": 2}
    stated |= {"key_length": dim, "value_length": dim, "rope_dimension_count": dim, "rope_freq_base": 1e4}
    stated |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tokenizer_model": "gpt2"}
    stated |= {"tokenizer_pre": "default", "layer_norm_rms_eps": 1e-6, "token_merges": merges}
    stated |= {"token_list": vocabulary, "token_types": [3] * 3 + [1] * (len(vocabulary) - 3)}
    if "gemma" in architecture:
        stated["sliding_window"] = 16
    tensors = more.pop("tensors", {})
    for field, value in (stated | more).items():
        getattr(file, f"add_{field}")(*(value if isinstance(value, tuple) else (value,)))
    for name, array in tensors.items():
        file.add_tensor(name, array)
    for name, weight in model.state_dict().items():
        array = _as_gguf(name, weight, architecture)
        stem, _, suffix = name.rpartition(".")
        if names.get_name(stem) is None:  # the output layer of those that share the table
            continue
        if array.ndim == 2 and not (whole_table and "embed" in name):
            file.add_tensor(f"{names.get_name(stem)}.{suffix}", quants.quantize(array, kind), raw_dtype=kind)
        else:
            file.add_tensor(f"{names.get_name(stem)}.{suffix}", array)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return folder / f"tiny-{form}.gguf"


def _packed(folder: Path, pack: Any, stated: dict[str, Any], ends: Any = "proj.weight") -> Path:
    """Replace a checkpoint's weights with these ends by what `pack` makes of each, and its config says so."""
    file, tensors = folder / "model.safetensors", {}
    for name, weight in load(file.read_bytes()).items():
        tensors |= pack(name, weight) if name.endswith(ends) else {name: weight}
    save_file(tensors, file, metadata={"format": "pt"})
    return state(folder, stated)


def state(folder: Path, stated: Any) -> Path:
    """The checkpoint, whose config states this quantization."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return folder


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of 0 to 15 around 8 `[out, in]`, and scales `[out, groups]`."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1) / 7
    return ((groups / scales[..., None]).round() + 8).clamp(0, 15).flatten(1).long(), scales


def _joined(codes: Tensor, order: Any) -> Tensor:
    """Eight codes of a row in an int32, the first in its lowest bits."""
    words = sum(codes[:, place::8] << 4 * bits for bits, place in enumerate(order))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).contiguous()


def _as_gguf(name: str, weight: Tensor, architecture: str) -> np.ndarray:
    """As llama.cpp has it: rows for the merged tokens, Llama's rotary pairs side by side, Gemma's norms with
    the one that is added to them.
    """
    if name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = torch.cat([weight, weight[-2:]])
    if "gemma" in architecture and name.endswith("norm.weight"):
        weight = weight + 1
    heads = 4 if "q_proj" in name else 2 if "k_proj" in name else 0
    if heads and architecture == "llama":
        weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return weight.numpy()
