"""What a run of `eval perplexity` says: likelihoods by way and length, and how far each is from dense."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offload_decode.errors import ConfigError
from offload_decode.evals.contender import DENSE
from offload_decode.evals.perplexity import NLL, UNIGRAM
from offload_decode.evals.results import Record, Results
from offload_decode.evals.stats import Estimate, block_mean

BLOCK = 32
"""Tokens in a row that are taken as one when an interval is computed: neighbours are not independent."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Likelihood:
    """One way of attending at one length, over `tokens` predicted ones: the mean NLL in nats and its
    perplexity; `more`: by how much it is above that of dense attention on the same tokens. `attended` and
    `tail_share` are means of the records', None where these have none.
    """

    way: str
    length: int
    tokens: int
    nll: float
    perplexity: float
    more: Estimate
    attended: float | None
    tail_share: float | None


@dataclass(frozen=True)
class Point:
    """One way over a stretch of the text: predicted tokens from `first` to `last`, the mean NLL there, and by
    how much it is above that of dense attention.
    """

    way: str
    first: int
    last: int
    nll: float
    more: Estimate


def likelihoods(results: Results) -> list[Likelihood]:
    """One for each way and length, lengths ascending, ways in the order in which they were measured."""
    found = []
    for length, ways in sorted(_by_length(results).items()):
        for way, records in ways.items():
            ours, dense = _arrays(records), _arrays(ways[DENSE])
            mean = float(np.concatenate(ours).mean())
            found.append(
                Likelihood(
                    way,
                    length,
                    sum(map(len, ours)),
                    mean,
                    math.exp(min(mean, 700.0)),
                    block_mean([own - other for own, other in zip(ours, dense, strict=True)], BLOCK),
                    _mean(record["attended"] for record in records),
                    _mean(record["tail_share"] for record in records),
                )
            )
    return found


def at_chance(found: Sequence[Likelihood]) -> list[str]:
    """A sentence where dense attention predicts no better than how often each token has come before."""
    lost = [each.length for each in found if each.way == UNIGRAM and (each.more.low or 0.0) <= 0]
    if not lost:
        return []
    at = ", ".join(f"{length:,}" for length in lost)
    return [
        f"At {at} tokens this model predicts the text no better than counts of its tokens do ({UNIGRAM}): "
        "nothing here says anything about a selector."
    ]


def curve(results: Results, points: int = 32) -> list[Point]:
    """NLL by position: for each way at most so many stretches of whole chunks, about equally long."""
    found = []
    for ways in _by_length(results).values():
        for way, records in ways.items():
            pairs = sorted(
                zip(records, ways[DENSE], strict=True), key=lambda pair: (pair[0]["first"], pair[0]["place"])
            )
            at = sorted({record["first"] for record in records})
            stretches = np.array_split(np.array(at), min(points, len(at)))
            for stretch in stretches:
                inside = [pair for pair in pairs if stretch[0] <= pair[0]["first"] <= stretch[-1]]
                ours, dense = (_arrays([pair[side] for pair in inside]) for side in (0, 1))
                last = max(record["first"] + len(record["nll"]) - 1 for record, _ in inside)
                more = block_mean([own - other for own, other in zip(ours, dense, strict=True)], BLOCK)
                found.append(Point(way, int(stretch[0]), last, float(np.concatenate(ours).mean()), more))
    return found


def _by_length(results: Results) -> Mapping[int, Mapping[str, list[Record]]]:
    """Records by length and way, those of each way in the order of the units."""
    found: dict[int, dict[str, list[Record]]] = {}
    for record in results.of(NLL):
        _check(record, results)
        found.setdefault(record["length"], {}).setdefault(record["way"], []).append(record)
    for ways in found.values():
        dense = [(record["unit"], len(record["nll"])) for record in ways.get(DENSE, ())]
        for records in ways.values():
            if [(record["unit"], len(record["nll"])) for record in records] != dense:
                raise ConfigError(
                    f"{results.path} was changed: not every way predicts what dense attention does"
                )
    return found


def _check(record: Record, results: Results) -> None:
    """Raises `ConfigError` for a record that is not as `Perplexity` writes it."""
    kinds = {"way": str, "place": int, "length": int, "first": int, "nll": list}
    numbers = record.get("nll") if isinstance(record.get("nll"), list) else []
    proper = all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    shares = [record.get("attended"), record.get("tail_share")]
    if (
        not proper
        or not numbers
        or not all(map(_is_number, [*numbers, *(one for one in shares if one is not None)]))
    ):
        raise ConfigError(
            f"a record '{NLL}' of unit '{record['unit']}' of {results.path} is not whole: the file was "
            "changed or is of another release"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _arrays(records: Iterable[Record]) -> list[Array]:
    return [np.array(record["nll"], np.float64) for record in records]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
