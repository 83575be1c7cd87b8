"""What users set: how a store is asked, and options (`-o key=value`) as a plug-in's frozen dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from offload_decode.common.errors import ConfigError

OptionsT = TypeVar("OptionsT")

AUTO = "auto"
"""The selector `own` for a model with an indexer of its own, `topk` for all others."""
ATTEND = ("auto", "host", "device", "pinned")
FULL = "full"
"""Weights in the model's dtype, those of a GGUF file too, which else stay in its blocks on a CPU."""
WEIGHTS = ("auto", FULL, "int8", "int4")
STREAMED = "streamed"
"""Weights that come to a card layer by layer, for a prefill alone (`models.layer_streaming`)."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a store is asked. Raises `ConfigError` for a value that cannot be.

    model: an id, a folder or a .gguf file, where it is not the one that the store names. adapter: the folder
    of a LoRA, where it is not the one that the store names. selector, options:
    which stored tokens a step attends to, options as users write them. device: `auto`, `cpu`, `cuda` or
    `cuda:N`. weights: `auto` (as prefilled), `full` (the checkpoint's own, unpacked), `int8` or `int4`.
    attend: to stored tokens on the `host`; on the `device`; there, reading them in `pinned` memory of the
    host; or where that is fastest, `auto`. device_cache: bytes of the device that keep the stored rows used
    last. crossover: attend to everything where a search would be slower (`engine.crossover`), as commands do.
    """

    model: str | None = None
    selector: str = AUTO
    options: Mapping[str, object] = dataclasses.field(default_factory=dict)
    device: str = "auto"
    weights: str = "auto"
    attend: str = "auto"
    device_cache: int = 0
    crossover: bool = False
    adapter: str = ""

    def __post_init__(self) -> None:
        if self.weights == STREAMED:
            raise ConfigError(
                "weights=streamed is for a prefill, because an answer would read all of them over the bus "
                f"for every token; choose one of: {', '.join(WEIGHTS)}"
            )
        for what, given, known in (("attend", self.attend, ATTEND), ("weights", self.weights, WEIGHTS)):
            if given not in known:
                raise ConfigError(f"{what}={given} is unknown; choose one of: {', '.join(known)}")
        if self.device_cache < 0:
            raise ConfigError(f"a device cache of {self.device_cache} bytes cannot be: give 0 for none")

    def weights_after(self, prefilled: str) -> str:
        """The weights to load (as `models.loading.load` takes them) for a store of `prefilled` weights."""
        return prefilled if self.weights == "auto" else self.weights

    def changed(self, settings: Mapping[str, Any]) -> EngineConfig:
        """With other settings; raises `ConfigError` for a name that is none."""
        names = [field.name for field in dataclasses.fields(self)]
        if unknown := [name for name in settings if name not in names]:
            raise ConfigError(f"an engine has no setting '{unknown[0]}'; it has: {', '.join(names)}")
        return dataclasses.replace(self, **settings)


_TRUE, _FALSE = {"true", "yes", "on", "1"}, {"false", "no", "off", "0"}


def parse_options(kind: type[OptionsT], given: Mapping[str, object], owner: str) -> OptionsT:
    """Build `kind` (a dataclass of str, int, float and bool fields) from names and values.

    Raises `ConfigError` for a name that `owner` does not have and for a value of the wrong type.
    """
    assert dataclasses.is_dataclass(kind)
    types = get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    if unknown := [name for name in given if name not in names]:
        raise ConfigError(f"{owner} has no option '{unknown[0]}'; it has: {', '.join(names)}")
    return kind(
        **{name: _convert(value, types[name], f"{owner} option {name}") for name, value in given.items()}
    )


def split_pairs(pairs: list[str]) -> dict[str, str]:
    """`["k=v", ...]` to a dict; raises `ConfigError` for anything else and for a name given twice."""
    options: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(f"option '{pair}' is not of the form key=value")
        if name in options:
            raise ConfigError(f"option '{name}' is given twice")
        options[name] = value
    return options


def _convert(value: object, kind: Any, what: str) -> object:
    text = str(value).strip()
    try:
        if kind is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError(text)
            return text.lower() in _TRUE
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{what} must be {kind.__name__}, not '{text}'") from error
