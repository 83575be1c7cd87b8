"""What the shell offers when Tab is pressed: names that are known without heavy imports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_STORE = "zarr.json"


def selector_names(incomplete: str) -> list[str]:
    """Selectors whose names begin with `incomplete`."""
    from offload_decode.selectors.registry import names

    return [name for name in names() if name.startswith(incomplete)]


def index_kinds(incomplete: str) -> list[str]:
    """Index kinds whose names begin with `incomplete`."""
    from offload_decode.indexes.registry import kinds

    return [kind for kind in kinds() if kind.startswith(incomplete)]


def prefill_methods(incomplete: str) -> list[str]:
    """Prefill methods whose names begin with `incomplete`."""
    from offload_decode.prefill_jobs.methods.registry import names

    return [name for name in names() if name.startswith(incomplete)]


def selector_options(incomplete: str) -> list[str]:
    """KEY= of the options that most selectors have, and index=KIND."""
    keys = ("budget=", "schedule=linear", "dense_layers=", "tail=clusters", "tail=sample")
    known = [*keys, *(f"index={kind}" for kind in index_kinds(""))]
    return [option for option in known if option.startswith(incomplete)]


def stores(incomplete: str) -> Iterator[str]:
    """Stores whose path begins with `incomplete`, and folders, which may hold some."""
    folder, slash, name = incomplete.rpartition("/")
    try:
        there = sorted(Path(folder + slash or ".").expanduser().iterdir())
    except OSError:
        return
    for path in there:
        if path.name.startswith(name) and (name or not path.name.startswith(".")) and path.is_dir():
            whole = (path / _STORE).is_file()
            yield f"{folder}{slash}{path.name}{'' if whole else '/'}"
