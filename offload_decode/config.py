"""Options as users write them (`-o key=value`), turned into a plug-in's frozen dataclass, strictly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from offload_decode.errors import ConfigError

OptionsT = TypeVar("OptionsT")

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
