"""`offload-decode demo`: the main job from end to end, told step by step."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Annotated

import typer

from cli import output
from cli.counts import token_count
from cli.failures import FAILURE
from cli.options import Device, Json, Quiet
from cli.progress import Progress

if TYPE_CHECKING:
    from offload_decode.evals.side_by_side import Opened, WayAnswer
    from offload_decode.models.loading import LoadedModel
    from prefill_jobs.build import BuildReport
    from prefill_jobs.demo import Fact, Hidden
    from prefill_jobs.job import PrefillReport

TEXT, STORE = "python-topics.txt", "store"
_BUDGET = 64
_KIND = "faiss-ivf"
_TOPK, _DENSE = "top-k", "dense"
_ANSWER_WIDTH = 72
_RIGHT, _WRONG = "✓", "✗"

Say = Callable[[str], None]


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where the text and its store are kept.  [default: a fresh temporary folder]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(metavar="N", help="Tokens of text.")] = "32K",
    model: Annotated[
        str, typer.Option(metavar="M", help="'demo' (shipped), a transformers id, or a model's folder.")
    ] = "demo",
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show the main job on real text.

    Five facts are hidden in the Python documentation topics. They are prefilled to a store, the store is
    indexed, and a new process, which knows only the store's path, is asked for them: with top-k attention to
    64 tokens at every step and, beside it, with dense attention to all. A question about a fact that was
    never hidden is the control.

    Exits with 1 when top-k misses a fact or answers the control. What dense attention alone misses is shown,
    no more.
    """
    began = time.monotonic()
    count = token_count(tokens)
    say: Say = (lambda text: None) if as_json else output.answer
    say("Five facts are hidden in the Python documentation. Can they be found again from disk?")

    from offload_decode.models.loading import load
    from prefill_jobs.demo import hide_facts

    loaded = load(model, device)
    hidden = hide_facts(loaded.tokenizer, count)
    folder = out or Path(mkdtemp(prefix="offload-decode-demo-"))
    store = folder / STORE
    report = _prefill(loaded, hidden, folder, say, quiet)
    index = _index(store, say, quiet)
    opened, replies = _ask(store, hidden, index is not None, device, say, quiet)
    ways = list(dict.fromkeys(reply.way for reply in replies))
    found = {way: sum(_right(fact, way, replies) for fact in hidden.facts) for way in ways}
    say(_summary(found, len(hidden.facts), replies, opened.stored_tokens))
    seconds = time.monotonic() - began
    say(f"\n5  Go on: all this took {output.duration(seconds)}, and the store stays\n{_next(store)}")
    ok = all(_right(fact, _TOPK, replies) for fact in hidden.questions)
    if as_json:
        output.answer_json(
            {
                "ok": ok,
                "seconds": seconds,
                "prefill": asdict(report),
                "index": index and asdict(index),
                "process": asdict(opened),
                "facts": [asdict(fact) for fact in hidden.questions],
                "found": found,
                "replies": [asdict(reply) for reply in replies],
            }
        )
    if not ok:
        raise typer.Exit(FAILURE)


def _prefill(loaded: LoadedModel, hidden: Hidden, folder: Path, say: Say, quiet: bool) -> PrefillReport:
    from offload_decode.store.publish import refuse_existing
    from offload_decode.store.staging import write_atomically
    from prefill_jobs.corpus import TextDocument
    from prefill_jobs.job import prefill_texts

    say("\n1  Prefill: the text goes through the model once, and its keys and values stay on disk")
    refuse_existing(folder / STORE)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TEXT, hidden.text.encode())
    with Progress(quiet) as progress:
        report = prefill_texts(loaded, [TextDocument(TEXT, hidden.text)], folder / STORE, progress=progress)
    say(f"   {folder / TEXT}{' (repeated, because it is too short)' if hidden.repeated else ''}")
    say(
        f"   {report.n_tokens:,} tokens in {output.duration(report.seconds)} "
        f"({report.tokens_per_second:,.0f} tokens/s), a store of {output.size(report.bytes)}"
    )
    return report


def _index(store: Path, say: Say, quiet: bool) -> BuildReport | None:
    """The approximate index, where its library is installed."""
    from indexes.errors import MissingBackend
    from prefill_jobs.build import build_indexes

    say("\n2  Index: each KV head's keys, to be searched with the model's own queries")
    say("   flat       nothing to build: it reads every key, so its recall is 1")
    try:
        with Progress(quiet) as progress:
            report = build_indexes(store, _KIND, k=_BUDGET, progress=progress)
    except MissingBackend as error:
        say(f"   {_KIND}  left out: {error}")
        return None
    say(
        f"   {_KIND}  {report.heads} heads in {output.duration(report.seconds)}, "
        f"{output.size(report.bytes)}; "
        f"measured recall@{_BUDGET}: {report.recall:.3f}, worst head {report.lowest_recall:.3f}"
    )
    return report


