"""RULER's needles in stores of fewer bits: `python -m benchmarks.compact_tasks --model M --text F --out DIR`

The same questions behind keys and values as the model has them, in int8, and with values in int4, each
answered with dense attention and with the default selector and budget. Each task and kind of store leaves a
file in --out, and what was stopped goes on from there. Prints the share of the right answers in percent with
Wilson's interval.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import option_parser, table
from benchmarks.compact import BITS
from offload_decode.cli.eval.run import PrefilledStores, how_stored
from offload_decode.evals import runs
from offload_decode.evals.answering import Answering, AnswerPlan
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.summary import summarize
from offload_decode.evals.tasks import get
from offload_decode.models.loading import LoadedModel, load
from offload_decode.prefill_jobs.job import Settings

TASKS = "niah_multikey_1", "niah_single_2"
KINDS = ("clusters",)
TOPK = Contender("topk")


def asked(loaded: LoadedModel, text: Haystack, task: str, bits: str, length: int, limit: int) -> Answering:
    """The questions of one task behind stores of so many bits; no control, which they do not change."""
    settings = Settings(kv=bits)
    stored: Mapping[str, Any] = {**how_stored(settings, KINDS), "kv": bits}
    plan = AnswerPlan("ruler", (length,), (TOPK,), limit, prefill=stored, control_every=0)
    return Answering(plan, [get(task)], loaded, text, PrefilledStores(loaded, text.name, settings, KINDS))


def row(task: str, bits: str, results: runs.Results) -> list[str]:
    """What was right with dense attention and with the selector."""
    cells = {cell.way: cell.score for cell in summarize(results).cells}
    found = [cells[way] for way in (DENSE, TOPK.label)]
    right = [f"{100 * own.mean:.0f} ({100 * own.low:.0f} to {100 * own.high:.0f})" for own in found]
    return [f"{task}, {bits}", str(found[0].count), *right]


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a text")
    parser.add_argument("--limit", type=int, default=12, help="questions of a task")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = load(options.model)
    text = Haystack(options.text.name, options.text.read_text("utf-8"))
    rows = []
    for task in TASKS:
        for bits in BITS:
            evaluation = asked(loaded, text, task, bits, options.length, options.limit)
            results = runs.run(evaluation, loaded, options.out / f"{task}-{bits}.jsonl")
            rows.append(row(task, bits, results))
            print(" | ".join(rows[-1]), flush=True)
    print(table(["task, keys and values", "questions", DENSE, TOPK.label], rows))


if __name__ == "__main__":
    main()
