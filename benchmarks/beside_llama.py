"""One GGUF file and one text in llama.cpp and here: `python -m benchmarks.beside_llama FILE TEXT --llama PY`.

PY is an interpreter that has llama-cpp-python, built on this machine: `pip install --no-binary :all:
llama-cpp-python`. For each length it prints the prefill, how long the first token of a saved text takes, and
milliseconds a token with the divergence from dense attention (nats, mean over the same forced tokens). Stores
stay in `--out`, and are made by `prefill` and `index` where they are missing. Let nothing else run beside it.

Behind more than 16,384 tokens llama.cpp has the keys and values of a shorter text several times, each moved
to its place: a token takes as long (compare `--most 4096` at 16,384), and the prefill would take hours.
"""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import TOOL, option_parser, table
from offload_decode.engine.engine import Engine
from offload_decode.evals.haystack import Haystack
from offload_decode.models.loading import load

FORCED, WARM = 32, 4
QUESTION = "Who speaks to whom here, and about what?"
THEIRS = """
import ctypes, json, resource, sys, time
from llama_cpp import Llama, llama_cpp as low
file, text, part, copies, threads, tokens = *sys.argv[1:3], *map(int, sys.argv[3:7])
length, defaults = part * copies, low.llama_context_default_params
def sequences():
    own = defaults()
    own.n_seq_max, own.kv_unified = copies + 1, True
    return own
if copies > 1:
    low.llama_context_default_params = sequences
def timed(work):
    began = time.perf_counter()
    made = work()
    return made, time.perf_counter() - began
def opened():
    return Llama(model_path=file, n_ctx=length + 512, n_threads=threads, n_threads_batch=threads,
                 flash_attn=True, verbose=False)
model = opened()
ids = model.tokenize(open(text, "rb").read())[:part]
_, prefill_s = timed(lambda: model.eval(ids))
first_s = 0
if copies == 1:
    state = model.save_state()
    model = None
    began = time.perf_counter()
    model = opened()
    model.load_state(state)
    model.eval(model.tokenize(b"\\nQuestion: " + QUESTION + b"\\nAnswer:", add_bos=False))
    first_s = time.perf_counter() - began
else:
    size = low.llama_state_seq_get_size(model.ctx, 0)
    held, memory = (ctypes.c_uint8 * size)(), low.llama_get_memory(model.ctx)
    low.llama_state_seq_get_data(model.ctx, held, size, 0)
    for copy in range(1, copies):
        low.llama_state_seq_set_data(model.ctx, held, size, copy)
        low.llama_memory_seq_add(memory, copy, 0, -1, part * copy)
        low.llama_memory_seq_cp(memory, copy, 0, 0, -1)
    model.n_tokens = length
    if low.llama_memory_seq_pos_max(memory, 0) != length - 1:
        raise SystemExit("the copies are not where they should be")
steps = [timed(lambda: model.eval([token]))[1] for token in ids[100:100 + tokens]]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
found = dict(tokens=len(ids), copies=copies, prefill_s=prefill_s, first_s=first_s, steps=steps, peak=peak)
print(json.dumps(found))
"""


