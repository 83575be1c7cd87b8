"""Prefill methods by name, built in or an extension's, imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, cast

from offload_decode.common.errors import ConfigError
from offload_decode.common.plugins import METHODS, Extensions
from offload_decode.config import parse_options

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.methods.base import Method, Options
    from offload_decode.types import ModelShape

_CLASSES = {
    "dense": "offload_decode.prefill_jobs.methods.base:Dense",
    "quoka": "offload_decode.prefill_jobs.methods.quoka:QuoKA",
    "sample": "offload_decode.prefill_jobs.methods.sample:SampleAttention",
    "window": "offload_decode.prefill_jobs.methods.window:Window",
}
BUILT_IN = tuple(_CLASSES)


def _base() -> type[Method]:
    from offload_decode.prefill_jobs.methods.base import Method  # with torch, which names alone do without

    return Method


EXTENSIONS = Extensions(METHODS, _base, lambda: BUILT_IN)


def names() -> list[str]:
    """Every method that `get` knows."""
    return EXTENSIONS.names()


def get(name: str) -> type[Method]:
    """The class of a method. Raises `ConfigError` and `ExtensionError`."""
    extension = EXTENSIONS.get(name)
    if extension is not None:
        return extension
    if name not in _CLASSES:
        raise ConfigError(f"unknown prefill method '{name}'; known are: {', '.join(names())}")
    module, kind = _CLASSES[name].split(":")
    return cast("type[Method]", getattr(import_module(module), kind))


def parse(name: str, options: Mapping[str, object]) -> Options:
    """The options of a method, from how users write them; raises as `get` does."""
    return parse_options(get(name).options_type, options, f"prefill method '{name}'")


def create(name: str, options: Mapping[str, object], shape: ModelShape) -> Method:
    """A method with options as users write them; raises as `get` does."""
    return get(name)(parse(name, options), shape)
