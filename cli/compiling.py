"""Says that loops are being compiled, which happens once a machine and keeps its user waiting."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba.core import event

from offload_decode.cli import output

_ROOMS = "offload_decode."


class _Teller(event.Listener):
    """Hears of what numba compiles; what it finds in its cache is none of that."""

    told = False

    def on_start(self, event: Any) -> None:
        """One line for all that is compiled."""
        ours = event.data["dispatcher"].py_func.__module__.startswith(_ROOMS)
        if ours and not self.told:
            self.told = True
            output.note(
                "compiling the loops for this processor, once on this machine: ten to twenty seconds …"
            )

    def on_end(self, event: Any) -> None:
        """Nothing more is said."""


@cache
def tell_of_compiling() -> None:
    """From here on a line on stderr tells of loops that are compiled, where any are."""
    event.register("numba:compile", _Teller())  # type: ignore[no-untyped-call]
