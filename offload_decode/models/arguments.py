"""The argument by which a model takes its cache: `cache` since transformers 5.24; `past_key_values`, and
`cache_params` of some recurrent layers, in releases before it and in models that bring their own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

CACHE_NAMES = ("cache", "past_key_values", "cache_params")


@cache
def cache_name(kind: Any) -> str:
    """The name by which modules of a class take a cache; that of `generate`, where their `forward` does not
    say (a wrapper's).
    """
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


def with_cache(module: Any, held: Any) -> dict[str, Any]:
    """Keyword arguments that hand `held` to a module."""
    return {cache_name(type(module)): held}  # type: ignore[arg-type]
