"""Prefill methods by name."""

from __future__ import annotations

from collections.abc import Mapping

from offload_decode.config import parse_options
from offload_decode.errors import ConfigError
from offload_decode.types import ModelShape
from prefill_jobs.methods.base import Method, Options
from prefill_jobs.methods.dense import Dense
from prefill_jobs.methods.quoka import QuoKA
from prefill_jobs.methods.sample import SampleAttention
from prefill_jobs.methods.window import Window

METHODS: dict[str, type[Method]] = {kind.name: kind for kind in (Dense, QuoKA, SampleAttention, Window)}


def parse(name: str, options: Mapping[str, object]) -> Options:
    """The options of a method, from how users write them; raises `ConfigError`."""
    if name not in METHODS:
        raise ConfigError(f"unknown prefill method '{name}'; known are: {', '.join(METHODS)}")
    return parse_options(METHODS[name].options_type, options, f"prefill method '{name}'")


def create(name: str, options: Mapping[str, object], shape: ModelShape) -> Method:
    """A method with options as users write them; raises `ConfigError`."""
    parsed = parse(name, options)
    return METHODS[name](parsed, shape)
