"""Eval tasks; `get(name)` imports the file of a task when it is asked for."""

from __future__ import annotations

from importlib import import_module

from offload_decode.evals.tasks.base import Context, Episode, Example, HiddenFacts, Material, Question, Task

_FILES = {
    "niah_single_1": "ruler",
    "niah_single_2": "ruler",
    "niah_single_3": "ruler",
    "niah_multikey_1": "ruler",
    "niah_multikey_2": "ruler",
    "niah_multikey_3": "ruler",
    "niah_multivalue": "ruler",
    "niah_multiquery": "ruler",
    "vt": "ruler",
    "cwe": "ruler",
    "fwe": "ruler",
    "qa_1": "ruler_qa",
    "qa_2": "ruler_qa",
    "plain-fact": "plain_fact",
    "key-value": "passkey",
    "key-value-words": "passkey",
    "common-words": "common_words",
    "header": "header",
    "header-one": "header",
    "passkey": "passkey",
    "count-mentions": "aggregate",
    "join-story": "aggregate",
    "every-record": "aggregate",
    "tally-lines": "aggregate",
}

__all__ = [
    "Context",
    "Episode",
    "Example",
    "HiddenFacts",
    "Material",
    "Question",
    "Task",
    "get",
    "hidden_facts",
    "names",
]


def names() -> tuple[str, ...]:
    """The names that `get` knows."""
    return tuple(_FILES)


def hidden_facts(name: str) -> HiddenFacts:
    """The task of that name, which hides facts in a text that is given. Raises ValueError for others."""
    task = get(name)
    if not isinstance(task, HiddenFacts):
        raise ValueError(f"The task {name!r} writes its own text.")
    return task


def get(name: str) -> Task:
    """The task of that name."""
    if name not in _FILES:
        raise ValueError(f"There is no task {name!r}. Choose one of: {', '.join(_FILES)}.")
    module = import_module(f"offload_decode.evals.tasks.{_FILES[name]}")
    kinds: tuple[type[Task], ...] = module.TASKS
    return next(kind() for kind in kinds if kind.name == name)
