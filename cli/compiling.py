"""Tell the user when loops are compiled, which takes a while, once per machine."""

from functools import cache
from typing import Any

from numba.core import event

from offload_decode.cli import output


class _Announcer(event.Listener):
    """Notified of what numba compiles; loading from its cache is no compilation."""

    announced = False

    def on_start(self, event: Any) -> None:
        ours = event.data["dispatcher"].py_func.__module__.startswith("offload_decode.")
        if ours and not self.announced:
            self.announced = True
            output.note(
                "compiling the loops for this processor, once on this machine: ten to twenty seconds …"
            )

    def on_end(self, event: Any) -> None:
        """Nothing to do."""


@cache
def announce_compiling() -> None:
    """From here on, print a line on stderr when loops are compiled."""
    event.register("numba:compile", _Announcer())  # type: ignore[no-untyped-call]
