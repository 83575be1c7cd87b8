"""Prefill methods by name, built in or an extension's, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from offload_decode.common.errors import ConfigError
from offload_decode.common.plugins import METHODS, Extensions
from offload_decode.config import parse_options

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.methods.base import Method, Options
    from offload_decode.types import ModelShape

_ROOM = "offload_decode.prefill_jobs.methods"
_MODULES = {"dense": f"{_ROOM}.base", **{name: f"{_ROOM}.{name}" for name in ("quoka", "sample", "window")}}
BUILT_IN = tuple(_MODULES)
EXTENSIONS: Extensions[Method] = Extensions(METHODS, f"{_ROOM}.base:Method", lambda: _MODULES)


def names() -> list[str]:
    """Every method that `get` knows."""
    return EXTENSIONS.names()


def get(name: str) -> type[Method]:
    """The class of a method. Raises `ConfigError` and `ExtensionError`."""
    if (found := EXTENSIONS.get(name)) is None:
        raise ConfigError(f"unknown prefill method '{name}'; known are: {', '.join(names())}")
    return found


def parse(name: str, options: Mapping[str, object]) -> Options:
    """The options of a method, from how users write them; raises as `get` does."""
    return parse_options(get(name).options_type, options, f"prefill method '{name}'")


def create(name: str, options: Mapping[str, object], shape: ModelShape) -> Method:
    """A method with options as users write them; raises as `get` does."""
    return get(name)(parse(name, options), shape)
