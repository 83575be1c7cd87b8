"""Libraries of the extra `eval` (plots, the report, statistics), imported where they are first needed."""

import importlib
from typing import Any

from offload_decode.common.errors import ConfigError

STATISTICS = ("scipy.stats", "statsmodels.stats.proportion")
REPORT = (*STATISTICS, "matplotlib", "jinja2")


def library(name: str) -> Any:
    """A module of the extra `eval`. Raises `ConfigError` with the way to install it where it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name.partition('.')[0]}, which cannot be imported ({error}): "
            "pip install 'offload-decode[eval]'"
        ) from error


def require(*names: str) -> None:
    """Raises as `library` for the first that is missing: to be called before hours of measuring."""
    for name in names:
        library(name)