def theirs(llama: str, model: Path, text: Path, length: int, threads: int, most: int) -> dict[str, Any]:
    """llama.cpp in a process of its own, with a text of `most` tokens as often as it takes."""
    copies = -(-length // most)
    program = THEIRS.replace("QUESTION", repr(QUESTION.encode()))
    given = [str(model), str(text), *map(str, (length // copies, copies, threads, FORCED))]
    # Our import makes OpenMP's threads wait passively, which costs llama.cpp a third.
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    ran = subprocess.run([llama, "-c", program, *given], check=True, capture_output=True, text=True, env=own)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def prepared(model: Path, text: Path, length: int, out: Path, how: list[str]) -> tuple[Path, Path]:
    """So many tokens of a text, and their store, prefilled as the options say, with its index."""
    cut, store = out / f"{model.stem}-{length}.txt", out / f"{model.stem}-{length}.kv"
    if not cut.exists():
        out.mkdir(parents=True, exist_ok=True)
        whole = Haystack(text.name, text.read_text(encoding="utf-8"))
        cut.write_text(whole.cut(load(str(model)).tokenizer, length), encoding="utf-8")
    began = time.perf_counter()
    if not store.exists():
        subprocess.run([TOOL, "prefill", cut, "--model", model, "--out", store, "--quiet", *how], check=True)
        store.with_suffix(".seconds").write_text(str(time.perf_counter() - began), encoding="utf-8")
    subprocess.run([TOOL, "index", store, "--quiet"], check=True)
    return cut, store


def first_token(store: Path) -> float:
    """Seconds of `ask` for one token, imports and all: the quickest of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        command = [TOOL, "ask", store, QUESTION, "--max-new-tokens", "1"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def decoded(store: Path, selector: str, tokens: list[int], **options: str) -> tuple[float, torch.Tensor, str]:
    """Median milliseconds a forced token, the logits, and what the selector has to say."""
    engine = Engine.open(store, selector=selector, options=options)
    engine.ask(QUESTION)
    logits, seconds = [], []
    for token in tokens:
        began = time.perf_counter()
        logits.append(engine.extend([token]))
        seconds.append(time.perf_counter() - began)
    dense = "attends" in engine.prefix.selector.report()
    return 1000 * median(seconds[WARM:]), torch.stack(logits), " (dense)" if dense else ""


def asked_together(store: Path, count: int, **options: str) -> tuple[float, float]:
    """Tokens a second of so many answers at once, and seconds of their questions: of long answers less short
    ones.
    """
    engine = Engine.open(store, options=options)
    questions = [
        f"Write the next ten pages of this text, at length. Part {number}." for number in range(count)
    ]
    engine.answer_many(questions[:2], 2, count)
    tokens, seconds = [], []
    for most in (1, FORCED + 1):
        began = time.perf_counter()
        answers = engine.answer_many(questions, most, count)
        seconds.append(time.perf_counter() - began)
        tokens.append(sum(len(answer.tokens) for answer in answers))
    if tokens[1] < count * (FORCED + 1):
        print(f"some answers ended early: {tokens[1]} tokens of {count * (FORCED + 1)}")
    return (tokens[1] - tokens[0]) / (seconds[1] - seconds[0]), seconds[0]


def divergence(dense: torch.Tensor, other: torch.Tensor) -> float:
    """KL of the next token from dense attention, in nats, mean over tokens."""
    own, theirs = dense.log_softmax(-1), other.log_softmax(-1)
    return float((own.exp() * (own - theirs)).sum(-1).mean())


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--llama", required=True, metavar="PYTHON")
    parser.add_argument("--lengths", default="4096,16384", help="tokens of the text, with commas between")
    parser.add_argument("--budgets", default="64,2%,1024")
    parser.add_argument("--together", type=int, default=16, metavar="N", help="questions at once")
    parser.add_argument("--prefill", default="", metavar="OPTIONS", help="such as '--rope yarn:4'")
    parser.add_argument(
        "--most", type=int, default=1 << 14, metavar="N", help="tokens that llama.cpp prefills"
    )
    parser.add_argument("--out", type=Path, default=Path("beside-llama"))
    given = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    for length in map(int, given.lengths.split(",")):
        text, store = prepared(given.model, given.text, length, given.out, shlex.split(given.prefill))
        other = theirs(given.llama, given.model, text, length, threads, given.most)
        tokens = load(str(given.model)).tokenizer(text.read_text(encoding="utf-8"))["input_ids"][
            100 : 100 + FORCED
        ]
        step = 1000 * median(other["steps"][WARM:])
        dense_ms, dense, _ = decoded(store, "dense", tokens)
        rows = [
            ["llama.cpp", f"{step:.1f}", "1", ""],
            ["dense", f"{dense_ms:.1f}", f"{step / dense_ms:.2f}", "0"],
        ]
        for budget in given.budgets.split(","):
            for crossover in ("no", "yes"):
                ms, logits, how = decoded(store, "topk", tokens, budget=budget, crossover=crossover)
                if crossover == "yes" and not how:
                    continue
                kl = f"{divergence(dense, logits):.2g}"
                rows.append([f"`topk` {budget}{how}", f"{ms:.1f}", f"{step / ms:.2f}", kl])
        print(f"\n{length:,} tokens, {threads} threads\n")
        print(table(["way", "ms a token", "x llama.cpp", "KL"], rows))
        whole = other["copies"] == 1
        print("\nprefill, tokens/s:", end="")
        if whole:
            print(f" llama.cpp {other['tokens'] / other['prefill_s']:.0f},", end="")
        if (seconds := store.with_suffix(".seconds")).exists():
            print(f" here {length / float(seconds.read_text()):.0f}, all of the command", end="")
        print("\nfirst token behind the saved text:", end="")
        if whole:
            print(f" llama.cpp {other['first_s']:.1f} s in a process that runs,", end="")
        print(f" here {first_token(store):.1f} s as a command")
        if given.together:
            for crossover in ("no", "yes"):
                speed, asked_s = asked_together(store, given.together, budget="64", crossover=crossover)
                print(
                    f"{given.together} questions at once (crossover={crossover}): {speed:.0f} tokens/s,",
                    end="",
                )
                print(f" {speed * step / 1000:.1f}x one in llama.cpp, behind questions of {asked_s:.1f} s")
        print(f"memory of llama.cpp: {other['peak'] / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
