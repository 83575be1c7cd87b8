"""What a measurement of fidelity was asked for and what it found, as JSON holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.evals.agreement import Agreement
from offload_decode.evals.contender import Contender
from offload_decode.evals.exact import MEASURES


@dataclass(frozen=True)
class FidelityPlan:
    """What is measured: every contender at every budget (a count or a share), with the options that all have
    in common, on `tokens` generated tokens for each question.
    """

    contenders: tuple[Contender, ...]
    budgets: tuple[str, ...]
    questions: tuple[str, ...]
    tokens: int = 256
    common: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles over query rows."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> Self:
        """Of any number of values, at least one."""
        return cls(float(values.mean()), *(float(p) for p in np.percentile(values, (50, 95, 99))))


@dataclass(frozen=True)
class HeadFidelity:
    """One query head of one layer; see `Fidelity`."""

    layer: int
    head: int
    recall: float
    mass: float
    error: Spread
    approximation: Spread
    search: Spread


@dataclass(frozen=True)
class Fidelity:
    """Means of recall and mass, and the relative output errors, as `Exact.judge` defines them, over `rows`
    query rows: those of every searched layer and query head. `worst` has the largest mean error.
    """

    rows: int
    recall: float
    mass: float
    error: Spread
    approximation: Spread
    search: Spread
    worst: HeadFidelity
    heads: tuple[HeadFidelity, ...]


@dataclass(frozen=True)
class Entry:
    """One contender at one budget.

    `attended` stored tokens a query row of a searched layer and `bytes_moved` to the device a token, over all
    layers: both measured on the live decode steps. `stored` is None where the store keeps too few queries.
    """

    label: str
    selector: str
    options: dict[str, str]
    budget: str
    budget_tokens: float
    attended: float
    bytes_moved: float
    stored: Fidelity | None
    live: Fidelity
    agreement: Agreement


@dataclass(frozen=True)
class Failure:
    """A contender that could not be measured to the end at a budget, and why."""

    label: str
    budget: str
    error: str


@dataclass(frozen=True)
class FidelityReport:
    """The configuration, the entries in the plan's order, budget by budget, and what failed."""

    configuration: dict[str, Any]
    entries: tuple[Entry, ...]
    failures: tuple[Failure, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave."""
        entries = []
        for entry in data["entries"]:
            stored = None if entry["stored"] is None else _fidelity_from(entry["stored"])
            parts = {"live": _fidelity_from(entry["live"]), "agreement": Agreement(**entry["agreement"])}
            entries.append(Entry(**{**entry, **parts, "stored": stored}))
        failures = tuple(Failure(**failure) for failure in data["failures"])
        return cls(dict(data["configuration"]), tuple(entries), failures)


def summarize(measured: Mapping[int, Tensor]) -> Fidelity:
    """Of the measures `[5, H, T]` (`MEASURES`) of every layer's heads and rows."""
    heads = tuple(
        HeadFidelity(layer, head, **_summary(values[:, head].numpy()))
        for layer, values in measured.items()
        for head in range(values.shape[1])
    )
    rows = torch.cat([values.flatten(1) for values in measured.values()], dim=1).numpy()
    worst = max(heads, key=lambda head: head.error.mean)
    return Fidelity(rows=rows.shape[1], **_summary(rows), worst=worst, heads=heads)


def _summary(values: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Means and spreads of measures `[5, n]` by their names."""
    named = dict(zip(MEASURES, values, strict=True))
    means = {name: float(named.pop(name).mean()) for name in ("recall", "mass")}
    return {**means, **{name: Spread.of(errors) for name, errors in named.items()}}


def _fidelity_from(data: Mapping[str, Any]) -> Fidelity:
    heads = tuple(HeadFidelity(**_spreads(head)) for head in data["heads"])
    worst = HeadFidelity(**_spreads(data["worst"]))
    return Fidelity(**{**_spreads(data), "heads": heads, "worst": worst})


def _spreads(data: Mapping[str, Any]) -> dict[str, Any]:
    return {**data, **{name: Spread(**data[name]) for name in ("error", "approximation", "search")}}
