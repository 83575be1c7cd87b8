"""Selectors that score every key in a few channels: principal ones (Loki), or where |q| is large (SparQ)."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows, numpy_view
from offload_decode.common.errors import ConfigError
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.scores import blocks, top_inner_products
from offload_decode.types import Selection


def channels(amount: str, head_dim: int, option: str) -> int:
    """How many of `head_dim` channels an option asks for: a count (`16`; all, if it is more than there are)
    or a share (`25%`, rounded up). Raises `ConfigError` for anything else and for none.
    """
    try:
        count = ceil(float(amount[:-1]) / 100 * head_dim) if amount.endswith("%") else int(amount)
    except (ValueError, OverflowError) as error:
        raise ConfigError(
            f"option {option} '{amount}' is neither a count like 16 nor a share like 25%"
        ) from error
    if count < 1:
        raise ConfigError(f"option {option} '{amount}' leaves no channel: it must be at least 1")
    return min(count, head_dim)


@dataclass(frozen=True)
class LokiOptions(SelectorOptions):
    """`dims`: principal components that are scored, as a count (`32`) or a share of the dimension (`25%`)."""

    dims: str = "25%"


class Loki(Selector):
    """Score every key in the first principal components of its head's keys and select the best.

    Singhania et al. 2024: components of the keys after RoPE, one basis for each layer and KV head. They are
    computed from the stored keys themselves, the best calibration there is, and not centred: what sets the
    first token apart is that it lacks the mean of the others, a direction in which these hardly vary.
    """

    name = "loki"
    paper = "https://arxiv.org/abs/2406.02542"
    reads = "dims of D numbers of every key"
    holds = "dims of D numbers of every key, as floats, from a layer's first use on"
    options_type = LokiOptions
    options: LokiOptions

    def prepare(self) -> None:
        self.dims = channels(self.options.dims, self.shape.head_dim, "dims")
        self._rotated: dict[int, tuple[Tensor, list[Rows]]] = {}

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k best by scores in the first components."""
        if layer not in self._rotated:
            stored = self.host.layer_keys(layer)
            bases = [principal_components(own, self.dims, self.host.device) for own in stored]
            self._rotated[layer] = torch.stack(bases), [*map(rotate, stored, bases)]
        basis, keys = self._rotated[layer]
        return Selection(top_inner_products(queries.vectors @ basis, keys, k).ids)


def principal_components(keys: Rows, dims: int, device: torch.device) -> Tensor:
    """The `dims` directions in which the keys are largest, as float32 columns `[D, dims]`."""
    moments = torch.zeros(keys.dim, keys.dim, dtype=torch.float64, device=device)
    for part in blocks(len(keys)):
        rows = keys.read(part, device)
        moments += rows.T @ rows / len(keys)
    ascending: Tensor = torch.linalg.eigh(moments).eigenvectors
    return ascending.flip(-1)[:, :dims].float()


def rotate(keys: Rows, basis: Tensor) -> Rows:
    """The keys in a basis `[D, dims]`: rows of `dims` channels, plain floats."""
    rotated = torch.empty(len(keys), basis.shape[1], dtype=keys.dtype)
    for part in blocks(len(keys)):
        rotated[part] = (keys.read(part, basis.device) @ basis).cpu()
    return Rows(numpy_view(rotated))


@dataclass(frozen=True)
class SparQOptions(SelectorOptions):
    """`r`: channels that are scored, as a count (`16`) or as a share of the head dimension (`25%`)."""

    r: str = "25%"


class SparQ(Selector):
    """Score every key in the r channels in which |q| is largest and select the best.

    Ribar et al. 2023, the first step. Its temperature does not change the order of the scores, and its mean
    value of what is not selected is no part of a selection.
    """

    name = "sparq"
    paper = "https://arxiv.org/abs/2312.04985"
    reads = "r of D channels of every key (stored row by row, so that all D pass through memory)"
    holds = "nothing"
    options_type = SparQOptions
    options: SparQOptions

    def prepare(self) -> None:
        self.r = channels(self.options.r, self.shape.head_dim, "r")

    def choose(self, layer: int, queries: Queries, k: int) -> Selection:
        """The k best by approximate scores; each row has channels of its own."""
        rows = queries.vectors
        kept = rows.abs().topk(self.r, dim=-1).indices
        # Other channels at zero: one product for the whole group, although its rows differ in channels.
        sparse = torch.zeros_like(rows).scatter(-1, kept, rows.gather(-1, kept))
        return Selection(top_inner_products(sparse, self.host.layer_keys(layer), k).ids)
