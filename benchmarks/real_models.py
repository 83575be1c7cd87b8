"""Real language models: `python -m benchmarks.real_models --models FOLDER --texts FOLDER --out FOLDER`.

Runs `offload-decode eval` for every model of `MODELS` in a folder of GGUF files, on `prose.txt`, `code.txt`
and `dialogue.txt` of another: how close selectors come to dense attention, RULER's and further tasks, and
perplexity, also behind a prefill with QuoKA. Every measurement leaves a file in `--out`, and a run that was
stopped goes on from there. Prints the tables of docs/results.md, of all that is there. On two cores all of it
takes many hours; `--only` takes the measurements whose names begin so, `--list` prints the names, `--tables`
measures nothing.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import TOOL, option_parser, table
from offload_decode.evals import runs
from offload_decode.evals.contender import DENSE, label
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.perplexity import likelihoods
from offload_decode.evals.summary import Cell, summarize
from offload_decode.models.loading import load

BUDGETS = ("64", "2%", "1024")
BEST = ("topk", "oracle", "sparq", "quest+topk", "quest")
TASKS = {
    "ruler": ("niah_multikey_1", "qa_1", "vt", "cwe", "fwe"),
    "aggregate": ("every-record", "tally-lines"),
}
FIDELITY = "fidelity.json"


@dataclass(frozen=True)
class Model:
    """A model by the pattern of its file, and the lengths of texts and of tasks that it is tried on."""

    name: str
    file: str
    lengths: tuple[str, ...]
    tasks: tuple[str, ...] = ()


MODELS = (
    Model("qwen", "Qwen2.5-Coder-0.5B-Instruct*.gguf", ("8K", "16K", "30K"), ("4K", "8K", "16K")),
    Model("smollm2", "SmolLM2-135M-Instruct*.gguf", ("7K",), ("4K",)),
    Model("gemma", "gemma-3-270m*.gguf", ("8K", "16K")),
)


@dataclass(frozen=True)
class Measurement:
    """One command of `eval`; the subject is a text, a task, or how the store was prefilled."""

    kind: str
    model: Model
    subject: str
    length: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return "-".join((self.kind, self.model.name, self.subject, self.length))


def measurements(limit: int) -> Iterator[Measurement]:
    """All of them, with so many questions a task: shorter texts first."""
    budgets = ("--budgets", ",".join(BUDGETS))
    # More tokens than weights in blocks are multiplied by at once: rounding would add a loss of its own.
    forced = (*budgets, "--tokens", "96")
    best = tuple(part for name in BEST for part in ("-s", name))
    for model in MODELS:
        first, *longer = model.lengths
        for text in ("prose", "code", "dialogue"):
            yield Measurement("fidelity", model, text, first, forced)
        for method, given in (("dense", ()), ("quoka", ("--prefill", "quoka:budget=25%"))):
            ways = (*budgets, "-s", "topk", "-s", "quest", *given)
            yield Measurement("perplexity", model, method, first, ways)
        for length in longer:
            yield Measurement("fidelity", model, "prose", length, (*forced, *best))
    for model in MODELS:
        for length in model.tasks:
            for suite, tasks in TASKS.items():
                for task in tasks:
                    asked = ("--tasks", task, "--limit", str(limit), *budgets)
                    yield Measurement(suite, model, task, length, asked)


@dataclass(frozen=True)
class Runner:
    """The folders: of GGUF files, of texts, and of what is measured."""

    models: Path
    texts: Path
    out: Path

    def finished(self, what: Measurement) -> bool:
        if what.kind == "fidelity":
            return (self.out / what.name / FIDELITY).exists()
        path = self.out / f"{what.name}.jsonl"
        if not path.exists():
            return False
        found = runs.read(path)
        return len(found.finished) == found.header.units

    def measure(self, what: Measurement) -> None:
        """Run the command, which resumes what was begun."""
        if what.kind == "fidelity":
            where = [str(self._store(what)), "--out", str(self.out / what.name)]
        else:
            where = ["--model", self._weights(what.model), "--text", str(self.texts / "prose.txt")]
            where += ["--lengths", what.length, "--out", str(self.out / f"{what.name}.jsonl")]
        _run("eval", what.kind, *where, *what.arguments)

    def _weights(self, model: Model) -> str:
        found = sorted(self.models.glob(model.file))
        if not found:
            raise SystemExit(f"{self.models} has no {model.file}: name its folder with --models")
        return str(found[0])

    def _store(self, what: Measurement) -> Path:
        """The store of the first tokens of a text, with the default index."""
        name, weights = f"{what.model.name}-{what.subject}-{what.length}", self._weights(what.model)
        store, cut = self.out / f"{name}.kv", self.out / f"{name}.txt"
        if not cut.exists():
            text = (self.texts / f"{what.subject}.txt").read_text(encoding="utf-8")
            tokens = 1024 * int(what.length.removesuffix("K"))
            cut.write_text(Haystack(name, text).cut(load(weights).tokenizer, tokens), encoding="utf-8")
        # In bfloat16 rounding adds a loss of its own, too.
        _run("prefill", str(cut), "--model", weights, "--dtype", "float32", "--out", str(store))
        _run("index", str(store))
        return store


def _run(*arguments: str) -> None:
    subprocess.run([TOOL, *arguments, "--quiet"], check=True, stdout=subprocess.DEVNULL)


def tables(out: Path) -> str:
    """Of all that is in the folder."""
    parts = [part for model in MODELS if (part := fidelity(out, model))]
    answers = [path for kind in TASKS for path in sorted(out.glob(f"{kind}-*.jsonl"))]
    cells = [(path.name.split("-")[1], cell) for path in answers for cell in _cells(path)]
    return "\n\n".join([*parts, *filter(None, (tasks(cells), perplexity(out)))])


def fidelity(out: Path, model: Model) -> str:
    """KL to dense attention at each budget, for every selector and text."""
    columns: dict[str, dict[str, list[str]]] = {}
    for path in sorted(out.glob(f"fidelity-{model.name}-*/{FIDELITY}")):
        column = columns.setdefault(" ".join(path.parent.name.split("-")[2:]), {})
        for entry in json.loads(path.read_text())["entries"]:
            if entry["selector"] != DENSE:
                column.setdefault(entry["label"], []).append(f"{entry['agreement']['kl_mean']:.2g}")
    if not columns:
        return ""
    selectors = sorted({name: None for column in columns.values() for name in column}, key=_middle(columns))
    rows = [
        [f"`{name}`", *(", ".join(own.get(name, ["-"])) for own in columns.values())] for name in selectors
    ]
    return f"{model.name}: KL at {', '.join(BUDGETS)}\n\n{table(['selector', *columns], rows)}"


def _middle(columns: dict[str, dict[str, list[str]]]) -> Any:
    """Orders selectors by their KL at the middle budget, in the first text that has them."""
    return lambda name: next(float(own[name][len(own[name]) // 2]) for own in columns.values() if name in own)


def _cells(path: Path) -> Sequence[Cell]:
    found = runs.read(path)
    return summarize(found).cells if found.finished else ()


def tasks(cells: Sequence[tuple[str, Cell]]) -> str:
    """Accuracy in percent with Wilson's interval, by task and way; the control beside them."""
    ways = list(dict.fromkeys(cell.way for _, cell in cells))
    places: dict[tuple[str, str, int], dict[str, Cell]] = {}
    for model, cell in cells:
        places.setdefault((model, cell.task, cell.length), {})[cell.way] = cell
    rows = []
    for (model, task, length), own in places.items():
        one = next(iter(own.values()))
        control = "-" if one.control is None else f"{100 * one.control.mean:.0f}"
        row = [f"{model} `{task}` {label(length)}", str(one.score.count), control]
        rows.append(row + [_accuracy(own[way]) if way in own else "-" for way in ways])
    return table(["task", "questions", "control", *ways], rows) if rows else ""


