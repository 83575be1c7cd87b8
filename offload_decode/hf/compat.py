"""Where models of transformers differ: the argument for the cache, devices and dtypes, multimodal wrappers.

The cache is `cache` since transformers 5.24; before it, and in models with their own code, `past_key_values`,
or `cache_params` of some recurrent layers. Of a multimodal checkpoint the text model alone is loaded, by its
own config and class, with the weights renamed to those of a checkpoint of the text model.
"""

import inspect
import os
import re
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import torch

from offload_decode.common.errors import ConfigError, ModelError, UnsupportedModel
from offload_decode.kv.placement import RESERVE

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_DEVICES = "choose one of: auto, cpu, cuda, cuda:0"
# Text models of wrappers that equal a family of their own: where all tokens are text, the three positions of
# a token are one.
_SAME = {"glm4v_text": "glm4", "qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
_OF_IMAGES = ("mrope_section", "mrope_interleaved", "type")


@cache
def cache_name(kind: Any) -> str:
    """The name by which modules of a class take a cache; that of `generate`, where `forward` names none."""
    names = inspect.signature(kind.forward).parameters
    return next((name for name in CACHE_NAMES if name in names), generate_name())


@cache
def generate_name() -> str:
    """The name by which `model.generate` takes a cache."""
    from transformers import GenerationMixin

    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return next(name for name in CACHE_NAMES if name in names)


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among keyword arguments, by whichever name; None without one."""
    return next((given[name] for name in CACHE_NAMES if given.get(name) is not None), None)


def in_its_name(module: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with their cache by the name that a module knows."""
    rest = {name: one for name, one in given.items() if name not in CACHE_NAMES}
    return {**rest, **with_cache(module, cache_in(given))}


def with_cache(module: Any, cache: Any) -> dict[str, Any]:
    """Keyword arguments that give a module its cache."""
    return {cache_name(type(module)): cache}  # type: ignore[arg-type]


def check_dtype(dtype: str) -> None:
    """ConfigError for a name that is neither `auto` nor one of `DTYPES`."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of: auto, {', '.join(DTYPES)}")


def stored_dtype(dtype: Any) -> str:
    """The name of a torch dtype; `ModelError` for one in which no model is stored."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"a model in {name} cannot be stored; load it as one of: {', '.join(DTYPES)}")
    return name


def pick_device(device: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{device}'; {_DEVICES}") from error
    if chosen.type == "cpu" and chosen.index is not None:
        raise ConfigError(f"unknown device '{device}'; {_DEVICES}")
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' is not served; {_DEVICES}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device '{device}' is not there: torch finds no such GPU; use --device cpu")
    return chosen


def device_room(device: torch.device) -> int:
    """Bytes that a prefill may take on a CUDA device: the driver's free memory, within the cap of this
    process, and the unused part of torch's pool, less a reserve.
    """
    free, total = torch.cuda.mem_get_info(device)
    pool, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    capped = int(torch.cuda.get_per_process_memory_fraction(device) * total) - pool
    return max(0, min(free, capped)) + pool - used - total // RESERVE


def text_of(config: Any) -> Any:
    """The text model's config (a copy) of a config, which may be a wrapper's. Raises `UnsupportedModel`."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"'{config.model_type}' is an encoder-decoder model, whose answers attend to an encoder's "
            "output: use a model that is a decoder alone"
        )
    text = deepcopy(config.get_text_config(decoder=True))
    if text.model_type in _SAME:
        text = _plain(text, _SAME[text.model_type])
    if text.model_type == config.model_type:
        return text
    # Of the wrapper, whose class has the output layer, and ties it or not.
    own = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
    for name in own:
        if getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    if text.dtype is None:
        text.dtype = config.dtype
    text._name_or_path = config._name_or_path
    return text


def check_alone(config: Any) -> None:
    """`UnsupportedModel` for the config of a multimodal model that is loaded already."""
    if text_of(config).model_type != config.model_type:
        raise UnsupportedModel(
            f"this '{config.model_type}' model is loaded with its encoders of images or sound: give its "
            "folder or its transformers id, of which the text model alone is loaded"
        )


def class_of(text: Any) -> Any:
    """transformers' causal language model of a text config. Raises `UnsupportedModel`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    # Text models that transformers builds within a wrapper alone (Mistral 4).
    module = import_module(type(text).__module__.replace(".configuration_", ".modeling_"))
    name = type(text).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    if not hasattr(module, name):
        raise UnsupportedModel(
            f"'{text.model_type}' is no language model that writes text from left to right"
        )
    return getattr(module, name)


@dataclass(frozen=True)
class Names:
    """Where a checkpoint has the text's weights, below `base`, and the output layer, below `head`."""

    base: str
    head: str | None
    mapping: dict[str, str] = field(default_factory=dict)  # transformers' key_mapping to the text's own names


def names_of(checkpoint: Collection[str], model: Any) -> Names:
    """How the weights of the text `model` are named in a checkpoint that has weights of these names."""
    base, there = _base(model), set(checkpoint)
    inner = [name.removeprefix(base) for name in model.state_dict() if name.startswith(base)]
    below = {name.removesuffix(inner[0]) for name in there if f".{name}".endswith(f".{inner[0]}")}
    own = max(sorted(below), key=lambda prefix: sum(prefix + name in there for name in inner), default=base)
    heads = [name for name in checkpoint if re.search(r"(^|\.)lm_head\.weight$", name)]
    # Letter by letter: these are names, no paths.
    head = max(heads, key=lambda name: len(os.path.commonprefix([name, own])), default=None)  # noqa: RUF071
    mapping = {}
    if own not in ("", base):
        mapping[f"^{re.escape(own)}"] = base
    if head is not None and head != "lm_head.weight":
        mapping[f"^{re.escape(head.removesuffix('weight'))}"] = "lm_head."
    return Names(own, head, mapping)


def by_own_names(quantization: dict[str, Any], names: Names) -> dict[str, Any]:
    """A checkpoint's quantization config, with the layers that it lists by the text model's names."""

    def own(listed: str) -> str:
        for pattern, name in names.mapping.items():
            listed = re.sub(pattern, name, f"{listed}.").removesuffix(".")
        return listed

    lists = {name: value for name, value in quantization.items() if isinstance(value, list)}
    return quantization | {
        name: [own(one) if isinstance(one, str) else one for one in value] for name, value in lists.items()
    }


def unknown_text(unexpected: Iterable[str], names: Names, held: Collection[str], model: Any) -> list[str]:
    """Of the weights that `model` does not have, those that belong to its text model."""
    base, there = _base(model), set(held)
    parts = {name for name, _ in model.get_submodule(base.rstrip(".")).named_children()}
    layers = model.config.num_hidden_layers
    found = []
    for name in unexpected:
        own = name.removeprefix(base)
        # Layers beyond the last predict further tokens, which are not used here.
        further = (number := re.match(r"layers\.(\d+)(\.|$)", own)) and int(number[1]) >= layers
        known = own.partition(".")[0] in parts or (names.base not in ("", base) and names.base + own in there)
        if known and not further:
            found.append(name)
    return sorted(found)


def _base(model: Any) -> str:
    """The common prefix of the names of all weights but the output layer's, such as `model.`."""
    table = model.get_input_embeddings()
    path: str = next(path for path, module in model.named_modules() if module is table)
    return path[: path.rfind(".") + 1]


def _plain(text: Any, family: str) -> Any:
    """The config of a family without images."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[family]
    fields = {name: value for name, value in text.to_dict().items() if name in known().to_dict()}
    rope = text.rope_parameters or {}
    fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _OF_IMAGES}
    fields.pop("model_type")
    return known(**fields)
