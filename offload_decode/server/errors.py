"""What a server refuses beyond what the engine does; `http.errors` gives each its status."""

from __future__ import annotations

from offload_decode.errors import ConfigError, OffloadDecodeError


class Busy(OffloadDecodeError):
    """The queue is full; try again after `retry_s` seconds."""

    def __init__(self, message: str, retry_s: int = 1):
        super().__init__(message)
        self.retry_s = retry_s


class Loading(Busy):
    """What a request needs is being loaded."""


class NoSuchName(OffloadDecodeError):
    """A model, a store or a job of that name is not there."""


class TooLarge(OffloadDecodeError):
    """A body or a prompt beyond the server's limit."""


class WrongField(ConfigError):
    """A field of a request that cannot be used; `param` is its name."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class ReadOnly(OffloadDecodeError):
    """This server makes no stores, and deletes none."""


class TimedOut(OffloadDecodeError):
    """The deadline of a request has passed."""
