"""Loki: keys have few dimensions that matter; scores in those, then top-k.

Singhania et al. 2024: principal components of the keys after RoPE, one basis for each layer and KV head.
They are computed from the stored keys themselves, the best calibration there is. The covariance is centred,
the scores are not: the mean key shifts all scores of a query alike, and so does not change their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows, numpy_view
from offload_decode.selectors.base import Selector, SelectorOptions
from offload_decode.selectors.scores import blocks, channels, top_inner_products
from offload_decode.types import Selection


@dataclass(frozen=True)
class Options(SelectorOptions):
    """`dims`: principal components that are scored, as a count (`32`) or a share of the dimension (`25%`)."""

    dims: str = "25%"


class Loki(Selector):
    """Score every key in the first principal components of its head's keys and select the best."""

    name = "loki"
    paper = "https://arxiv.org/abs/2406.02542"
    reads = "dims of D numbers of every key"
    holds = "dims of D numbers of every key, as floats, from a layer's first use on"
    options_type = Options
    options: Options

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
        return Selection(top_inner_products(queries.rows @ basis, keys, k).ids)


def principal_components(keys: Rows, dims: int, device: torch.device) -> Tensor:
    """The `dims` directions of largest variance of the keys, as float32 columns `[D, dims]`."""
    length, dim = len(keys), keys.dim
    mean = torch.zeros(dim, dtype=torch.float64, device=device)
    for part in blocks(length):
        mean += keys.read(part, device).sum(0) / length
    covariance = torch.zeros(dim, dim, dtype=torch.float64, device=device)
    for part in blocks(length):
        centred = keys.read(part, device) - mean.float()
        covariance += centred.T @ centred / length
    ascending: Tensor = torch.linalg.eigh(covariance).eigenvectors
    return ascending.flip(-1)[:, :dims].float()


def rotate(keys: Rows, basis: Tensor) -> Rows:
    """The keys in a basis `[D, dims]`: rows of `dims` channels, plain floats."""
    rotated = torch.empty(len(keys), basis.shape[1], dtype=keys.dtype)
    for part in blocks(len(keys)):
        rotated[part] = (keys.read(part, basis.device) @ basis).cpu()
    return Rows(numpy_view(rotated))
