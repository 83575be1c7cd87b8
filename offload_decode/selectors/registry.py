"""Selectors by name, built in or an extension's, imported when asked for."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_decode import selectors
from offload_decode.common.errors import ConfigError
from offload_decode.common.plugins import SELECTORS, Extensions
from offload_decode.config import AUTO, parse_options
from offload_decode.selectors.budgets import Budget

if TYPE_CHECKING:
    from offload_decode.kv.host_cache import HostKV
    from offload_decode.selectors.base import Selector
    from offload_decode.selectors.budgeted import Budgeted
    from offload_decode.types import ModelShape


@cache
def _homes(path: tuple[str, ...]) -> dict[str, str]:
    """The module of each built-in selector: the one where a class says `name = "..."`."""
    found = {
        name: f"{selectors.__name__}.{file.stem}"
        for folder in path
        for file in Path(folder).glob("*.py")
        for name in re.findall(r'^    name = "(.+)"$', file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    return dict(sorted(found.items()))


def built_in() -> list[str]:
    """The selectors of this package; nothing has to be registered."""
    return list(_homes(tuple(selectors.__path__)))


_BASE = f"{selectors.__name__}.base:Selector"
EXTENSIONS: Extensions[Selector] = Extensions(SELECTORS, _BASE, lambda: _homes(tuple(selectors.__path__)))


def names() -> list[str]:
    """Every selector that `get` knows."""
    return EXTENSIONS.names()


def get(name: str) -> type[Selector]:
    """The class of a name; of `auto` that for a model without an indexer of its own. Raises `ConfigError` and
    `ExtensionError`.
    """
    if (found := EXTENSIONS.get("topk" if name == AUTO else name)) is None:
        raise ConfigError(f"unknown selector '{name}'; known are: {', '.join(names())}")
    return found


def create(name: str, options: Mapping[str, object], host: HostKV, shape: ModelShape) -> Budgeted:
    """A selector over a store with options as users write them; raises as `get` does."""
    from offload_decode.selectors.budgeted import Budgeted

    kind = get("own" if name == AUTO and shape.index is not None else name)
    given = parse_options(kind.options_type, options, f"selector '{kind.name}'")
    budget = Budget(given.budget, given.schedule, given.dense_layers)
    budgets = budget.per_layer(host.length, shape.full_layers, shape.kv_heads)
    return Budgeted(kind(given, host, shape, budgets))


def index_kind(name: str, options: Mapping[str, object]) -> str | None:
    """The kind of index that a selector searches with these options where every kind is built; None for one
    that searches none. Raises as `get`.
    """
    from offload_decode.kv.indexes import AUTO, DEFAULT

    kind = options.get("index", getattr(get(name).options_type, "index", None))
    return DEFAULT if kind == AUTO else None if kind is None else str(kind)


# Built-in selectors' declarations are read from their source, as importing them imports torch; those of
# extensions, whose source may be anything, from their class.

_VARIABLES = ("name", "paper", "reads", "holds", "remembers")


@dataclass(frozen=True)
class Declared:
    """Class variables (see `base.Selector`), the docstring's first paragraph, and options with defaults."""

    name: str
    method: str
    paper: str
    reads: str
    holds: str
    remembers: bool
    options: dict[str, object]


def declared(selector: str) -> Declared:
    """What a built-in selector declares, and inherits: class variables and defaults are literals."""
    module = _homes(tuple(selectors.__path__))[selector]
    classes = [line for line in _tree(module).body if isinstance(line, ast.ClassDef)]
    own, values = next(
        (kind, values) for kind in classes if (values := _gathered(module, kind)).get("name") == selector
    )
    return Declared(
        **{name: values[name] for name in _VARIABLES},
        method=_first_paragraph(ast.get_docstring(own)),
        options=_gathered(*values["options_type"]),
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
    """A class's variables, with inherited ones first: literals, and for a class where it is."""
    values: dict[str, Any] = {}
    for base in reversed(kind.bases):
        match base:
            case ast.Name(name) | ast.Subscript(value=ast.Name(name)):
                found = _find(module, name)
                values |= _gathered(*found) if found else {}
    for line in kind.body:
        match line:
            case ast.Assign(targets=[ast.Name(name)], value=value) if name in (*_VARIABLES, "options_type"):
                pass
            case ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value):
                pass
            case _:
                continue
        values[name] = _find(module, value.id) if isinstance(value, ast.Name) else ast.literal_eval(value)
    return values


def _find(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """A class of this package by its name in one of the modules, with the module that defines it."""
    for line in _tree(module).body:
        match line:
            case ast.ClassDef(name=own) if own == name:
                return module, line
            case ast.ImportFrom(module=str(source), names=names) if source.startswith(selectors.__name__):
                if any(alias.name == name for alias in names):
                    return _find(source, name)
    return None


@cache
def _tree(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
