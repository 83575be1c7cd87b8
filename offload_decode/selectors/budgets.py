"""How many stored tokens each layer and KV head may attend to: docs/methods.md §2."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple, Self

from offload_decode.common.errors import ConfigError

SCHEDULES = ("uniform", "linear")
SELECTED_IDS = 1 << 23  # ids and scores in memory at once: a long question is taken in parts
PASS_TOKENS = 512
"""Tokens of a question in one forward pass: a longer one is run in several."""
WHOLE_QUESTION = 4096
"""The same where the tokens of a pass choose together: up to here a question is judged as a whole."""

LEAST_PASS = 16
"""Tokens of each sequence that a pass of a batch takes at least."""


def pass_tokens(limit: int, batch: int = 1) -> int:
    """Tokens of each of `batch` sequences that are run in one pass."""
    return max(LEAST_PASS, limit // batch) if batch > 1 else limit


@dataclass(frozen=True)
class ErrorBound:
    """Relative to its length, the output of a head is to be no farther than `error` from dense attention's
    with the probability `share`.
    """

    error: float
    share: float

    @classmethod
    def parse(cls, stated: str) -> Self:
        """As users write it, `0.05@0.95`; raises `ConfigError`."""
        error, _, share = stated.partition("@")
        try:
            found = cls(float(error), float(share))
        except ValueError as problem:
            raise ConfigError(
                f"error '{stated}' is no error and how often it is kept to, as in 0.05@0.95"
            ) from problem
        if not (0 < found.error < 1 and 0.5 <= found.share < 1):
            raise ConfigError(
                f"error '{stated}' is out of range: the error is more than 0 and less than 1, and how often "
                "it is kept to at least 0.5 and less than 1, as in 0.05@0.95"
            )
        return found

    @property
    def normal(self) -> float:
        """The quantile of the normal distribution below which `share` lies, and `normal_of_sum` between which
        and its negative.
        """
        return NormalDist().inv_cdf(self.share)

    @property
    def normal_of_sum(self) -> float:
        return NormalDist().inv_cdf((1 + self.share) / 2)


class HeadBudget(NamedTuple):
    """For each query of a KV head: at most so many `tokens`, and no more than hold the share `mass` of
    its attention to the stored tokens (`offload_decode.selectors.budgeted`).
    """

    tokens: int
    mass: float | None = None


@dataclass(frozen=True)
class LayerBudget:
    """The budgets of one layer's KV heads."""

    heads: tuple[HeadBudget, ...]

    @cached_property
    def largest(self) -> int:
        """The most that any row may take; N where a share of the attention decides."""
        return max(head.tokens for head in self.heads)

    @cached_property
    def by_mass(self) -> bool:
        """Shares of the attention decide, for all heads."""
        return self.heads[0].mass is not None

    @cached_property
    def uneven(self) -> bool:
        """The heads differ."""
        return len(set(self.heads)) > 1


# By searched layer; None is everything.
Budgets = Mapping[int, LayerBudget | None]


def any_by_mass(budgets: Budgets) -> bool:
    """In some layer shares of the attention decide."""
    return any(own.by_mass for own in budgets.values() if own)


