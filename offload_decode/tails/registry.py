"""Tail estimates by the option that names them."""

from __future__ import annotations

from offload_decode.errors import ConfigError
from offload_decode.kv.host import HostKV
from offload_decode.tails.base import Tail
from offload_decode.tails.clusters import ClusterTail
from offload_decode.tails.sample import SampleTail

OFF = "off"
_KINDS: dict[str, type[Tail]] = {kind.name: kind for kind in (ClusterTail, SampleTail)}


def create(option: str, host: HostKV) -> Tail | None:
    """The estimate of `off`, `name` or `name:size`; None is off. Raises `ConfigError` for anything else."""
    if option == OFF:
        return None
    name, colon, number = option.partition(":")
    if name not in _KINDS:
        raise ConfigError(
            f"tail '{option}' is unknown: choose {OFF}, {' or '.join(_KINDS)}, or one with a size, "
            "as in sample:512"
        )
    kind = _KINDS[name]
    size = kind.default_size
    if colon:
        whole = number.isascii() and number.isdigit() and len(number) < 10
        if not (whole and kind.least_size <= int(number) <= kind.largest_size):
            raise ConfigError(
                f"tail '{option}' needs a whole number from {kind.least_size} to {kind.largest_size} "
                f"after the colon, as in {name}:{kind.default_size}"
            )
        size = int(number)
    return kind(host, size)
