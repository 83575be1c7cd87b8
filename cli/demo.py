"""`offload-decode demo`: prefill, index and ask, step by step."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE
from offload_decode.cli.options import MODEL_FOLDER, Device, Json, Quiet, a_path, option, token_count
from offload_decode.cli.output import Progress
from offload_decode.common.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.evals.demo import Fact, Hidden
    from offload_decode.evals.side_by_side import Opened, WayAnswer
    from offload_decode.models.loading import LoadedModel
    from offload_decode.prefill_jobs.indexing import BuildReport
    from offload_decode.prefill_jobs.job import PrefillReport

TEXT, STORE = "python-topics.txt", "store"
_BUDGET = 64
_TOKENS, _ROOM = 32 * 1024, 512
_DEFAULT, _EXACT = "clusters", "flat"
_BESIDE = ("faiss-ivf", "hnswlib")
_DENSE = "dense"
_ANSWER_WIDTH = 72
_RIGHT, _WRONG = "✓", "✗"

Say = Callable[[str], None]


def demo(
    out: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Where the text and its store are written.  [default: a new temporary folder]",
            parser=a_path,
        ),
    ] = None,
    tokens: Annotated[
        str | None, option("N", "Tokens of text.  [default: 32K, or what the model was trained for]")
    ] = None,
    model: Annotated[str, option("M", MODEL_FOLDER)] = "demo",
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the main job on real text.

    Five facts are hidden in the Python documentation topics. The text is prefilled to a store, the store is
    indexed, and a new process, which knows only the store's path, answers questions about them with top-k
    attention: 64 tokens at every step, found by the default index. The same questions are answered with the
    other indexes, and with dense attention to all tokens. A question about a fact that was never hidden is
    the control.

    Exit code 1 means that the default index missed a fact or answered the control. Misses of the others are
    only shown.
    """
    began = time.monotonic()
    count = None if tokens is None else token_count(tokens)
    if out is not None and os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"{out} is not a folder: choose another --out")
    say: Say = (lambda text: None) if as_json else output.answer
    say("Five facts are hidden in the Python documentation. Can they be found again from disk?")

    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.evals.demo import hide_facts
    from offload_decode.models.loading import load

    announce_compiling()
    loaded = load(model, device)
    hidden = hide_facts(loaded.tokenizer, count or _trained(loaded))
    folder = out or Path(mkdtemp(prefix="offload-decode-demo-"))
    store = folder / STORE
    report = _prefill(loaded, hidden, folder, say, quiet)
    built = _index(store, say, quiet)
    opened, replies = _ask(store, hidden, built, device, say, quiet)
    say(_summary(hidden, built, replies, opened.stored_tokens))
    seconds = time.monotonic() - began
    say(f"\n5  Go on: all this took {output.duration(seconds)}, and the store stays\n{_next(store, model)}")
    ok = all(_right(fact, _DEFAULT, replies) for fact in hidden.questions)
    if as_json:
        told = {"ok": ok, "seconds": seconds, "prefill": asdict(report), "process": asdict(opened)}
        told |= {"indexes": {kind: asdict(index) for kind, index in built.items()}}
        told |= {"found": {way: _found(hidden, way, replies) for way in (*built, _EXACT, _DENSE)}}
        told |= {"facts": [asdict(fact) for fact in hidden.questions]}
        output.answer_json(told | {"replies": [asdict(reply) for reply in replies]})
    if not ok:
        raise typer.Exit(FAILURE)