@dataclass(frozen=True)
class Budget:
    """A budget for each layer and KV head.

    `amount`: a count (`1024`), a share of the stored tokens (`2%`), or `mass=0.99`, as many as hold that
    share of the attention. One for all layers, or one for each searched layer, separated by commas; each of
    these is one for all KV heads, or one for each, separated by slashes (`64/128,2%`), all of them counts or
    all masses. `schedule`: `uniform`, or `linear` (grows linearly from the first to the last searched layer
    as far as there are tokens; same total, so that 100% is all of them in every layer). `dense_layers`:
    layers that attend to everything, as indices separated by commas, or `first:2`, those of the model's
    first two that are searched.
    """

    amount: str
    schedule: str = "uniform"
    dense_layers: str = ""

    def per_layer(self, n_tokens: int, layers: Sequence[int], kv_heads: int) -> dict[int, LayerBudget | None]:
        """Budgets of the searched `layers` (their indices in the model); None is dense."""
        dense = self._dense(layers)
        amounts = self.amount.split(",")
        if len(amounts) > 1 and len(amounts) != len(layers):
            raise ConfigError(
                f"budget '{self.amount}' lists {len(amounts)} layers, but {len(layers)} layers are searched"
            )
        if len(amounts) > 1 and self.schedule != "uniform":
            raise ConfigError("a budget that lists every layer has no schedule: leave 'schedule' out")
        wanted = [_heads(part, n_tokens, kv_heads) for part in amounts]
        if len(amounts) == 1:
            wanted *= len(layers)
        if self.schedule == "linear":
            wanted = _linear_heads(wanted, n_tokens)
        elif self.schedule != "uniform":
            raise ConfigError(f"unknown schedule '{self.schedule}'; choose one of: {', '.join(SCHEDULES)}")
        # No count is more than there is, and all of the mass is all of the tokens.
        return {
            layer: None
            if layer in dense or all(head.mass == 1 for head in heads)
            else LayerBudget(tuple(HeadBudget(min(head.tokens, n_tokens), head.mass) for head in heads))
            for layer, heads in zip(layers, wanted, strict=True)
        }

    def _dense(self, layers: Sequence[int]) -> set[int]:
        head, first, number = self.dense_layers.strip().partition("first:")
        try:
            if first and not head and int(number) >= 0:
                return {layer for layer in layers if layer < int(number)}
            dense = {int(part) for part in self.dense_layers.split(",") if part.strip()}
        except ValueError as error:
            raise ConfigError(
                f"dense_layers '{self.dense_layers}' is neither a list of layer numbers like 0,1 nor first:2"
            ) from error
        if unknown := dense - set(layers):
            raise ConfigError(
                f"dense_layers names {sorted(unknown)}, but the searched layers are "
                f"{', '.join(map(str, layers))}"
            )
        return dense


def _heads(amounts: str, n_tokens: int, kv_heads: int) -> list[HeadBudget]:
    """One layer's part of the amount: `64` or, for each KV head, `64/128`."""
    parts = amounts.split("/")
    if len(parts) == 1:
        parts *= kv_heads
    if len(parts) != kv_heads:
        raise ConfigError(f"budget '{amounts}' lists {len(parts)} heads, but a layer has {kv_heads} KV heads")
    heads = [_amount(part.strip(), n_tokens) for part in parts]
    if len({head.mass is None for head in heads}) > 1:
        raise ConfigError(
            f"budget '{amounts}' mixes a mass with counts in one layer: give all heads a mass, or none"
        )
    return heads


def _amount(amount: str, n_tokens: int) -> HeadBudget:
    head, mass, share = amount.partition("mass=")
    try:
        if mass and not head:
            if not 0 < float(share) <= 1:
                raise ConfigError(f"budget '{amount}' is out of range: a mass is more than 0 and at most 1")
            return HeadBudget(n_tokens, float(share))
        percent = float(amount[:-1]) if amount.endswith("%") else None
        count = int(amount) if percent is None else percent / 100 * n_tokens
    except ValueError as error:
        raise ConfigError(
            f"budget '{amount}' is none of these: a count like 1024, a share like 2%, or mass=0.99"
        ) from error
    if percent is not None and not 0 <= percent <= 100:
        raise ConfigError(
            f"budget '{amount}' is out of range: a share is from 0% to 100% of the stored tokens"
        )
    if count < 0:
        raise ConfigError(f"budget '{amount}' is out of range: a count is 0 or more")
    return HeadBudget(round(count))


def _linear_heads(layers: list[list[HeadBudget]], n_tokens: int) -> list[list[HeadBudget]]:
    if any(head.mass is not None for heads in layers for head in heads):
        raise ConfigError(
            "a mass finds its own number of tokens in every layer: leave 'schedule' out, or give a count"
        )
    columns = [_linear([head.tokens for head in column], n_tokens) for column in zip(*layers, strict=True)]
    return [[HeadBudget(count) for count in row] for row in zip(*columns, strict=True)]


def _linear(counts: list[int], n_tokens: int) -> list[int]:
    """2k(i+1)/(L+1) for layer i of L, rounded so that running totals, and with them the whole, stay exact.

    What is more than all tokens goes to the layers before, in the same proportions.
    """
    layers, total = len(counts), min(sum(counts), len(counts) * n_tokens)
    full = 0
    while full < layers and 2 * (total - full * n_tokens) > (layers - full + 1) * n_tokens:
        full += 1
    growing, rest = layers - full, total - full * n_tokens
    ends = [round(rest * (i + 1) * (i + 2) / (growing * (growing + 1))) for i in range(growing)]
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)] + [n_tokens] * full
