"""How many stored tokens each layer may attend to (METHODS §2; the linear schedule is §4.4 of the top-k
paper).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload_decode.errors import ConfigError

SCHEDULES = ("uniform", "linear")


@dataclass(frozen=True)
class Budget:
    """A budget per layer.

    `amount`: a count (`1024`), a share of the stored tokens (`2%`), or one of these for every searched
    layer, separated by commas. `schedule`: `uniform`, or `linear` (grows linearly from the first to the
    last searched layer; same total, unless a layer's part is more than there is). `dense_layers`: layers
    that attend to everything, as indices separated by commas.
    """

    amount: str
    schedule: str = "uniform"
    dense_layers: str = ""

    def per_layer(self, n_tokens: int, layers: Sequence[int]) -> dict[int, int | None]:
        """Tokens for each of the searched `layers` (their indices in the model); None is dense."""
        dense = self._dense(layers)
        amounts = [part.strip() for part in self.amount.split(",")]
        if len(amounts) > 1 and len(amounts) != len(layers):
            raise ConfigError(
                f"budget '{self.amount}' lists {len(amounts)} layers, but {len(layers)} layers are searched"
            )
        if len(amounts) > 1 and self.schedule != "uniform":
            raise ConfigError("a budget that lists every layer has no schedule: leave 'schedule' out")
        counts = [_count(part, n_tokens) for part in (amounts if len(amounts) > 1 else amounts * len(layers))]
        if self.schedule == "linear":
            counts = _linear(counts)
        elif self.schedule != "uniform":
            raise ConfigError(f"unknown schedule '{self.schedule}'; choose one of: {', '.join(SCHEDULES)}")
        return {
            layer: None if layer in dense else min(count, n_tokens)
            for layer, count in zip(layers, counts, strict=True)
        }

    def _dense(self, layers: Sequence[int]) -> set[int]:
        try:
            dense = {int(part) for part in self.dense_layers.split(",") if part.strip()}
        except ValueError as error:
            raise ConfigError(
                f"dense_layers '{self.dense_layers}' is not a list of layer numbers like 0,1"
            ) from error
        if unknown := dense - set(layers):
            raise ConfigError(
                f"dense_layers names {sorted(unknown)}, but the searched layers are "
                f"{', '.join(map(str, layers))}"
            )
        return dense


def _count(amount: str, n_tokens: int) -> int:
    try:
        count = float(amount[:-1]) / 100 * n_tokens if amount.endswith("%") else int(amount)
    except ValueError as error:
        raise ConfigError(f"budget '{amount}' is neither a count like 1024 nor a share like 2%") from error
    if not 0 <= count < float("inf"):
        raise ConfigError(f"budget '{amount}' is out of range: it must be 0 or more")
    return round(count)


def _linear(counts: list[int]) -> list[int]:
    """2k(i+1)/(L+1) for layer i of L, rounded so that running totals, and with them the whole, stay exact."""
    layers, total = len(counts), sum(counts)
    ends = [round(total * (i + 1) * (i + 2) / (layers * (layers + 1))) for i in range(layers)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
