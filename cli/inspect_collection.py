"""`inspect` of a collection: what its documents are and what their stores take."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from offload_decode.cli import output
from offload_decode.errors import StoreDamaged

if TYPE_CHECKING:
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.journal import Entry

_SHOWN = 10


def inspect_collection(path: Path, as_json: bool) -> None:
    """Show a collection; no store is opened."""
    from offload_decode.collections.collection import Collection
    from offload_decode.collections.words import WORDS

    collection = Collection(path)
    entries, header = collection.entries, collection.header
    sizes = [_store_bytes(collection, entry) for entry in entries]
    lists = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    fields = Counter(field for entry in entries for field in entry.metadata)
    if as_json:
        output.answer_json(
            {
                "collection": str(path),
                "model": header.model_id,
                "dtype": header.dtype,
                "weights": header.weights,
                "settings": header.settings,
                "documents": [
                    {
                        "name": entry.name,
                        "tokens": entry.tokens,
                        "bytes": size,
                        "store": collection.address(entry),
                        "metadata": entry.metadata,
                    }
                    for entry, size in zip(entries, sizes, strict=True)
                ],
                "tokens": sum(entry.tokens for entry in entries),
                "bytes": lists + sum(filter(None, sizes)),
                "missing": sizes.count(None),
                "metadata": fields,
                "words": (path / WORDS).exists(),
            }
        )
        return
    tokens = sorted(entry.tokens for entry in entries) or [0]
    facts = [
        ("collection", str(path)),
        ("model", f"{header.model_id}, {header.dtype}"),
        ("weights", header.weights),
        ("prefill", ", ".join(f"{name} {value}" for name, value in header.settings.items() if value)),
        (
            "documents",
            f"{len(entries):,} of {tokens[0]:,} to {tokens[-1]:,} tokens, {sum(tokens):,} in all",
        ),
        ("on disk", f"{output.size(sum(filter(None, sizes)))} of stores, {output.size(lists)} of lists"),
        ("metadata", ", ".join(f"{name} ({count:,})" for name, count in fields.most_common()) or "none"),
    ]
    if missing := sizes.count(None):
        facts.append(("missing", f"{output.count(missing, 'store')}: collect again"))
    if not (path / WORDS).exists():
        facts.append(("words", "missing, so --top finds nothing: collect again"))
    output.answer(f"{output.facts(facts)}\n\n{output.table(_documents(entries, sizes))}")


def _store_bytes(collection: Collection, entry: Entry) -> int | None:
    """Of a store and what lies beside it; None where it is not there."""
    try:
        store = collection.store(entry)
    except StoreDamaged:  # a link, which is not followed
        return None
    if not store.is_dir():
        return None
    beside = store.with_name(f"{store.name}.indexes")
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for top in (store, beside)
        for folder, _, files in os.walk(top)
        for name in files
    )


def _documents(entries: Sequence[Entry], sizes: Sequence[int | None]) -> list[list[str]]:
    rows = [
        [entry.name, f"{entry.tokens:,}", "missing" if size is None else output.size(size)]
        for entry, size in zip(entries[:_SHOWN], sizes, strict=False)
    ]
    if more := entries[_SHOWN:]:
        tokens, rest = sum(entry.tokens for entry in more), sum(filter(None, sizes[_SHOWN:]))
        rows.append([f"… {len(more):,} more (--json lists them)", f"{tokens:,}", output.size(rest)])
    return [["documents", "tokens", "size"], *rows]