def _ask(
    store: Path, hidden: Hidden, indexed: bool, device: str, say: Say, quiet: bool
) -> tuple[Opened, list[WayAnswer]]:
    from offload_decode.evals.side_by_side import Way
    from prefill_jobs.demo import ask_in_new_process

    budget = {"budget": str(_BUDGET)}
    ways = [Way(_TOPK, "topk", budget)]
    if indexed:
        ways.append(Way(f"{_TOPK}, {_KIND}", "topk", {**budget, "index": _KIND}))
    ways.append(Way(_DENSE, "dense", {}))

    say("\n3  Forget: a new process gets the path of the store, and nothing else")
    began = time.monotonic()
    questions = [fact.question for fact in hidden.questions]
    opened, written = ask_in_new_process(store, questions, ways, device)
    say(
        f"   process {os.getpid()} hands over to process {opened.process}, which has loaded the model, "
        f"opened the store\n   and warmed up in {output.duration(time.monotonic() - began)}"
    )
    say(
        f"\n4  Ask: top-k attends to {_BUDGET} stored tokens a step in each head, dense attention to all.\n"
        "   Bytes are those of stored keys and values fetched to attend to; an index searches keys in place."
    )
    replies: list[WayAnswer] = []
    with Progress(quiet) as progress:
        progress("answer", 0, len(questions))
        for number, fact in enumerate(hidden.questions, 1):
            given = [next(written) for _ in ways]
            replies += given
            progress("answer", number, len(questions))
            say(_shown(number, fact, given, opened.stored_tokens))
    return opened, replies


def _shown(number: int, fact: Fact, replies: Sequence[WayAnswer], stored: int) -> str:
    """A question, what answers it, and every reply with its costs below it."""
    hidden = fact.depth is not None
    place = (
        f"{fact.answer}, hidden at {fact.depth:.0%} of the text" if hidden else "nothing: it was never hidden"
    )
    lines = ["", f"   {number}. {fact.question}", f"      {'expected':<16}    {place}"]
    for reply in replies:
        mark = _RIGHT if _is_right(fact, reply) else _WRONG
        cost = (
            f"{reply.attended:,.0f} of {stored:,} tokens a step, "
            f"{output.size(reply.bytes_moved)}, {1000 * reply.seconds:.1f} ms a token"
        )
        lines += [f"      {reply.way:<16}  {mark} {_clipped(reply.text)}", f"{'':<26}{cost}"]
    return "\n".join(lines)


def _clipped(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _ANSWER_WIDTH else f"{line[: _ANSWER_WIDTH - 1]}…"


def _is_right(fact: Fact, reply: WayAnswer) -> bool:
    """A hidden fact is told; one that was never hidden cannot be."""
    return fact.told(reply.text) == (fact.depth is not None)


def _right(fact: Fact, way: str, replies: Sequence[WayAnswer]) -> bool:
    return all(_is_right(fact, r) for r in replies if (r.way, r.question) == (way, fact.question))


def _summary(found: Mapping[str, int], facts: int, replies: Sequence[WayAnswer], stored: int) -> str:
    def mean(way: str, cost: str) -> float:
        return fmean(getattr(reply, cost) for reply in replies if reply.way == way)

    told = "; ".join(f"{way} {number} of {facts}" for way, number in found.items())
    fewer = mean(_DENSE, "bytes_moved") / mean(_TOPK, "bytes_moved")
    return (
        f"\n   Facts found: {told}.\n"
        f"   Top-k attended to {mean(_TOPK, 'attended') / stored:.2%} of the stored tokens and fetched "
        f"{fewer:,.0f} times fewer bytes of keys and values."
    )


def _next(store: Path) -> str:
    program = "offload-decode" if shutil.which("offload-decode") else sys.argv[0]
    where = shlex.quote(str(store))
    commands = (
        f'ask {where} "…" -o budget={_BUDGET}',
        f"chat {where}",
        f"inspect {where}",
        "prefill YOUR_TEXT --model demo --out YOUR_STORE",
    )
    return "\n".join(f"   {program} {command}" for command in commands)
