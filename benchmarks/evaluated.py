"""Runs of `offload-decode eval`, one after the other, and what they come to."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload_decode.evals.runs import read
from offload_decode.evals.stats import Share
from offload_decode.evals.summary import Summary, summarize

TOPICS = "python_topics"
"""The text that every Python brings; others are files and folders."""
TEXTS = "a file, a folder, or python_topics, which Python brings; repeatable; default: python_topics"


@dataclass(frozen=True)
class Run:
    """One run of an evaluation: the file of its results (without .jsonl), what comes after `eval`, and the
    text that is hidden in (None: it has none of its own choice).
    """

    name: str
    arguments: tuple[str, ...]
    text: str | None = None

    def command(self, model: str, folder: Path) -> list[str]:
        """As a user would write it."""
        text = [] if self.text in (None, TOPICS) else ["--text", str(self.text)]
        out = str(folder / f"{self.name}.jsonl")
        return ["eval", *self.arguments, "--model", model, *text, "--out", out]


def run_all(runs: Sequence[Run], model: str, folder: Path) -> dict[str, Summary]:
    """Summaries by name. What is in the folder is not run again. Raises `SystemExit` where a run fails."""
    found: dict[str, Summary] = {}
    for run in runs:
        command = run.command(model, folder)
        print(shlex.join(["offload-decode", *command]), file=sys.stderr, flush=True)
        done = subprocess.run([str(Path(sys.executable).with_name("offload-decode")), *command], stdout=2)
        if done.returncode:
            raise SystemExit(f"that run failed with exit code {done.returncode}; the others are kept")
        found[run.name] = summarize(read(folder / f"{run.name}.jsonl"))
    return found


def named(text: str) -> str:
    """How tables and files call a text."""
    return Path(text).stem


def shown(share: Share) -> str:
    """A share in percent, and its Wilson interval: `96 (80-99)`."""
    return f"{100 * share.mean:.0f} ({100 * share.low:.0f}-{100 * share.high:.0f})"
