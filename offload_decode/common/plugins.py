"""Extensions: what other distributions bring, by their entry points; see docs/extending.md.

Names come from the metadata of installed distributions, which imports nothing. An extension is imported when
it is asked for by name, so a broken one affects nobody else.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Generic, TypeVar

from offload_decode.common.errors import ExtensionError

T = TypeVar("T")

PREFIX = "offload_decode."
SELECTORS, INDEXES, METHODS = f"{PREFIX}selectors", f"{PREFIX}indexes", f"{PREFIX}prefill_methods"
GROUPS = {SELECTORS: "selector", INDEXES: "index kind", METHODS: "prefill method"}
"""Groups of entry points, and what one of each is called."""
NAME = re.compile(r"(?=.{1,64}\Z)[a-z0-9]+([-_+][a-z0-9]+)*")
"""A name is typed in a shell, is part of a path, and is followed by `:` and options."""


@dataclass(frozen=True)
class Extension:
    """An entry point: of the distribution `by` (its name and version), the class at `value`."""

    group: str
    name: str
    value: str
    by: str


class Extensions(Generic[T]):
    """The classes of a group by name: built-in ones, of which `built_in` gives the modules, and extensions.
    `base`: the class that each inherits, as `module:name`. All are imported when they are asked for.
    """

    def __init__(
        self,
        group: str,
        base: str,
        built_in: Callable[[], Mapping[str, str]],
        error: type[ExtensionError] = ExtensionError,
    ):
        self.group, self.what = group, GROUPS[group]
        self._base, self._built_in, self._error = base, built_in, error

    def installed(self) -> list[Extension]:
        """All of them, those that cannot be used included."""
        return [one for one in found()[0] if one.group == self.group]

    def names(self) -> list[str]:
        """The built-in names as they stand, and then those that are installed, sorted."""
        own = list(self._built_in())
        return own + sorted({one.name for one in self.installed() if NAME.fullmatch(one.name)} - set(own))

    def get(self, name: str) -> type[T] | None:
        """The class of that name; None where there is none. `ExtensionError` for one that cannot be used."""
        claims, own = [one for one in self.installed() if one.name == name], self._built_in()
        if not claims:
            return self._own(name, own[name]) if name in own else None
        if not NAME.fullmatch(name):
            raise self._error(
                f"the {self.what} {name!r} of {claims[0].by} cannot be used: a name has up to 64 small "
                "letters and digits, with single -, _ or + between them"
            )
        if len(claims) > 1 or name in own:
            others = ["offload-decode itself"] if name in own else []
            owners = " and ".join(others + [one.by for one in claims])
            raise self._error(
                f"the {self.what} '{name}' is brought by {owners}, and a name has one owner: uninstall "
                f"{claims[0].by.split()[0]}, or have its author choose another name"
            )
        return self._checked(claims[0])

    def _own(self, name: str, module: str) -> type[T]:
        """The class that has a name in its module."""
        base: type[T] = _at(self._base)
        kinds = [kind for kind in vars(import_module(module)).values() if isinstance(kind, type)]
        return next(kind for kind in kinds if issubclass(kind, base) and getattr(kind, "name", "") == name)

    def _checked(self, one: Extension) -> type[T]:
        """The class at an entry point, if it can be used."""
        from importlib.metadata import EntryPoint

        base, about = _at(self._base), f"the {self.what} '{one.name}' of {one.by} cannot be used"
        mend = f"mend or uninstall {one.by.split()[0]}"
        try:
            kind = EntryPoint(one.name, one.value, one.group).load()
        except (Exception, SystemExit) as error:  # a third-party module may raise anything
            said = " ".join(str(error).split())
            raise self._error(
                f"{about}, for {one.value} cannot be imported ({type(error).__name__}: {said}): {mend}"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise self._error(f"{about}, for {one.value} is no class that inherits {base.__name__}: {mend}")
        if wrong := _wrong(kind, base, one.name):
            raise self._error(f"{about}, for {kind.__name__} {wrong}: {mend}")
        return kind


def _at(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _wrong(kind: type, base: type, name: str) -> str:
    """What a class lacks of its base's interface; empty where it is complete."""
    if lacking := [said for said in inspect.get_annotations(base) if not hasattr(kind, said)]:
        return f"does not say its {' and '.join(lacking)}"
    if inspect.isabstract(kind):
        return f"does not define {' and '.join(sorted(getattr(kind, '__abstractmethods__', ())))}"
    if (own := getattr(kind, "name", None)) != name:
        return f"names itself {own!r}, which must be the name of its entry point"
    asked, options = (getattr(each, "options_type", None) for each in (base, kind))
    if isinstance(asked, type) and not (isinstance(options, type) and issubclass(options, asked)):
        return f"has an options_type that does not inherit {asked.__module__}.{asked.__name__}"
    return ""


def found() -> tuple[tuple[Extension, ...], tuple[str, ...]]:
    """The extensions of all groups, and a sentence on each distribution whose entry points cannot be used."""
    return _found(tuple(sys.path))


def versions() -> dict[str, str]:
    """Every distribution that brings extensions, with its version."""
    return {name: version for name, _, version in (one.by.partition(" ") for one in found()[0])}


@cache
def _found(path: tuple[str, ...]) -> tuple[tuple[Extension, ...], tuple[str, ...]]:
    from importlib.metadata import distributions  # which takes longer than all that follows

    extensions: dict[str, list[Extension]] = {}
    problems: list[str] = []
    for distribution in distributions(path=list(path)):
        name = None
        try:
            if f"[{PREFIX}" not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name = distribution.metadata["Name"]
            if name is None:
                raise ValueError("it has no name")
            # Of two versions on the path, the first is the one that is imported.
            first = next(iter(distributions(name=name, path=list(path))))
            extensions[name] = [
                Extension(point.group, point.name, point.value, f"{name} {first.version}")
                for point in first.entry_points
                if point.group.startswith(PREFIX)
            ]
        except Exception as error:  # noqa: BLE001  # what is wrong with one is no matter to the others
            problems.append(
                f"the entry points of {name or 'a distribution'} in {distribution.locate_file('')} cannot be "
                f"read ({type(error).__name__}: {error}): mend or uninstall it"
            )
    every = [one for own in extensions.values() for one in own]
    problems += [
        f"{one.by} has entry points of the group '{one.group}', which means nothing: the groups are "
        f"{', '.join(GROUPS)}"
        for one in every
        if one.group not in GROUPS
    ]
    return tuple(every), tuple(problems)
