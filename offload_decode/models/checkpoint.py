"""A checkpoint's files, looked at before a library reads them: bounded, whole, sane, and nothing pickled."""

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from offload_decode import demo_models
from offload_decode.common.errors import ConfigError, ModelError, OffloadDecodeError
from offload_decode.hf.compat import class_of, text_of
from offload_decode.hf.rope_scaling import parse_rope, scale_rope
from offload_decode.models.gguf import SUFFIX
from offload_decode.models.gguf_cache import converted
from offload_decode.models.prompt import is_failure
from offload_decode.models.quantization import quantization_of
from offload_decode.models.tokenizer_file import check_tokenizer
from offload_decode.types import ModelShape

WAY_OUT = f"give {demo_models.QUOTED}, a folder, a .gguf file, or a transformers id"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"

TOKENIZER, TEMPLATE, TEMPLATES = "tokenizer.json", "chat_template.json", "additional_chat_templates"

_MIB = 1 << 20
# The largest that are known have a tenth of it.
_SMALL, _LARGE = 16 * _MIB, 512 * _MIB
_MOST_BYTES = dict.fromkeys([CONFIG, "generation_config.json", "tokenizer_config.json"], _SMALL)
_MOST_BYTES |= dict.fromkeys(["special_tokens_map.json", "added_tokens.json"], _SMALL)
_MOST_BYTES |= dict.fromkeys([TEMPLATE, "chat_template.jinja", ADAPTER_CONFIG], _SMALL)
_MOST_BYTES |= dict.fromkeys([INDEX, TOKENIZER, "tokenizer.model", "vocab.json", "merges.txt"], _LARGE)

# Beyond these a config is a mistake: building such a model, even without weights, would not end.
_MOST_LAYERS = 512
_MOST = {"num_hidden_layers": _MOST_LAYERS, "num_attention_heads": 1 << 14}
_MOST |= {"hidden_size": 1 << 20, "intermediate_size": 1 << 22, "vocab_size": 1 << 26}
_MOST_OPTIONAL = dict.fromkeys(["num_key_value_heads", "head_dim", "num_labels"], 1 << 14)
_MOST_OPTIONAL |= dict.fromkeys(["num_experts", "num_local_experts", "num_experts_per_tok"], 1 << 14)
_MOST_OPTIONAL |= {"moe_intermediate_size": 1 << 22}
_BY_LAYER = ("intermediate_size", "num_key_value_heads")
_MOST_LISTED = 1 << 15
"""Entries of a list or an object in a config: they are copied and compared many times."""


def source_of(model_id: str) -> str:
    """What is to be loaded: a shipped model's folder for its name, and a GGUF file where a folder holds just
    that. Raises `ConfigError`, and `ModelError` for a folder that is not there.
    """
    if not model_id.strip():
        raise ConfigError(f"the model is empty: {WAY_OUT}")
    if model_id in demo_models.NAMES:
        return str(demo_models.path(model_id))
    looks_local = model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1
    if model_id.endswith(SUFFIX):
        if not os.path.lexists(model_id):
            raise ModelError(f"there is no file {model_id}: {WAY_OUT}")
        return model_id
    if (looks_local or os.path.lexists(model_id)) and not Path(model_id).is_dir():
        raise ModelError(f"there is no folder {model_id}: {WAY_OUT}")
    return _gguf_in(Path(model_id)) or model_id


def _gguf_in(folder: Path) -> str | None:
    """The GGUF file of a folder that has no other weights; `ModelError` where there are several."""
    if any((folder / name).exists() for name in (WEIGHTS, INDEX)):
        return None
    found = sorted(folder.glob(f"*{SUFFIX}"))
    if len(found) > 1:
        raise ModelError(f"{folder} holds {len(found)} GGUF files: name one, such as {found[0]}")
    return str(found[0]) if found else None


def located(source: str) -> tuple[str, dict[str, str]]:
    """A source as `from_pretrained` takes it: a folder or an id, and which GGUF file of it."""
    if not source.endswith(SUFFIX):
        return source, {}
    path = Path(source).absolute()
    return str(path.parent), {"gguf_file": path.name}


def read_config(model_id: str, rope: str = "") -> tuple[Any, ModelShape]:
    """`stated_config`, its RoPE scaled as `rope` says (`hf.rope_scaling`), and the shape of the model, which
    passed the equivalence check.

    Raises `ConfigError`, `ModelError` or `UnsupportedModel`.
    """
    if rope:
        parse_rope(rope)  # a mistake shows before anything is fetched
    config = stated_config(model_id)
    if rope:
        scale_rope(config, rope)
    from offload_decode.hf.verify import shape_of  # which imports transformers

    with model_errors(f"cannot read the config of '{model_id}'"):
        return config, shape_of(config)


