"""The one runner under all evaluations: unit by unit, each written when finished; resumed after a kill."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from offload_decode.evals import results
from offload_decode.evals.made_with import made_with
from offload_decode.evals.results import Header, Record, Results
from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore


@dataclass(frozen=True)
class Unit:
    """What is measured in one go, and lost if the process is killed: `key` names it in the results; `tokens`
    is about how many it prefills.
    """

    key: str
    tokens: int


class Stores(Protocol):
    """Where evaluations get their stores from: `prefill_jobs` makes them, which stands above this room."""

    def __call__(self, text: str, report: Callable[[int], None]) -> AbstractContextManager[KVStore]:
        """Gives the store of a text; `report` is told the tokens done."""


class Evaluation(Protocol):
    """What is measured, in which units, and how."""

    name: str

    def configuration(self) -> Mapping[str, Any]:
        """Plain JSON values: all that decides what is measured, the model aside."""

    def units(self) -> Sequence[Unit]:
        """All units, in the order in which they are measured."""

    def measure(self, unit: Unit, report: Callable[[int], None]) -> Sequence[Record]:
        """The records of a unit, each with its kind as `record`; `report` is told the tokens prefilled."""


def run(
    evaluation: Evaluation,
    loaded: LoadedModel,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Measure what is not in `out` yet, and read all of it. `progress` counts tokens that are prefilled.

    Raises `ConfigError` where `out` holds something else, and whatever the evaluation raises: units that
    were finished before then stay.
    """
    units = evaluation.units()
    header = Header(evaluation.name, evaluation.configuration(), made_with(loaded), len(units), results.now())
    total = sum(unit.tokens for unit in units)
    with results.opened(out, header) as (writer, there):
        done = sum(unit.tokens for unit in units if unit.key in there.finished)
        progress(done, total)
        for unit in units:
            if unit.key in there.finished:
                continue
            began, before, size = time.monotonic(), done, unit.tokens

            def report(tokens: int, before: int = before, size: int = size) -> None:
                progress(before + min(tokens, size), total)

            records = evaluation.measure(unit, report)
            writer.unit(unit.key, records, time.monotonic() - began)
            done += size
            progress(done, total)
    return results.read(out)
