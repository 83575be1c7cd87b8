"""`offload-decode eval aggregate`: what no small part of a text can tell."""

from __future__ import annotations

from offload_decode.cli.eval.run import Contenders, Group, Lengths, Limit, Tasks, Text, ask_all, tasks_named
from offload_decode.cli.options import with_groups


@with_groups
def aggregate(
    *,
    text: Text = None,
    lengths: Lengths = "4K,16K",
    tasks: Tasks = None,
    contenders: Contenders,
    limit: Limit = 20,
    how: Group,
) -> None:
    """Ask for what no small part of a text can tell.

    Counting mentions, joining the facts of a story, extracting every record as JSON, classifying and tallying
    lines: methods that attend to few tokens are known to break
    here. Every question is answered with dense attention and with each selector at each budget.
    """
    from offload_decode.evals import tasks as known
    from offload_decode.evals.tasks.aggregate import SUITE

    chosen = [known.get(name) for name in tasks_named(tasks, SUITE)]
    ask_all("aggregate", chosen, how, lengths, contenders, limit, text, tasks is not None)
