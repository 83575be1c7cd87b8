"""The first token of a process: `python -m benchmarks.first_token STORE SELECTOR [KEY=VALUE …]`.

`benchmarks.store` starts it afresh for every measurement. Prints one JSON object: seconds of the imports, of
opening store and model, and of a question's forward pass up to its first token, the search in it apart.
"""

from __future__ import annotations

import json
import sys
import time

QUESTION = "What is the special magic number for brisk-lantern mentioned in the provided text?"


def main(store: str, selector: str, *options: str) -> None:
    began = time.perf_counter()
    from offload_decode.config import split_pairs
    from offload_decode.engine.engine import Engine
    from offload_decode.pages import host  # noqa: F401 (numba, which selectors import when they search)

    imported = time.perf_counter()
    engine = Engine.open(store, selector=selector, options=split_pairs(list(options)), device="cpu")
    opened = time.perf_counter()
    token = int(engine.ask(QUESTION).argmax())
    asked = time.perf_counter()
    stats = engine.prefix.stats
    report = {
        "imports": imported - began,
        "open": opened - imported,
        "question": asked - opened,
        "search": stats.search_s,
        "attend": stats.gather_s + stats.attend_s,
        "tokens": stats.tokens,
        "token": token,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
