"""Numbers of tokens as people write them: `32K` is 32,768."""

from __future__ import annotations

import re

from offload_decode.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def token_count(text: str) -> int:
    """A count such as `2048`, `2K` or `1M`; raises `ConfigError` for anything else and for 0."""
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    if found is None or int(found[1]) == 0:
        raise ConfigError(f"'{text}' is no number of tokens: write one like 2048, 32K or 1M")
    return int(found[1]) * _UNITS[found[2]]
