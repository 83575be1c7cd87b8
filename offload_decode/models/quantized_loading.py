"""Reading the weights of checkpoints, those in few bits as their format has them, with their fingerprints."""

from pathlib import Path
from typing import Any

import torch

from offload_decode.common.errors import ModelError
from offload_decode.common.slow_work import at_work
from offload_decode.hf.compat import DTYPES, Names, by_own_names, class_of, names_of, unknown_text
from offload_decode.hf.meta_device import Unfilled
from offload_decode.hf.shape import text_config, text_model
from offload_decode.hf.user_cache import cached_fingerprint
from offload_decode.models import quantization
from offload_decode.models.checkpoint import CONFIG, located, weight_files, weight_names
from offload_decode.models.fingerprints import file_hash, files_hash
from offload_decode.models.gguf_cache import ARCHITECTURES, converted
from offload_decode.models.gguf_model import gguf_model
from offload_decode.store.format import FINGERPRINT_VERSION


def whole_model(source: str, config: Any, **arguments: Any) -> Any:
    """The model of a text config, all of whose weights are in a folder's or id's safetensors, or in a GGUF
    file; `arguments` are those of `from_pretrained`. Raises `ModelError` where some are missing, or are not
    the text's.
    """
    where, which = located(source)
    found = weight_files(source)
    names = None if which else _names(found, config)
    mapping = None if names is None else names.mapping or None
    stated = quantization.quantization_of(config)
    if names is not None and stated is not None:
        config.quantization_config = by_own_names(stated, names)
    with quantization.hushed(), Unfilled():  # what sees and hears is no news
        arguments |= {"config": config, "key_mapping": mapping, "use_safetensors": True, **which}
        with at_work(f"reading the weights of {source}"):
            model, report = class_of(config).from_pretrained(where, output_loading_info=True, **arguments)
    if missing := sorted(report["missing_keys"]):
        raise ModelError(
            f"the weights of {source} lack {len(missing)} of those that its config.json asks for, "
            f"{missing[0]} among them: fetch the checkpoint again"
        )
    if names is not None and stated is None:
        if unknown := unknown_text(report["unexpected_keys"], names, weight_names(found), model):
            raise ModelError(
                f"the weights of {source} hold {len(unknown)} that its config.json knows nothing of, "
                f"{unknown[0]} among them: fetch the checkpoint again"
            )
        output = model.get_output_embeddings()
        model.config.tie_word_embeddings = output.weight is model.get_input_embeddings().weight
    return model


def _names(found: list[Path], config: Any) -> Names:
    with Unfilled(), torch.device("meta"):
        model = text_model(text_config(config))
    parameters = sum(weight.numel() for weight in model.parameters())
    held = sum(path.stat().st_size for path in found)
    # Transformers makes room for weights that are not there, and fills it. A number has a byte at the least.
    if quantization.quantization_of(config) is None and parameters > held:
        raise ModelError(
            f"its config.json describes {parameters:,} parameters, and the files of its weights have "
            f"{held:,} bytes: fetch the checkpoint again"
        )
    return names_of(weight_names(found), model)


def read_packed(
    source: str, found: list[Path], config: Any, stated: dict[str, Any], dtype: str, device: torch.device
) -> tuple[Any, str]:
    """A checkpoint in few bits on its device, as its quantization is `stated`, and its fingerprint, which is
    that of its files.
    """
    with quantization.hushed():
        arguments = quantization.reading(stated, device)
        if stated["quant_method"] == "fp8" and "quantization_config" in arguments:
            _check_blocks(found, stated)
        # In the checkpoint's own first: transformers brings only some of such weights to another.
        model = whole_model(source, config=config, dtype="auto", **arguments)
        quantization.in_dtype(model, DTYPES.get(dtype, model.dtype))
        if "quantization_config" not in arguments:
            quantization.run_once(model)
    known = f"files {FINGERPRINT_VERSION} {stated['quant_method']}"
    files = [*found, found[0].with_name(CONFIG)]
    return model, cached_fingerprint(files, known, lambda: files_hash(found, stated))


def read_gguf(path: Path, config: Any, dtype: str, weights: str, device: torch.device) -> tuple[Any, str]:
    """The model of a GGUF file, in its own blocks on a CPU where `weights` are `auto` and its architecture
    is known, or else widened to `dtype` (bfloat16 for `auto`); and its fingerprint.
    """
    wanted = DTYPES.get(dtype, torch.bfloat16)
    kept = converted(path)
    if kept.architecture in ARCHITECTURES:
        in_blocks = weights == "auto" and device.type == "cpu"
        model = gguf_model(path, kept, config, wanted, in_blocks).to(device)
    else:
        model = _widened(path, config, wanted, device)
    known = f"file {FINGERPRINT_VERSION} {quantization.GGUF}"
    return model, cached_fingerprint([path], known, lambda: file_hash(path))


def _widened(path: Path, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    import transformers

    wide: dict[str, Any] = {"dtype": dtype, "device_map": {"": device}}
    if hasattr(transformers, "GgufConfig"):  # later releases would keep the blocks, and fetch kernels
        wide["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with quantization.hushed():
        return whole_model(str(path), config=config, **wide)


def _check_blocks(found: list[Path], stated: dict[str, Any]) -> None:
    """`ModelError` unless in whole blocks with scales: transformers would take those of other rows."""
    from safetensors import safe_open

    block = stated.get("weight_block_size") or ()
    scaled = False
    for path in found:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for name in (name for name in file.keys() if name.endswith("_scale_inv")):  # noqa: SIM118
                scaled, weight = True, name.removesuffix("_scale_inv")
                sizes = file.get_slice(weight).get_shape()
                scales = file.get_slice(name).get_shape()
                for size, one, step in zip(sizes[-2:], scales[-2:], block, strict=False):
                    if one > 1 and size != one * step:
                        raise ModelError(
                            f"its FP8 weight {weight} is not of whole blocks, and such are read only on a "
                            "GPU of compute capability 8.9 or later, with kernels: pip install kernels"
                        )
    if not scaled:
        raise ModelError(
            "its config.json says that its weights are FP8, and they have no scales: take "
            "quantization_config out of it, or fetch the checkpoint again"
        )
