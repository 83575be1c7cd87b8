"""From command to first token: `python -m benchmarks.startup --store STORE [--runs 5]`.

`offload-decode ask STORE … --max-new-tokens 1`, a fresh process each time, warm. Wall time counts on a
machine that does nothing else; processor time (user and system) is less disturbed. The stages are those of
the fastest run of a process that does what `ask` does, one after the other. Beside it stands the same with
transformers imported whole, as whoever uses the library has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import tables
from offload_decode.models.made_with import cpu_name

ROOT = Path(__file__).parent.parent
QUESTION = "What is this about?"
ASK = "from offload_decode.cli.main import main; main()"
STAGED = """
import json, sys, time
from pathlib import Path
marks = [("python", time.process_time())]
mark = lambda name: marks.append((name, time.process_time()))
import gc
import offload_decode.cli.main
from offload_decode.cli.limits import asking, check_store
if sys.argv[2] == "lean":
    gc.set_threshold(*offload_decode.cli.main.COLLECT)
    offload_decode.cli.main.skip_slow_imports()
mark("command line")
import torch
mark("torch")
import numba
mark("numba")
import transformers.modeling_utils
mark("transformers")
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from offload_decode.planning import caps
mark("the engine's own modules")
how = asking()
store, admit = check_store(Path(sys.argv[1]), how.config, how.caps)
mark("store opened, and what fits")
loaded = load(store.manifest.model_id, how.config.device, store.manifest.dtype)
mark("model and tokenizer")
engine = Engine.open(store, loaded, how.config)
next(iter(engine.stream(sys.argv[3], 1)), None)
mark("question to first token")
print(json.dumps(marks))
"""


@dataclass(frozen=True)
class Run:
    """Seconds of a process: on the clock, and of the processor."""

    wall: float
    cpu: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args(arguments)
    run(["ask", str(asked.store), QUESTION, "--max-new-tokens", "1"])  # what is remembered is remembered
    runs = [run(["ask", str(asked.store), QUESTION, "--max-new-tokens", "1"]) for _ in range(asked.runs)]
    lean, whole = (
        min((stages(asked.store, how) for _ in range(asked.runs)), key=lambda found: sum(found.values()))
        for how in ("lean", "whole")
    )
    print(f"{cpu_name()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}\n")
    print(
        f"`ask` to its end: {min(r.wall for r in runs):.2f} s, processor {min(r.cpu for r in runs):.2f} s\n"
    )
    longest = max(whole.values())
    rows = [
        [name, f"{lean[name]:.2f}", f"{whole[name]:.2f}", "█" * round(30 * lean[name] / longest)]
        for name in lean
    ]
    total = sum(lean.values()), sum(whole.values())
    rows.append(["to the first token", f"{total[0]:.2f}", f"{total[1]:.2f}", f"{total[1] / total[0]:.2f}x"])
    print(tables.table(["stage (processor s)", "ask", "imported whole", ""], rows))


def run(arguments: Sequence[str]) -> Run:
    """Run the command once."""
    before, began = _used(), time.perf_counter()
    _output([sys.executable, "-c", ASK, *arguments])
    return Run(time.perf_counter() - began, _used() - before)


def stages(store: Path, how: str) -> dict[str, float]:
    """Seconds of the processor of each stage; how: lean, or whole."""
    marks = json.loads(_output([sys.executable, "-c", STAGED, str(store), how, QUESTION]).splitlines()[-1])
    ends = [0.0, *(at for _, at in marks)]
    return {name: at - before for (name, at), before in zip(marks, ends, strict=False)}


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _used() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
