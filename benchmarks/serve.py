"""A server of stored corpora, end to end: `python -m benchmarks.serve --store STORE`.

Clients that stream chats, each asking again as soon as it was answered, on one store and on copies of it
(`--stores 8`): tokens a second, seconds to the first token and between two, the server's memory, bytes of
stored keys and values that were read. Then the first token alone, of a server that has just started, and
again; with `--beside`, transformers' own `serve` and llama.cpp's `llama-server` too, which are given the
whole document in every prompt. The clients run on the same machine, and take their part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import history, machine, servers, tables
from benchmarks.clients import Body, Load, Seen, ask, client, load
from benchmarks.gguf_demo import write_demo
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.ruler import ASK
from offload_decode.kv.indexes import indexes_folder
from offload_decode.models.checkpoint import source_of
from offload_decode.store.reader import KVStore

OURS, TRANSFORMERS, LLAMA = "offload-decode", "transformers", "llama"


@dataclass(frozen=True)
class Row:
    """What some clients saw: seconds, and the server's bytes of memory, its `own` and with maps (`all`).
    `read`: bytes of stored keys and values for a token that was written.
    """

    stores: int
    clients: int
    tokens_per_second: float
    first_p50: float
    first_p99: float
    between_p50: float
    between_p99: float
    own: int
    all: int
    read: float
    answers: int
    errors: int


@dataclass(frozen=True)
class First:
    """Seconds to the first token of some questions about one document, one after another; or why there are
    none.
    """

    server: str
    seconds: list[float]
    own: int
    error: str | None = None


class Questions:
    """Different ones, so that no answer is remembered; of `tokens` tokens, as the end is forbidden."""

    def __init__(self, model: str, tokens: int, end: Sequence[int]):
        self.tokens = tokens
        self._more = {
            "max_tokens": tokens,
            "temperature": 0.0,
            "logit_bias": {str(token): -100.0 for token in end},
        }
        self._model = model
        self._rng = random.Random(0)

    def body(self, model: str | None = None, document: str = "") -> Body:
        """The next one, with the whole document before it where it is given."""
        question = ASK.format(key=words.key(self._rng, "eval"))
        content = f"{document}\n\n{question}" if document else question
        return {
            "model": model or self._model,
            "messages": [{"role": "user", "content": content}],
            **self._more,
        }


def counted(body: Body) -> Body:
    """With a last chunk that says how many tokens there were."""
    return {**body, "stream_options": {"include_usage": True}}


def measured(
    server: servers.Server,
    names: Sequence[str],
    questions: Questions,
    clients: int,
    times: argparse.Namespace,
) -> Row:
    """Clients spread over the stores `names`, for `times.seconds`, with `times.patience`."""

    def body(number: int, turn: int) -> Body:
        return counted(questions.body(names[number % len(names)]))

    before = server.metrics()
    seen = asyncio.run(load(server.base, body, clients, times.seconds, times.patience))
    after, memory = server.metrics(), server.memory()
    written = sum(one.tokens for one in seen.answers)
    read = after["stored_kv_read_bytes_total"] - before["stored_kv_read_bytes_total"]
    return row(len(names), seen, memory, read / max(written, 1))


def row(stores: int, seen: Load, memory: dict[str, int], read: float) -> Row:
    for error in sorted(set(seen.errors)):
        print(f"error: {error}", file=sys.stderr)
    return Row(
        stores,
        seen.clients,
        seen.tokens_per_second,
        seen.first(0.5),
        seen.first(0.99),
        seen.between(0.5),
        seen.between(0.99),
        memory["own"],
        memory["all"],
        read,
        len(seen.answers),
        len(seen.errors),
    )


def firsts(server: servers.Server, bodies: Sequence[Body], patience: float) -> First:
    """Questions one after another."""

    async def one_after_another() -> list[Seen]:
        async with client(server.base, 1, patience) as http:
            found: list[Seen] = []
            for body in bodies:
                found.append(await ask(http, body))
                if found[-1].error:
                    break
            return found

    seen = asyncio.run(one_after_another())
    error = next((one.error for one in seen if one.error), None)
    return First(server.name, [one.first for one in seen if one.pieces], server.memory()["own"], error)


def copies(store: Path, count: int, folder: Path) -> list[Path]:
    """Copies of a store and of its indexes: nothing is shared, the page cache neither."""
    found = [folder / f"copy-{number}.kv" for number in range(count)]
    for copy in found:
        shutil.copytree(store, copy)
        if indexes_folder(store).is_dir():
            shutil.copytree(indexes_folder(store), indexes_folder(copy))
    return found


def served(arguments: argparse.Namespace, questions: Questions, folder: Path) -> Iterator[Row | First]:
    """Ours, on one store and on copies of it."""
    counts = [int(count) for count in arguments.clients.split(",")]
    for stores in dict.fromkeys((1, arguments.stores)):
        paths = copies(arguments.store, stores, folder / f"{stores}-stores")
        names = [path.stem for path in paths]
        with servers.ours(paths, folder / "ours.log", *arguments.more) as server:
            bodies = [counted(questions.body(name)) for name in (*names, *names) for _ in range(3)]
            first = firsts(server, bodies, arguments.patience)
            if stores == 1:
                yield first
            for count in counts:
                print(f"{stores} stores, {count} clients", file=sys.stderr, flush=True)
                yield measured(server, names, questions, count, arguments)
        shutil.rmtree(folder / f"{stores}-stores")


def beside(arguments: argparse.Namespace, questions: Questions, folder: Path) -> Iterator[First]:
    """Other servers, the whole document in every prompt: its first question, and two more."""
    store = KVStore.open(arguments.store)
    source = source_of(store.manifest.model_id)
    document = text_of(store, source)
    bodies = [questions.body(source, document) for _ in range(3)]
    wanted: dict[str, Callable[[], servers.Server]] = {
        TRANSFORMERS: lambda: servers.transformers(source, folder / "transformers.log"),
        LLAMA: lambda: llama(arguments, source, store.manifest.n_tokens, folder),
    }
    for name in filter(None, arguments.beside.split(",")):
        print(f"beside {name}", file=sys.stderr, flush=True)
        try:
            with wanted[name]() as server:
                yield firsts(server, bodies, arguments.patience)
        except (RuntimeError, FileNotFoundError) as error:
            yield First(name, [], 0, str(error))


def llama(arguments: argparse.Namespace, source: str, tokens: int, folder: Path) -> servers.Server:
    """llama.cpp's server with the store's model, which is the demo model or a GGUF file."""
    gguf = Path(source) if source.endswith(".gguf") else write_demo(folder / "demo.gguf")
    return servers.llama(arguments.llama_server, gguf, tokens + 4096, 1, folder / "llama.log")


def text_of(store: KVStore, source: str) -> str:
    """The text that was stored."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    return str(tokenizer.decode(store.tokens.tolist(), skip_special_tokens=True))


