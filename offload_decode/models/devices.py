"""Where a model runs, and in which dtype."""

from __future__ import annotations

import torch

from offload_decode.errors import ConfigError
from offload_decode.kv.card import RESERVE

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def check_dtype(dtype: str) -> None:
    """ConfigError for a name that is neither `auto` nor one of `DTYPES`."""
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of: auto, {', '.join(DTYPES)}")


def pick_device(device: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{device}'; choose one of: auto, cpu, cuda, cuda:0") from error
    if chosen.type == "cpu" and chosen.index is not None:
        raise ConfigError(f"unknown device '{device}'; choose one of: auto, cpu, cuda, cuda:0")
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' is not served; choose one of: auto, cpu, cuda, cuda:0")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device '{device}' is not there: torch finds no such CUDA device; use --device cpu"
        )
    return chosen


def device_room(device: torch.device) -> int:
    """Bytes that a prefill may take on a CUDA device: what the driver has free, within the cap of this
    process, and what torch's pool holds of it and nobody uses; but for the part that stays free.
    """
    free, total = torch.cuda.mem_get_info(device)
    pool, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    capped = int(torch.cuda.get_per_process_memory_fraction(device) * total) - pool
    return max(0, min(free, capped)) + pool - used - total // RESERVE