def stated_config(model_id: str) -> Any:
    """The transformers config of a shipped model, a folder, a .gguf file or a transformers id, served or not:
    of a multimodal model that of its text alone.

    Raises `ConfigError`, `ModelError` or `UnsupportedModel`.
    """
    from transformers import AutoConfig
    from transformers.utils import cached_file

    source = source_of(model_id)
    with model_errors(f"cannot read the config of '{model_id}'"):
        if source.endswith(SUFFIX):
            config = text_of(converted(Path(source)).config)
        else:
            folder = Path(source) if Path(source).is_dir() else Path(str(cached_file(source, CONFIG))).parent
            _check_files(folder)
            _check_sizes(parsed(folder / CONFIG))
            config = text_of(AutoConfig.from_pretrained(source, trust_remote_code=False))
        stated = config.to_dict()
        # Families have other names for some sizes.
        named = {name: stated[own] for name, own in config.attribute_map.items() if own in stated}
        _check_numbers(stated | named)
        quantization_of(config)
        class_of(config)
        return config


def template_of(source: str) -> str | None:
    """The chat template that a multimodal checkpoint has beside its tokenizer; None where there is none."""
    from transformers.utils import cached_file

    found = cached_file(source, TEMPLATE, _raise_exceptions_for_missing_entries=False)
    template = parsed(Path(found)).get("chat_template") if found else None
    return template if isinstance(template, str) else None


def small_files(source: str) -> list[Path]:
    """What the folder of a checkpoint holds beside weights."""
    from transformers.utils import cached_file

    folder = Path(source) if Path(source).is_dir() else Path(str(cached_file(source, CONFIG))).parent
    return sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jinja", ".model", ".txt"))


def check_rules(source: str) -> None:
    """`ModelError` where the tokenizer.json of a folder or transformers id tells of what no tokenizer has."""
    from transformers.utils import cached_file

    if found := cached_file(source, TOKENIZER, _raise_exceptions_for_missing_entries=False):
        check_tokenizer(Path(found))


def bounded(config: Path) -> bytes:
    """The bytes of a config file; `ModelError` for one that is too large, or no plain file."""
    _check_files(config.parent)
    return config.read_bytes()


def weight_files(source: str) -> list[Path]:
    """The safetensors files of a folder or transformers id, with their index where there are several; or a
    GGUF file.

    Raises `ModelError` where there are none, as pickled weights are not read, or where one is no file.
    """
    found = _named_files(source)
    for path in found:
        if path.exists() and not path.is_file():  # a pipe would keep its reader waiting
            raise ModelError(f"{path} is not a regular file: fetch the checkpoint again")
    return found


def _named_files(source: str) -> list[Path]:
    from transformers.utils import cached_file

    if source.endswith(SUFFIX):
        return [Path(source)]
    if Path(source).is_dir():
        folder, found = Path(source), next((n for n in (WEIGHTS, INDEX) if (Path(source) / n).exists()), None)
    else:
        folder, found = _fetched(source)
    if (folder / ADAPTER_CONFIG).exists():
        raise ModelError(f"{source} is an adapter: give its model, and this folder with --adapter")
    if found is None:
        _refuse_without_weights(source, folder)
    if found == WEIGHTS:
        return [folder / WEIGHTS]
    named = parsed(folder / INDEX).get("weight_map")
    shards = set(named.values()) if isinstance(named, dict) else set()
    if not shards or not all(isinstance(n, str) and re.fullmatch(r"[^/\\]+\.safetensors", n) for n in shards):
        raise ModelError(f"{folder / INDEX} names files that are no safetensors: fetch the checkpoint again")
    local = Path(source).is_dir()
    paths = (folder / name if local else Path(str(cached_file(source, name))) for name in sorted(shards))
    return [folder / INDEX, *paths]


def weight_names(found: list[Path]) -> list[str]:
    """The names of the weights in the files of `weight_files`, none of which is read."""
    from safetensors import safe_open

    if found[0].name == INDEX:
        return list(parsed(found[0])["weight_map"])
    with safe_open(found[0], "pt") as file:
        return list(file.keys())


