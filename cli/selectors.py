"""`offload-decode selectors`: the methods that choose stored tokens."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from cli import output
from cli.options import Json

if TYPE_CHECKING:
    from offload_decode.selection.selector import Selector


def selectors(as_json: Json = False) -> None:
    """List the methods that choose stored tokens.

    For each: its paper, what it reads in a step to choose, what it keeps in memory (for each layer and KV
    head, with N stored tokens of D dimensions and a budget of k), and its options with their defaults.
    Attention then reads k values, and k keys unless choosing has already given their exact scores.
    """
    from offload_decode.selectors import registry

    kinds = [registry.get(name) for name in registry.names()]
    if as_json:
        output.answer_json({"selectors": [_described(kind) for kind in kinds]})
        return
    for kind in kinds:
        about = _described(kind)
        options = " ".join(f"{key}={value}" for key, value in about.pop("options").items())
        output.answer(f"{about.pop('name')}: {about.pop('method')}")
        if about.pop("remembers"):
            output.answer("  remembers the conversation; every question starts afresh")
        facts = {**about, "options": options}
        output.answer(output.facts([(f"  {key}", text) for key, text in facts.items()]))


def _described(kind: type[Selector]) -> dict[str, Any]:
    return {
        "name": kind.name,
        "method": inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " "),
        "paper": kind.paper,
        "reads": kind.reads,
        "holds": kind.holds,
        "remembers": kind.remembers,
        "options": {field.name: field.default for field in dataclasses.fields(kind.options_type)},
    }
