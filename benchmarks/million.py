"""A million tokens on a small machine: `python benchmarks/million.py TEXT`.

Ten needles are hidden in TEXT, at depths from 5 % to 95 %. It is prefilled with QuoKA by the command line,
and so is TEXT as it is, the control. Every needle is then asked for in both stores, in every way, by default
with attention to ten stored tokens at most. Prints the time, the peak memory, the store's size and every
answer; exits with 1 where a needle is missed or the control knows one. Run again after an interruption, it
goes on where it stopped. Longer than trained: `--model M.gguf --tokens 65000 --rope yarn:4 -s dense`.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from offload_decode.cli.eval.run import read_contenders
from offload_decode.config import split_pairs
from offload_decode.engine.engine import Engine
from offload_decode.evals.haystack import Haystack
from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import insert, string_match
from offload_decode.evals.tasks.ruler import ASK, FACT, MultiKeyNeedle
from offload_decode.models.loading import load

NEEDLES = 10
DEPTHS = tuple((place + 0.5) / NEEDLES for place in range(NEEDLES))


def right(expected: str, answer: str) -> bool:
    """Whether an answer has the number of a needle."""
    return string_match((expected,), answer) == 1


def drawn(seed: int) -> dict[str, str]:
    """Ten keys, no two of which share a word, and the number of each."""
    rng = random.Random(seed)
    keys: list[str] = []
    while len(keys) < NEEDLES:
        key = words.key(rng)
        if not {part for other in keys for part in other.split("-")} & set(key.split("-")):
            keys.append(key)
    numbers = words.distinct(lambda: words.number(rng), NEEDLES)
    return dict(zip(keys, numbers, strict=True))


def prefill(text: Path, store: Path, model: str, rope: str, options: list[str]) -> dict[str, Any]:
    """Run `offload-decode prefill`, which goes on where it was stopped, and keeps a store that is whole. The
    report of the run that finished it stays beside it.
    """
    saved = store.with_suffix(".json")
    tool = Path(sys.executable).with_name("offload-decode")
    command = [str(tool), "prefill", str(text), "--model", model, "--out", str(store)]
    command += ["--method", "quoka", "--rope", rope, "--json"]
    command += [part for option in options for part in ("-o", option)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(ran.stdout)
    if report["kept"] and saved.exists():
        report = json.loads(saved.read_text())
    else:
        saved.write_text(ran.stdout)
    return report


def described(report: dict[str, Any]) -> str:
    """What a prefill took."""
    if report["kept"]:
        return f"{report['n_tokens']:,} tokens, there already, store {report['bytes'] / 1e9:.2f} GB"
    begun = f" from token {report['resumed_from']:,} on" if report["resumed_from"] else ""
    return (
        f"{report['n_tokens']:,} tokens{begun} in {report['seconds']:,.0f} s "
        f"({report['tokens_per_second']:,.0f} tokens/s), peak memory {report['peak_memory'] / 1e6:,.0f} MB, "
        f"store {report['bytes'] / 1e9:.2f} GB"
    )


def ask(engine: Engine, questions: list[str]) -> list[tuple[str, float]]:
    """The answers, each with the seconds that it took."""
    replies = []
    for question in questions:
        began = time.perf_counter()
        text = engine.answer(question, MultiKeyNeedle.max_new_tokens).text
        replies.append((text, time.perf_counter() - began))
    return replies


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, metavar="TEXT", help="a text file of a million tokens or more")
    parser.add_argument("--model", default="demo", help="a model that was trained on such questions")
    parser.add_argument("--out", type=Path, default=Path("million"), help="folder for texts and stores")
    parser.add_argument("--tokens", type=int, help="use so many tokens of the text; default: all")
    parser.add_argument("--rope", default="", help="as for the command prefill")
    parser.add_argument(
        "-s",
        "--selector",
        action="append",
        help="how stored tokens are chosen, as for eval; repeatable; default: quoka:budget=2,10",
    )
    parser.add_argument("--seed", type=int, default=1, help="draws the needles")
    parser.add_argument(
        "-o",
        "--option",
        action="append",
        help="option of the prefill; default: queries=16, budget=2048 and chunk=2048",
    )
    arguments = parser.parse_args()
    options = arguments.option or ["queries=16", "budget=2048", "chunk=2048"]
    split_pairs(options)

    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded, text = load(arguments.model, rope=arguments.rope), arguments.text.read_text()
    if arguments.tokens:
        text = Haystack(arguments.text.name, text).cut(loaded.tokenizer, arguments.tokens)
    numbers = drawn(arguments.seed)
    facts = [FACT.format(key=key, value=number) for key, number in numbers.items()]
    ways = read_contenders(arguments.selector or ["quoka:budget=2,10"])
    stores = []
    for name, content in (("with", insert(text, facts, DEPTHS)), ("without", text)):
        corpus, store = arguments.out / f"{name}.txt", arguments.out / f"{name}.kv"
        if not corpus.exists():
            corpus.write_text(content)
        elif corpus.read_text() != content:
            parser.error(f"{corpus} is of another text or seed: choose another --out, or remove it")
        stores.append(store)
        report = prefill(corpus, store, arguments.model, arguments.rope, options)
        print(f"{name} needles: {described(report)}", flush=True)

    questions = [ASK.format(key=key) for key in numbers]
    failed = False
    for way in ways:
        answered, controls = (
            ask(Engine.open(store, loaded, selector=way.selector, options=way.options), questions)
            for store in stores
        )
        print(f"\n| depth | expected | {way.label} | s | without the needle |\n|---|---|---|---|---|")
        found = known = 0
        for depth, number, (answer, seconds), (control, _) in zip(
            DEPTHS, numbers.values(), answered, controls, strict=True
        ):
            found, known = found + right(number, answer), known + right(number, control)
            mark = "" if right(number, answer) else " (missed)"
            print(f"| {depth:.0%} | {number} | {answer}{mark} | {seconds:.1f} | {control} |")
        print(f"\n{way.label} found {found} of {NEEDLES}; the control knew {known}", flush=True)
        failed |= found < NEEDLES or known > 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
