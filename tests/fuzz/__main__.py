"""`python -m tests.fuzz TARGET CASES KEPT [SEED]`: a process of its own, with limits, as a case might end it.

Hypothesis keeps the cases that fail in the folder KEPT and begins with them; `last` there is the case that
was running when the process ended.
"""

import json
import os
import signal
import sys
import warnings
from collections import Counter
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import HealthCheck, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.memory import limit_memory, own_memory
from tests.fuzz.edits import Edit, Files

SECONDS, WAITING = 5, 60
"""Of the processor's time that a case may take, and of all time: the system ends the process after them."""
MEMORY = 128 << 20
"""Bytes that a case may allocate: all files of a target have a tenth of it."""

LONGEST = 6000
"""Letters of a sentence, which may name fifty files."""


def main(name: str, cases: int, kept: Path, first: int = 0) -> None:
    warnings.simplefilter("ignore")
    kept.mkdir(parents=True, exist_ok=True)
    outcomes = Counter[str]()
    with TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        os.environ["TMPDIR"] = folder
        module, _, own = name.partition(".")
        target: Files = import_module(f"tests.fuzz.{module}").TARGETS[own](Path(folder))
        target.attempt(())  # what is only compiled, imported and opened once is not counted
        target.restore(())

        @seed(first)
        @settings(
            max_examples=cases,
            deadline=None,
            database=DirectoryBasedExampleDatabase(kept),
            suppress_health_check=[*HealthCheck],
            print_blob=False,
        )
        @given(target.cases)
        def each(case: list[Edit]) -> None:
            (kept / "last").write_text(repr(case), encoding="utf-8", errors="backslashreplace")
            limit_memory(own_memory() + MEMORY)  # of this case: a library may keep what earlier ones took
            _limit(SECONDS, WAITING)
            try:
                target.attempt(case)
            except OffloadDecodeError as error:
                outcomes["refused"] += 1
                text = str(error)
                assert 0 < len(text.splitlines()) < 2, f"no sentence: {text[:300]}"
                assert len(text) < LONGEST
            else:
                outcomes["answered"] += 1
                assert not target.must_refuse(case), "it answered"
            finally:
                _limit(0, 0)
                target.restore(case)

        each()
    print(json.dumps(outcomes))


def _limit(own: int, waiting: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, own)
    signal.setitimer(signal.ITIMER_REAL, waiting)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