def _accuracy(cell: Cell) -> str:
    share = cell.score
    return f"{100 * share.mean:.0f} ({100 * share.low:.0f}-{100 * share.high:.0f})"


def perplexity(out: Path) -> str:
    """NLL in nats, and what every way adds to dense attention behind the same store."""
    rows = []
    for path in sorted(out.glob("perplexity-*.jsonl")):
        _, model, prefill, *_ = path.stem.split("-")
        for line in likelihoods(runs.read(path)):
            more = line.more
            interval = "" if more.low is None else f"{more.low:+.3f} to {more.high:+.3f}"
            place = f"{model} {label(line.length)}, {prefill} prefill"
            rows.append([place, line.way, f"{line.nll:.4f}", f"{more.value:+.4f}", interval])
    return table(["store", "way", "NLL", "more than dense", "95 %"], rows) if rows else ""


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of GGUF files")
    parser.add_argument("--texts", type=Path, default=Path("texts"), help="folder of the three texts")
    parser.add_argument("--out", type=Path, default=Path("real-models"), help="folder of what is measured")
    parser.add_argument("--only", default="", help="the beginning of names, such as fidelity-qwen")
    parser.add_argument("--limit", type=int, default=52, help="questions a task and length")
    parser.add_argument("--list", action="store_true", help="print the names, and measure nothing")
    parser.add_argument("--tables", action="store_true", help="print what is there, and measure nothing")
    arguments = parser.parse_args()
    wanted = [one for one in measurements(arguments.limit) if one.name.startswith(arguments.only)]
    if arguments.list:
        print("\n".join(one.name for one in wanted))
        return
    runner = Runner(arguments.models, arguments.texts, arguments.out)
    if not arguments.tables:
        runner.out.mkdir(parents=True, exist_ok=True)
        left = [one for one in wanted if not runner.finished(one)]
        for number, one in enumerate(left, 1):
            print(f"{number} of {len(left)}: {one.name} …", file=sys.stderr, flush=True)
            runner.measure(one)
    print(tables(runner.out))


if __name__ == "__main__":
    main()
