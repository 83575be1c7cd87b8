"""What is said of the documents of a collection: a JSON-lines file beside the texts."""

from __future__ import annotations

import os
from pathlib import Path

from offload_decode import plain_json
from offload_decode.collections.journal import Value, check_metadata
from offload_decode.errors import ConfigError, CorpusError
from offload_decode.prefill_jobs.collect import Metadata
from offload_decode.prefill_jobs.plain_files import read_plain

_LIKE = 'each line is like {"name": "2020/report.txt", "author": "…"}'


def read_metadata(path: Path) -> Metadata:
    """What a file says of documents, by their names below the folder. Raises `ConfigError` with the line."""
    try:
        lines = read_plain(os.fspath(path), follow=True).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the metadata {path} are not UTF-8 text: give a JSONL file") from error
    except (OSError, CorpusError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"the metadata {path} cannot be read, because {reason}: give a JSONL file"
        ) from error
    found: dict[str, dict[str, Value]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            name, fields = _of_line(f"line {number} of {path}", line)
            if name in found:
                raise ConfigError(
                    f"line {number} of {path} names {name} a second time: keep one of the lines"
                )
            found[name] = fields
    return found


def _of_line(where: str, line: str) -> tuple[str, dict[str, Value]]:
    try:
        fields = plain_json.parse(line)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read ({error}): {_LIKE}") from error
    name = fields.pop("name", None) if isinstance(fields, dict) else None
    if not isinstance(name, str):
        raise ConfigError(f"{where} names no document: {_LIKE}")
    try:
        check_metadata(fields)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be used, because {error}: {_LIKE}") from error
    return name, fields
