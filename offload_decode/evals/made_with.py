"""What a measurement was made with, for the configuration beside its results."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

from indexes import extensions
from offload_decode.evals.processor import cpu_name
from offload_decode.models.loading import LoadedModel

_PACKAGES = ("offload-decode", "torch", "transformers", "numpy", "zarr")


def made_with(loaded: LoadedModel) -> dict[str, Any]:
    """The model by its id and weights, its dtype, where it ran, and the versions of what ran it."""
    return {
        "model": loaded.model_id,
        "weights_hash": loaded.weights_hash,
        "dtype": loaded.dtype,
        "device": str(loaded.device),
        "processor": cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in _PACKAGES},
            **extensions.versions(),
        },
    }
