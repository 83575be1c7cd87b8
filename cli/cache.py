"""`offload-decode cache`: what this user's programs keep to be faster the next time."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Json
from offload_decode.common.errors import ConfigError

KINDS = {
    "gguf": "configs and tokenizers of GGUF files",
    "fingerprints": "fingerprints of weights, sizes of models, plain questions of citations",
    "verified": "files that were found right",
    "fetched": "what was read of stores in buckets",
    "joined": "stores of several documents, for --join exact",
}
"""By folder; others there belong to commands that are running."""


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it: it is made again.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is kept in the user's cache, or remove it.

    Each kind is bounded, and the least recently used goes first. Stores that you made are not kept there.
    """
    from offload_decode.indexes.verified import cache_folder

    home = cache_folder()
    found = [_about(home / name, kept) for name, kept in KINDS.items()]
    if clear:
        for name in KINDS:
            _clear(home / name)
    if as_json:
        output.answer_json({"folder": str(home), "cleared": clear, "kinds": found})
        return
    output.answer(f"{home}{': cleared' if clear else ''}")
    facts = [
        (one["kind"], f"{one['files']:,} files, {one['bytes'] / 1e6:,.1f} MB: {one['keeps']}")
        for one in found
    ]
    output.answer(output.facts(facts))


def _clear(folder: Path) -> None:
    """Remove what lies in a folder, which may be a link to another disk."""
    try:
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be cleared ({error.strerror}): change its permissions, or remove it yourself"
        ) from error


def _about(folder: Path, keeps: str) -> dict[str, Any]:
    sizes = []
    for path in folder.rglob("*"):
        with suppress(OSError):  # another process removed it
            if path.is_file():
                sizes.append(path.stat().st_size)
    return {"kind": folder.name, "keeps": keeps, "files": len(sizes), "bytes": sum(sizes)}