def end_tokens(source: str) -> list[int]:
    """What ends an answer of a model."""
    from transformers import GenerationConfig

    end = GenerationConfig.from_pretrained(source).eos_token_id
    return [end] if isinstance(end, int) else list(end or ())


def show(rows: Sequence[Row]) -> str:
    """The table of clients."""
    alone = {one.stores: one.tokens_per_second for one in rows if one.clients == 1}
    heads = ["stores", "clients", "tokens/s", "x one client", "first p50, ms", "first p99, ms"]
    heads += [
        "between p50, ms",
        "between p99, ms",
        "own MB",
        "with maps MB",
        "read/token KB",
        "answers",
        "errors",
    ]
    return tables.table(
        heads,
        [
            [
                str(one.stores),
                str(one.clients),
                f"{one.tokens_per_second:,.1f}",
                f"{one.tokens_per_second / alone[one.stores]:.2f}" if one.stores in alone else "",
                *(
                    f"{1e3 * each:,.1f}"
                    for each in (one.first_p50, one.first_p99, one.between_p50, one.between_p99)
                ),
                f"{one.own / 1e6:,.0f}",
                f"{one.all / 1e6:,.0f}",
                f"{one.read / 1e3:,.1f}",
                str(one.answers),
                str(one.errors),
            ]
            for one in rows
        ],
    )