def _fetched(model_id: str) -> tuple[Path, str | None]:
    """Where the cache holds a model's weights, or the index of them, and under which name."""
    from transformers.utils import cached_file

    for name in (WEIGHTS, INDEX):
        if path := cached_file(model_id, name, _raise_exceptions_for_missing_entries=False):
            return Path(path).parent, name
    return Path(str(cached_file(model_id, CONFIG))).parent, None


def _refuse_without_weights(source: str, folder: Path) -> NoReturn:
    pickled = sorted(path.name for kind in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{kind}"))
    if Path(source).is_dir() and not pickled:
        raise ModelError(f"{source} has no weights: it needs a {WEIGHTS}, or several and a {INDEX}")
    raise ModelError(
        f"the weights of {source} are pickled ({pickled[0] if pickled else f'it has no {WEIGHTS}'}), and "
        "reading a pickle can run code that is hidden in it: take a checkpoint with safetensors, or, where "
        "you trust this one, convert it with AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
    )


@contextmanager
def model_errors(context: str) -> Iterator[None]:
    """Turn whatever a library raises for a checkpoint that it cannot read into a `ModelError`."""
    try:
        yield
    except OffloadDecodeError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = " ".join(str(error).split())[:300].rstrip(".")
        if "above report" in reason:  # which transformers logs, and nobody sees
            other = "have other shapes than" if "mismatched_sizes" in reason else "cannot be made those that"
            reason = f"its weights {other} its config.json states"
        if isinstance(error, OSError) and error.filename:  # the checkpoint is named already
            reason = f"{os.path.basename(os.fsdecode(error.filename))}: {error.strerror}"
        elif not reason or isinstance(error, KeyError):
            reason = f"{type(error).__name__} {reason}".rstrip()
        raise ModelError(f"{context}: {reason}; {WAY_OUT}") from error


def _check_files(folder: Path) -> None:
    templates = {f"{TEMPLATES}/{path.name}": _SMALL for path in (folder / TEMPLATES).glob("*")}
    for name, most in (_MOST_BYTES | templates).items():
        path = folder / name
        if not path.exists():
            continue
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file: fetch the checkpoint again")
        if (held := path.stat().st_size) > most:
            raise ModelError(
                f"{path} has {held / _MIB:,.0f} MiB, where {most // _MIB} MiB are more than enough: fetch "
                "the checkpoint again"
            )


def parsed(path: Path) -> dict[str, Any]:
    """A JSON object; `ModelError` for anything else, and for numbers that are not finite."""
    try:
        held = json.loads(path.read_bytes(), parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}): fetch the checkpoint again") from error
    if not isinstance(held, dict):
        raise ModelError(f"{path} holds no JSON object: fetch the checkpoint again")
    return held


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"{number} is no finite number")
    return value


def _check_sizes(config: dict[str, Any]) -> None:
    if not isinstance(config.get("model_type"), str):
        raise ModelError("its config.json names no model_type: fetch the checkpoint again")
    if "transformers_weights" in config:
        raise ModelError(f"its config.json names weights of its own: save the model anew, as {WEIGHTS}")
    _check_lists(config)
    for own in (config, *_text_parts(config)):
        _check_numbers(own)


def _check_lists(config: dict[str, Any]) -> None:
    parts: list[dict[str, Any] | list[Any]] = [config]
    while parts:
        own = parts.pop()
        if len(own) > _MOST_LISTED:
            raise ModelError(
                f"its config.json lists {len(own):,} things in one place, where {_MOST_LISTED:,} are more "
                "than enough: fetch the checkpoint again"
            )
        inner = own.values() if isinstance(own, dict) else own
        parts += [one for one in inner if isinstance(one, dict | list)]


def _text_parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a wrapper's config says of its text model."""
    for name in ("text_config", "thinker_config"):
        if isinstance(own := config.get(name), dict):
            yield own
            yield from _text_parts(own)


def _check_numbers(config: dict[str, Any]) -> None:
    for field, most in (_MOST | _MOST_OPTIONAL).items():
        value = config.get(field, most)
        if value is None and field in _MOST_OPTIONAL:
            continue
        listed = field in _BY_LAYER and isinstance(value, list) and len(value) <= _MOST_LAYERS
        each = value if listed else [value]
        if not all(type(one) is int and 1 <= one <= most for one in each):
            raise ModelError(
                f"its config.json says that {field} is {json.dumps(value)[:40]}, and that is a whole number "
                f"from 1 to {most:,}: mend the config, or fetch the checkpoint again"
            )
