"""`offload-decode cache`: what this user's programs keep to be faster the next time."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from offload_decode.cli import output
from offload_decode.cli.options import Json

KINDS = {
    "gguf": "configs and tokenizers of GGUF files",
    "fingerprints": "fingerprints of weights, sizes of models, plain questions of citations",
    "verified": "files that were found right",
    "fetched": "what was read of stores in buckets",
}
"""By folder; others there belong to commands that are running."""


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it: it is made again.")] = False,
    as_json: Json = False,
) -> None:
    """Show what is kept in the user's cache, or remove it.

    Each kind is bounded, and the least recently used goes first. Stores and indexes are not kept there.
    """
    from offload_decode.indexes.verified import cache_folder

    home = cache_folder()
    found = [_about(home / name, kept) for name, kept in KINDS.items()]
    if clear:
        for about in found:
            shutil.rmtree(home / about["kind"], ignore_errors=True)
        if left := [name for name in KINDS if (home / name).exists()]:
            raise typer.BadParameter(f"{home / left[0]} cannot be removed: change its permissions")
    if as_json:
        output.answer_json({"folder": str(home), "cleared": clear, "kinds": found})
        return
    output.answer(f"{home}{': cleared' if clear else ''}")
    facts = [
        (one["kind"], f"{one['files']:,} files, {one['bytes'] / 1e6:,.1f} MB: {one['keeps']}")
        for one in found
    ]
    output.answer(output.facts(facts))


def _about(folder: Path, keeps: str) -> dict[str, Any]:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {"kind": folder.name, "keeps": keeps, "files": len(sizes), "bytes": sum(sizes)}
