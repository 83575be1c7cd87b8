"""`offload-decode eval ablation`: one selector with every combination of some options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

from offload_decode.cli.eval.run import (
    Group,
    Lengths,
    Limit,
    Tasks,
    Text,
    ask_all,
    checked_selector,
    tasks_named,
)
from offload_decode.cli.options import Selector, option, with_groups
from offload_decode.common.errors import ConfigError
from offload_decode.config import split_pairs
from offload_decode.evals.contender import Contender

_BUDGET = "64"
_MOST = 256  # combinations: more are a slip of the pen


@with_groups
def ablation(
    *,
    selector: Selector = "topk",
    option: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "An option of the selector. Given several times with different values, it makes the grid: "
            "-o budget=64 -o budget=256 -o tail=off -o tail=clusters are four ways.",
            "-o",
            "--option",
            show_default=False,
        ),
    ] = None,
    text: Text = None,
    tasks: Tasks = None,
    lengths: Lengths = "4K",
    limit: Limit = 20,
    how: Group,
) -> None:
    """Try a selector's options in a grid.

    Every combination answers the same questions as dense attention does, and stands in a line of its own.
    """
    from offload_decode.evals import tasks as known

    contenders = _grid(selector, option or [])
    chosen = [known.get(name) for name in tasks_named(tasks, known.names())]
    ask_all("ablation", chosen, how, lengths, contenders, limit, text, tasks is not None)


def _grid(selector: str, option: Sequence[str]) -> tuple[Contender, ...]:
    """Every combination of the values, in the order in which they were given."""
    values: dict[str, dict[str, None]] = {}
    for pair in option:
        ((name, value),) = split_pairs([pair]).items()
        values.setdefault(name, {})[value] = None
    values.setdefault("budget", {_BUDGET: None})
    ways = list(itertools.islice(itertools.product(*values.values()), _MOST + 1))
    if len(ways) > _MOST:
        raise ConfigError(f"these options make more than {_MOST} combinations: try fewer of them at a time")
    found = tuple(Contender(selector, dict(zip(values, way, strict=True))) for way in ways)
    for way in found:
        checked_selector(way.selector, way.options)
    return found
