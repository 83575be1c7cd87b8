"""Eval tasks by name."""

from offload_decode.evals.tasks import aggregate, passkey, ruler, ruler_qa
from offload_decode.evals.tasks.base import Task

_ALL: tuple[type[Task], ...] = (*ruler.TASKS, *ruler_qa.TASKS, passkey.Passkey, *aggregate.TASKS)
_TASKS: dict[str, type[Task]] = {task.name: task for task in _ALL}


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_TASKS)


def get(name: str) -> Task:
    """The task of that name."""
    if name not in _TASKS:
        raise ValueError(f"There is no task {name!r}. Choose one of: {', '.join(_TASKS)}.")
    return _TASKS[name]()
