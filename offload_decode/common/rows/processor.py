"""The instructions that compiled code may use."""

from __future__ import annotations

from numba.core import config
from numba.core.codegen import get_host_cpu_features


def features() -> frozenset[str]:
    """What numba compiles for, by LLVM's names: this processor's own instructions, or those alone that
    NUMBA_CPU_FEATURES names (none with NUMBA_CPU_NAME=generic). LLVM ends the process for any other.
    """
    named = getattr(config, "CPU_FEATURES", None)
    listed: str = get_host_cpu_features() if named is None else named  # type: ignore[no-untyped-call]
    return frozenset(name[1:] for name in listed.split(",") if name.startswith("+"))
