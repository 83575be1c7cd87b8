"""Which processor this is: no figure of speed means much without it."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
