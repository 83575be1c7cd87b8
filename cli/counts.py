"""Numbers as people write them: `32K` tokens are 32,768, `16GiB` are 2**34 bytes."""

from __future__ import annotations

import re

from offload_decode.errors import ConfigError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
# More than any machine has; the system takes no limit of 2**63 bytes and more.
_MOST_TOKENS, _MOST_BYTES = 1 << 40, 1 << 60
_SHOWN = 40


def token_count(text: str) -> int:
    """A count such as `2048`, `2K` or `1M`; raises `ConfigError` for anything else, for 0 and for
    more than there can be.
    """
    found = re.fullmatch(r"(\d{1,15})([KM]?)", text.strip().upper())
    count = 0 if found is None else int(found[1]) * _UNITS[found[2]]
    if not 0 < count <= _MOST_TOKENS:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no number of tokens: write one like 2048, 32K or 1M")
    return count


def byte_count(text: str) -> int:
    """Bytes such as `16GiB`, `1.5 GB`, `512MB`; `16G` is 16GiB. Raises `ConfigError` for anything else."""
    found = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(|I?B)", text.strip().upper())
    size = (
        0
        if found is None
        else round(float(found[1]) * (1000 if found[3] == "B" else 1024) ** _PREFIXES[found[2]])
    )
    if not 0 < size <= _MOST_BYTES:
        raise ConfigError(f"'{text:.{_SHOWN}}' is no size: write one like 16GiB, 64GB or 512MB")
    return size
