"""`offload-decode eval ruler`: the thirteen tasks of RULER (arXiv 2404.06654)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli.eval.run import Contenders, Group, Lengths, Limit, Tasks, Text, ask_all, tasks_named
from offload_decode.cli.options import option, with_groups
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.evals.tasks.base import Task


@with_groups
def ruler(
    *,
    text: Text = None,
    lengths: Lengths = "4K,16K",
    tasks: Tasks = None,
    contenders: Contenders,
    qa: Annotated[
        list[str] | None,
        option(
            "FILE",
            "Questions and documents for qa_1 (in SQuAD's format) or qa_2 (in HotpotQA's); repeatable.  "
            "[default: questions of our own about Python's documentation topics]",
            "--qa",
            show_default=False,
        ),
    ] = None,
    limit: Limit = 20,
    how: Group,
) -> None:
    """Ask RULER's thirteen tasks.

    Needles, variables, word counts, and questions about documents. Every question is answered with dense
    attention and with each selector at each budget. Every fourth text is also asked without
    what is asked for, as a control. The worst task stands first, then the mean.
    """
    from offload_decode.evals import tasks as known
    from offload_decode.evals.tasks.ruler import SUITE

    own = _from_files(qa or [])
    names = tasks_named(tasks, SUITE)
    if left_out := [name for name in own if name not in names]:
        raise ConfigError(f"a file of --qa is for {left_out[0]}: add that to --tasks, or leave the file out")
    chosen = [own.get(name) or known.get(name) for name in names]
    ask_all("ruler", chosen, how, lengths, contenders, limit, text, tasks is not None)


def _from_files(files: Sequence[str]) -> dict[str, Task]:
    """The tasks that files of questions make, by name."""
    from offload_decode.evals.tasks import ruler_qa

    found: dict[str, Task] = {}
    for file in files:
        task = ruler_qa.task_of(ruler_qa.read(file))
        if task.name in found:
            raise ConfigError(
                f"two files are for {task.name}: give one in SQuAD's and one in HotpotQA's format"
            )
        found[task.name] = task
    return found
