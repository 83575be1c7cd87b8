"""`offload-decode verify`: check every byte of a store, or of the stores of a collection."""

from pathlib import Path

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE, sentence
from offload_decode.cli.options import Json, Quiet, StoreOrCollection
from offload_decode.cli.output import Progress
from offload_decode.common.errors import OffloadDecodeError


def verify(store: StoreOrCollection, as_json: Json = False, quiet: Quiet = False) -> None:
    """Check every byte of a store, or of a collection's stores and word index.

    Indexes are checked too; an unfinished one is named, and is no failure.
    """
    from offload_decode.collections.collection import is_collection

    verify_it = _verify_all if is_collection(store) else _verify_one
    if not verify_it(store, as_json, quiet):
        raise typer.Exit(FAILURE)


def _verify_one(path: Path, as_json: bool, quiet: bool) -> bool:
    with Progress(quiet) as progress:
        found = _check(path, progress)
    problems = found["problems"]
    if as_json:
        output.answer_json({"store": str(path), "ok": not problems, **found})
    elif not problems:
        output.answer(f"{path} is whole: {', '.join(found['checked'])}")
    for left in found["unfinished"]:
        output.note(f"{left}.")
    for problem in problems:
        output.note(f"error: {problem}")
    return not problems


_MADE_WITH = ("model_config_hash", "weights_hash", "tokenizer_hash", "dtype")


def _verify_all(path: Path, as_json: bool, quiet: bool) -> bool:
    from offload_decode.collections import words
    from offload_decode.collections.collection import Collection, store_name
    from offload_decode.store.reader import KVStore

    collection = Collection(path)
    problems: list[dict[str, str]] = []
    entries, header = collection.entries, collection.header
    try:
        words.verify(path / words.WORDS, [entry.store for entry in entries])
    except OffloadDecodeError as error:
        problems.append({"document": words.WORDS, "store": "", "problem": sentence(error)})
    with Progress(quiet) as progress:
        for number, entry in enumerate(entries):
            progress("verify documents", number, len(entries), entry.name)
            try:
                found = _check(collection.store(entry), Progress(quiet=True))["problems"]
            except OffloadDecodeError as error:
                found = [sentence(error)]
            if not found:
                made = KVStore.open(collection.store(entry)).manifest
                others = [name for name in _MADE_WITH if getattr(made, name) != getattr(header, name)]
                found = [f"it differs from the collection in {', '.join(others)}."] if others else []
            if entry.store != store_name(entry.name, entry.sha256):
                found.append("its entry in the list of documents was changed.")
            where = {"document": entry.name, "store": str(path / entry.store)}
            problems += [where | {"problem": problem} for problem in found]
    if as_json:
        output.answer_json(
            {"collection": str(path), "ok": not problems, "documents": len(entries), "problems": problems}
        )
    elif not problems:
        output.answer(f"{path} is whole: {output.count(len(entries), 'document')}")
    for problem in problems:
        output.note(f"error: {output.one_line(problem['document'])}: {problem['problem']}")
    if stores := dict.fromkeys(one["store"] for one in problems if one["store"]):
        output.note(f"remove the damaged stores, and collect again: {output.one_line(' '.join(stores))}")
    return not problems


def _check(path: Path, progress: Progress) -> dict[str, list[str]]:
    """What is whole, wrong and unfinished; indexes are checked only if the store is whole."""
    from offload_decode.cli.compiling import exit_on_bus_error
    from offload_decode.common.errors import VectorIndexError
    from offload_decode.kv import indexes
    from offload_decode.store.reader import KVStore, verify_store

    result: dict[str, list[str]] = {"checked": [], "problems": [], "unfinished": []}
    try:
        verify_store(path, lambda done, total: progress("verify", done, total))
    except OffloadDecodeError as error:
        return result | {"problems": [sentence(error)]}
    exit_on_bus_error()
    store = KVStore.open(path)
    result["checked"].append(output.size(sum(store.cost().values())))
    for kind in indexes.saved_kinds(store):
        try:
            left = indexes.unfinished(store, kind)
            found = [sentence(error) for error in indexes.verify(store, kind, progress)]
        except VectorIndexError as error:  # the kind is unknown, or its library is missing
            left, found = None, [sentence(error)]
        result["problems"] += found
        if left is not None:
            result["unfinished"].append(left)
        elif not found:
            result["checked"].append(f"the {kind} index")
    return result
