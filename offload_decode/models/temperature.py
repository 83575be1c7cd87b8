"""Llama 4's temperature by position, for rows that are padded behind a prefix.

Its layers without rotary positions scale a query by the logarithm of its place (arXiv 2501.19399), which they
count themselves from the length of the cache, padding included: a padded row would be scaled as if it stood
further on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tuned_to(module: Any, query: Tensor, positions: Tensor, first: int) -> Tensor:
    """`query [B, H, T, D]`, scaled for the places `first`, `first + 1` …, scaled for `positions [B, T]`."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    counted = torch.arange(first, first + query.shape[2], device=positions.device)
    factor = _scale(module, positions) / _scale(module, counted)
    return query * factor[:, None, :, None].to(query)


def _scale(module: Any, positions: Tensor) -> Tensor:
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scale: Tensor = torch.log1p(steps) * module.attn_scale + 1.0
    return scale
