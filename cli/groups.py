"""Groups of options: a command takes what a group makes of its options, and Typer sees the options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints


class From:
    """`Annotated[T, From(make)]`: a parameter that `make`, a function of options, gives the value of."""

    def __init__(self, make: Callable[..., Any]):
        self.make = make


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of its groups in their place."""
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _parameters(command):
        make = _maker(parameter.annotation)
        if make is None:
            parameters.append(parameter)
            continue
        own = _parameters(make)
        groups[parameter.name] = make, [one.name for one in own]
        parameters.extend(own)

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        made = {
            name: make(**{option: given.pop(option) for option in own})
            for name, (make, own) in groups.items()
        }
        command(**given, **made)

    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what Typer reads
    flat.__annotations__ = {one.name: one.annotation for one in parameters}
    del flat.__wrapped__
    return flat


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    found = inspect.signature(function).parameters.values()
    # By name alone: an option without a default may follow one that has it.
    return [one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in found]


def _maker(annotation: Any) -> Callable[..., Any] | None:
    if get_origin(annotation) is not Annotated:
        return None
    return next((extra.make for extra in get_args(annotation)[1:] if isinstance(extra, From)), None)
