"""Which models are served: those whose tiny model equals plain generation behind a stored prefix.

There is no list of families; what a config says that no tiny model could show is refused here.
"""

from __future__ import annotations

from typing import Any

import torch

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf import shape as observed
from offload_decode.hf.positions import rope_parameters, rotations
from offload_decode.types import ModelShape


def shape_of(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a text model in `dtype` (None: the checkpoint's) from its transformers config, after
    the equivalence check; raises `UnsupportedModel` with the reason.
    """
    shape = claimed_shape(config, dtype)
    from offload_decode.hf.verify import check_equivalence  # which imports transformers

    check = check_equivalence(config)
    if not check.served:
        raise UnsupportedModel(
            f"this '{config.model_type}' model is not served, because it failed the equivalence check with "
            f"plain generation behind a stored prefix: {check.reason}; use a newer release of "
            "transformers, or another model"
        )
    return shape


def claimed_shape(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """`shape_of` without the equivalence check."""
    name = config.model_type
    for rope in rotations(rope_parameters(config)):
        for field in ("rope_theta", "factor"):
            if not rope.get(field, 1.0) > 0:
                raise UnsupportedModel(
                    f"this '{name}' model has a {field} of {rope[field]}, and only positive ones make "
                    "positions: mend its config.json"
                )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # "vision": images alone
        raise UnsupportedModel(f"this '{name}' model attends to later tokens too; use a causal model")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 2:
        raise UnsupportedModel(
            f"this '{name}' model has a sliding window of {window}, in which no token sees an earlier one: "
            "mend its config.json, or use another model"
        )
    return observed.observed_shape(config, dtype)
