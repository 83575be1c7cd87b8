"""The files that a page is made of: runs as JSON lines, needle grids and fidelity as JSON."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indexes.plain_files import NotPlain, open_plain
from offload_decode.errors import ConfigError
from offload_decode.evals import results
from offload_decode.evals.results import Results
from offload_decode.plain_json import parse

MOST = 256 << 20  # bytes of a file that is one JSON value


def read(path: Path) -> Results | Mapping[str, Any]:
    """A run, or the object in a `needle.json` or `fidelity.json`. Raises `ConfigError` for anything else."""
    try:
        with open(open_plain(path, follow=True), "rb") as file:
            if b'"record"' in file.readline(64) or os.fstat(file.fileno()).st_size > MOST:
                return results.read(path)
            file.seek(0)
            value = parse(file.read(MOST))
    except FileNotFoundError as error:
        raise ConfigError(f"there are no results at {path}: run `offload-decode eval` first") from error
    except NotPlain as error:
        raise ConfigError(f"there are no results at {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no file of an evaluation: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("configuration"), dict):
        raise ConfigError(f"{path} is no file of an evaluation: it does not say what was measured")
    return value