def _trained(loaded: LoadedModel) -> int:
    """At most `_TOKENS`, with room for facts, a question and an answer in what the model was trained for."""
    most = getattr(loaded.model.config, "max_position_embeddings", None)
    return _TOKENS if most is None else min(_TOKENS, max(most - _ROOM, most // 2))


def _prefill(loaded: LoadedModel, hidden: Hidden, folder: Path, say: Say, quiet: bool) -> PrefillReport:
    from offload_decode.common import files
    from offload_decode.prefill_jobs.corpus import TextDocument
    from offload_decode.prefill_jobs.job import prefill_texts
    from offload_decode.store.writer import refuse_existing

    say("\n1  Prefill: the text goes through the model once, and its keys and values stay on disk")
    refuse_existing(folder / STORE)
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / TEXT, hidden.text.encode())
    with Progress(quiet) as progress:
        report = prefill_texts(loaded, [TextDocument(TEXT, hidden.text)], folder / STORE, progress=progress)
    say(f"   {folder / TEXT}{' (repeated, because it is too short)' if hidden.repeated else ''}")
    say(
        f"   {report.n_tokens:,} tokens in {output.duration(report.seconds)} "
        f"({report.tokens_per_second:,.0f} tokens/s), a store of {output.size(report.bytes)}"
    )
    return report


def _index(store: Path, say: Say, quiet: bool) -> dict[str, BuildReport]:
    from offload_decode.common.errors import MissingBackend
    from offload_decode.prefill_jobs.indexing import build_indexes

    say("\n2  Index: each KV head's keys, so that a search need not read them all")
    built: dict[str, BuildReport] = {}
    width = max(map(len, (_DEFAULT, *_BESIDE)))
    for kind in (_DEFAULT, *_BESIDE):
        try:
            with Progress(quiet) as progress:
                built[kind] = report = build_indexes(store, kind, k=_BUDGET, progress=progress)
        except MissingBackend as error:
            say(f"   {kind:<{width}}  left out: {error}")
            continue
        about = "the default" if kind == _DEFAULT else "for comparison"
        say(f"   {kind:<{width}}  {report.heads} heads in {output.duration(report.seconds)} ({about})")
    say(f"   {_EXACT:<{width}}  nothing to build: it reads every key")
    return built


def _ask(
    store: Path, hidden: Hidden, built: Mapping[str, BuildReport], device: str, say: Say, quiet: bool
) -> tuple[Opened, list[WayAnswer]]:
    from offload_decode.evals.demo import ask_in_new_process
    from offload_decode.evals.side_by_side import Way

    ways = [
        Way(way, "dense", {}) if way == _DENSE else Way(way, "topk", {"budget": str(_BUDGET), "index": way})
        for way in (*built, _EXACT, _DENSE)
    ]
    say("\n3  Forget: a new process gets the path of the store, and nothing else")
    began = time.monotonic()
    questions = [fact.question for fact in hidden.questions]
    opened, written = ask_in_new_process(store, questions, ways, device)
    say(
        f"   process {os.getpid()} hands over to process {opened.process}, which has loaded the model, "
        f"opened the store\n   and warmed up in {output.duration(time.monotonic() - began)}"
    )
    say(
        f"\n4  Ask: top-k attends to {_BUDGET} stored tokens a step in each head, dense attention to all "
        f"{opened.stored_tokens:,}"
    )
    replies: list[WayAnswer] = []
    with Progress(quiet) as progress:
        progress("answer", 0, len(questions))
        for number, fact in enumerate(hidden.questions, 1):
            given = [next(written) for _ in ways]
            replies += given
            progress("answer", number, len(questions))
            say(_shown(number, fact, given))
    return opened, replies


def _shown(number: int, fact: Fact, replies: Sequence[WayAnswer]) -> str:
    place = f"the control: {fact.answer} was never hidden, so no answer may hold it"
    if fact.depth is not None:
        place = f"hidden at {fact.depth:.0%} of the text: {fact.answer}"
    by_text: dict[str, list[WayAnswer]] = {}
    for reply in replies:
        by_text.setdefault(reply.text, []).append(reply)
    lines = ["", f"   {number}. {fact.question}", f"      {place}"]
    for text, given in by_text.items():
        mark = _RIGHT if _is_right(fact, given[0]) else _WRONG
        same = "all" if len(given) == len(replies) else ", ".join(reply.way for reply in given)
        line = " ".join(text.split())
        line = line if len(line) <= _ANSWER_WIDTH else f"{line[: _ANSWER_WIDTH - 1]}…"
        lines.append(f"      {mark} {line}  ({same})")
    return "\n".join(lines)


def _is_right(fact: Fact, reply: WayAnswer) -> bool:
    return fact.told(reply.text) == (fact.depth is not None)


def _right(fact: Fact, way: str, replies: Sequence[WayAnswer]) -> bool:
    return all(_is_right(fact, r) for r in replies if (r.way, r.question) == (way, fact.question))


def _found(hidden: Hidden, way: str, replies: Sequence[WayAnswer]) -> int:
    return sum(_right(fact, way, replies) for fact in hidden.facts)


def _summary(
    hidden: Hidden, built: Mapping[str, BuildReport], replies: Sequence[WayAnswer], stored: int
) -> str:
    def mean(way: str, cost: str) -> float:
        return fmean(getattr(reply, cost) for reply in replies if reply.way == way)

    heading = (f"recall@{_BUDGET}", "bytes a token", "time a token", "facts", "control")
    rows = [("", "built in", "size", *heading)]
    for way in (*built, _EXACT, _DENSE):
        built_in, size, recall = "-", "-", "1" if way == _EXACT else "-"
        if index := built.get(way):
            built_in, size = output.duration(index.seconds), output.size(index.bytes)
            recall = f"{index.recall:.3f}"
        label = "dense attention" if way == _DENSE else f"top-k, {way}"
        moved, took = output.size(mean(way, "bytes_moved")), f"{1000 * mean(way, 'seconds'):.1f} ms"
        found = f"{_found(hidden, way, replies)} of {len(hidden.facts)}"
        control = _RIGHT if _right(hidden.control, way, replies) else _WRONG
        rows.append((label, built_in, size, recall, moved, took, found, control))
    share = mean(_DEFAULT, "attended") / stored
    fewer = mean(_DENSE, "bytes_moved") / mean(_DEFAULT, "bytes_moved")
    told = (
        f"\n\nWith {_DEFAULT}, the default, top-k attended to {share:.2%} of the stored tokens\n"
        f"and fetched {fewer:,.0f} times fewer bytes of keys and values."
    )
    return "\n" + textwrap.indent(output.table(rows) + told, "   ")


def _next(store: Path, model: str) -> str:
    program = "offload-decode" if shutil.which("offload-decode") else sys.argv[0]
    where = shlex.quote(str(store))
    commands = (
        f'ask {where} "…" -o budget={_BUDGET}',
        f"chat {where}",
        f"inspect {where}",
        f"prefill YOUR_TEXT --model {shlex.quote(model)} --out YOUR_STORE",
    )
    return "\n".join(f"   {program} {command}" for command in commands)
