"""Selectors by name, built in or an extension's, imported when asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_decode import selectors
from offload_decode.common.errors import ConfigError
from offload_decode.common.plugins import SELECTORS, Extensions
from offload_decode.config import parse_options
from offload_decode.selectors.budgets import Budget

if TYPE_CHECKING:
    from offload_decode.kv.host_cache import HostKV
    from offload_decode.selectors.base import Selector
    from offload_decode.selectors.budgeted import Budgeted
    from offload_decode.types import ModelShape


_SHARED = frozenset(("base", "budgeted", "budgets", "evicting", "registry", "scores", "unselected"))
"""Modules of this package that hold no selector."""


def built_in() -> list[str]:
    """The selectors of this package, one module each; `a_b.py` holds the two stages `a+b`."""
    modules = (module.name for module in pkgutil.iter_modules(selectors.__path__))
    return sorted(module.replace("_", "+") for module in modules if module not in _SHARED)


def _base() -> type[Selector]:
    from offload_decode.selectors.base import Selector  # with torch, which names alone do without

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
    from offload_decode.selectors.budgeted import Budgeted

    kind = get(name)
    given = parse_options(kind.options_type, options, f"selector '{name}'")
    budget = Budget(given.budget, given.schedule, given.dense_layers)
    budgets = budget.per_layer(host.length, shape.full_layers, shape.kv_heads)
    return Budgeted(kind(given, host, shape, budgets))


# Built-in selectors' declarations are read from their source, as importing them imports torch; those of
# extensions, whose source may be anything, from their class.

_VARIABLES = ("name", "paper", "reads", "holds", "remembers")


@dataclass(frozen=True)
class Declared:
    """A selector's class variables (see `base.Selector`), its docstring's first paragraph, and
    its options with their defaults.
    """

    name: str
    method: str
    paper: str
    reads: str
    holds: str
    remembers: bool
    options: dict[str, object]


def declared(selector: str) -> Declared:
    """What the built-in selector of that name declares, and inherits. Class variables and defaults are
    literals.
    """
    module = f"offload_decode.selectors.{selector.replace('+', '_')}"
    own = next(each for each in _classes(module) if _own(module, each).get("name") == selector)
    values = _gathered(module, own)
    options_module, options = values["options_type"]
    return Declared(
        **{name: values[name] for name in _VARIABLES},
        method=_first_paragraph(ast.get_docstring(own)),
        options=_gathered(options_module, _class(options_module, options)),
    )


def declared_by(kind: type[Selector]) -> Declared:
    """What a class declares."""
    return Declared(
        **{name: getattr(kind, name) for name in _VARIABLES},
        method=_first_paragraph(inspect.getdoc(kind)),
        options={option.name: option.default for option in fields(kind.options_type)},
    )


def _first_paragraph(docstring: str | None) -> str:
    return (docstring or "").partition("\n\n")[0].replace("\n", " ")


def _gathered(module: str, kind: ast.ClassDef) -> dict[str, Any]:
    """The class variables of a class and of those that it inherits from, in the order of a dataclass."""
    values: dict[str, Any] = {}
    for base in reversed(kind.bases):
        place, name = _resolved(module, base.value if isinstance(base, ast.Subscript) else base)
        if place.startswith("offload_decode.selectors"):
            values |= _gathered(place, _class(place, name))
    return values | _own(module, kind)


def _own(module: str, kind: ast.ClassDef) -> dict[str, Any]:
    """The class variables that a class sets: literals, and (module, name) for what is named."""
    values: dict[str, Any] = {}
    for line in kind.body:
        match line:
            case ast.Assign(targets=[ast.Name(name)], value=value) if name in (*_VARIABLES, "options_type"):
                pass
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                pass
            case _:
                continue
        named = isinstance(value, ast.Name | ast.Attribute)
        values[name] = _resolved(module, value) if named else ast.literal_eval(value)
    return values


def _resolved(module: str, expression: ast.expr) -> tuple[str, str]:
    """The module and the name of what an expression in `module` names."""
    imported = {
        alias.asname or alias.name: (line.module or "", alias.name)
        for line in ast.walk(_tree(module))
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    match expression:
        case ast.Attribute(value=ast.Name(name), attr=attribute):
            return ".".join(imported[name]), attribute
        case ast.Name(name):
            return imported.get(name, (module, name))
    raise ValueError(f"{ast.unparse(expression)} in {module} names nothing")


def _class(module: str, name: str) -> ast.ClassDef:
    return next(kind for kind in _classes(module) if kind.name == name)


def _classes(module: str) -> list[ast.ClassDef]:
    return [line for line in _tree(module).body if isinstance(line, ast.ClassDef)]


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