def show_firsts(rows: Sequence[First]) -> str:
    """The table of first tokens; ours is the first row."""
    ours = rows[0].seconds[1:]
    heads = ["server", "first token, s", "again, s", "x ours", "again, x ours", "own MB", ""]
    lines = []
    for one in rows:
        first, again = one.seconds[:1], one.seconds[1:]
        lines.append(
            [
                one.server,
                *(f"{min(each):,.3f}" if each else "" for each in (first, again)),
                *(f"{min(each) / min(ours):,.1f}" if each and ours else "" for each in (first, again)),
                f"{one.own / 1e6:,.0f}",
                one.error or "",
            ]
        )
    return tables.table(heads, lines)


def figures(rows: Sequence[Row], first: Sequence[First]) -> dict[str, float]:
    """Single numbers for the history."""
    found: dict[str, float] = {}
    alone = {one.stores: one.tokens_per_second for one in rows if one.clients == 1}
    for one in rows:
        name = f"{one.stores} stores/{one.clients} clients"
        found[f"{name}/tokens per second"] = one.tokens_per_second
        found[f"{name}/first p99"] = one.first_p99
        found[f"{name}/between p99"] = one.between_p99
        if one.clients > 1 and one.stores in alone:
            found[f"{name}/x one client"] = one.tokens_per_second / alone[one.stores]
    for each in first:
        for name, seconds in (("first", each.seconds[:1]), ("again", each.seconds[1:])):
            if seconds:
                found[f"{each.server}/{name} token"] = min(seconds)
    return found


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--store", type=Path, required=True, help="a store, made with `offload-decode prefill`"
    )
    parser.add_argument("--clients", default="1,4,16,64", help="at once, separated by commas")
    parser.add_argument("--stores", type=int, default=8, help="copies of the store, for the second half")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of clients")
    parser.add_argument("--beside", default="", help="other servers: transformers,llama")
    parser.add_argument("--llama-server", default="llama-server", help="llama.cpp's program")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds to wait for a token")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", type=Path, help="save everything that was measured")
    parser.add_argument("--results", type=Path, default=history.RESULTS, help="for the history")
    parser.add_argument("more", nargs="*", help="further options of serve, after --: -- -o budget=2048")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.clients, arguments.stores, arguments.tokens, arguments.seconds = "1,2", 2, 4, 1.0
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parsed(argv)
    host = machine.measure(1 << 22) if arguments.quick else machine.measure()
    manifest = KVStore.open(arguments.store).manifest
    source = source_of(manifest.model_id)
    questions = Questions(source, arguments.tokens, end_tokens(source))
    print(f"# A server of {manifest.n_tokens:,} stored tokens\n\n{host.lines()}\n", flush=True)
    with TemporaryDirectory(prefix="offload-decode-serve-") as home:
        found = [*served(arguments, questions, Path(home)), *beside(arguments, questions, Path(home))]
    rows = [one for one in found if isinstance(one, Row)]
    first = [one for one in found if isinstance(one, First)]
    print(f"{show(rows)}\n\n{show_firsts(first)}")
    settings: dict[str, Any] = {"stored tokens": manifest.n_tokens, "model": manifest.model_id}
    settings |= {"tokens": arguments.tokens, "seconds": arguments.seconds, "more": arguments.more}
    if arguments.json:
        saved: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings,
        }
        saved |= {**machine.made_with(host), "clients": [asdict(one) for one in rows]}
        saved["first tokens"] = [asdict(one) for one in first]
        arguments.json.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
    if not arguments.quick:
        history.append(arguments.results, "serve", settings, figures(rows, first), host)


if __name__ == "__main__":
    main()
