"""What a measurement was made with, for the configuration beside its results."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_decode.common import plugins

if TYPE_CHECKING:
    from offload_decode.models.loading import LoadedModel


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def made_with(loaded: LoadedModel) -> dict[str, Any]:
    """The model by its id and weights, its dtype, where it ran, and the versions of what ran it."""
    packages = ("offload-decode", "torch", "transformers", "numpy", "zarr")
    return {
        "model": loaded.model_id,
        "weights_hash": loaded.weights_hash,
        "dtype": loaded.dtype,
        **({"rope": loaded.scaled} if loaded.scaled else {}),
        **({"adapter": loaded.adapter} if loaded.adapter else {}),
        "device": str(loaded.device),
        "processor": cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in packages},
            **plugins.versions(),
        },
    }
