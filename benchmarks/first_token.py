"""The first token of a process: `python -m benchmarks.first_token STORE SELECTOR [KEY=VALUE …]`.

`benchmarks.store` starts it afresh for every measurement. Prints one JSON object: seconds of the imports (as
the commands import, and all of Numba), of opening store and model, and of a question's forward pass up to its
first token, the search in it apart; and from opening on, bytes that came from the disk (Linux) and times that
a page was waited for.
"""

import argparse
import json
import resource
import time
from pathlib import Path

QUESTION = "What is the special magic number for brisk-lantern mentioned in the provided text?"


def main(store: str, selector: str, *options: str) -> None:
    began = time.perf_counter()
    from offload_decode.common.fast_import import skip_slow_imports

    skip_slow_imports()  # as the commands do
    from offload_decode.common.rows.scan import ordered
    from offload_decode.config import split_pairs
    from offload_decode.engine.engine import Engine

    ordered(1.0)  # Numba imports the rest of itself when the first function is called
    faults, read = waits()
    imported = time.perf_counter()
    engine = Engine.open(store, selector=selector, options=split_pairs(list(options)), device="cpu")
    opened = time.perf_counter()
    token = int(engine.ask(QUESTION).argmax())
    asked = time.perf_counter()
    stats, (all_faults, all_read) = engine.prefix.stats, waits()
    report = {
        "imports": imported - began,
        "open": opened - imported,
        "question": asked - opened,
        "search": stats.search_s,
        "attend": stats.gather_s + stats.attend_s,
        "faults": all_faults - faults,
        "disk": all_read - read,
        "tokens": stats.tokens,
        "token": token,
    }
    print(json.dumps(report))


def waits() -> tuple[int, int]:
    """Times that a page was waited for so far, and bytes that came from the disk (on Linux, else 0)."""
    about = Path("/proc/self/io")
    counts = dict(line.split(": ") for line in about.read_text().splitlines()) if about.exists() else {}
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt, int(counts.get("read_bytes", 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store")
    parser.add_argument("selector")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    main(arguments.store, arguments.selector, *arguments.options)
