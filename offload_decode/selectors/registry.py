"""Selectors by name, built in or an extension's, imported when asked for."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import TYPE_CHECKING

from offload_decode import selectors as package
from offload_decode.config import parse_options
from offload_decode.errors import ConfigError
from offload_decode.indexes.extensions import SELECTORS, Extensions
from offload_decode.selection.budgets import Budget

if TYPE_CHECKING:
    from offload_decode.kv.host import HostKV
    from offload_decode.selection.budgeted import Budgeted
    from offload_decode.selection.selector import Selector
    from offload_decode.types import ModelShape


def built_in() -> list[str]:
    """The selectors of this package, one module each; `a_b.py` holds the two stages `a+b`."""
    modules = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(module.replace("_", "+") for module in modules if module != "registry")


def _base() -> type[Selector]:
    from offload_decode.selection.selector import Selector  # with torch, which names alone do without

    return Selector


EXTENSIONS = Extensions(SELECTORS, _base, built_in)


def names() -> list[str]:
    """Every selector that `get` knows."""
    return EXTENSIONS.names()


def get(name: str) -> type[Selector]:
    """The selector class of a name: an extension's, or of the module of that name. Raises `ConfigError` and
    `ExtensionError`.
    """
    extension = EXTENSIONS.get(name)
    if extension is not None:
        return extension
    if name not in built_in():
        raise ConfigError(f"unknown selector '{name}'; known are: {', '.join(names())}")
    Selector = _base()
    module = importlib.import_module(f"offload_decode.selectors.{name.replace('+', '_')}")
    found = [
        member
        for _, member in inspect.getmembers(module, inspect.isclass)
        if issubclass(member, Selector) and getattr(member, "name", None) == name
    ]
    assert len(found) == 1, f"{module.__name__} defines one selector"
    return found[0]


def create(name: str, options: Mapping[str, object], host: HostKV, shape: ModelShape) -> Budgeted:
    """A selector over a store with options as users write them; raises as `get` does."""
    from offload_decode.selection.budgeted import Budgeted

    kind = get(name)
    given = parse_options(kind.options_type, options, f"selector '{name}'")
    budget = Budget(given.budget, given.schedule, given.dense_layers)
    budgets = budget.per_layer(host.length, shape.full_layers, shape.kv_heads)
    return Budgeted(kind(given, host, shape, budgets))
