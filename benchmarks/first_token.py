"""The first token of a process: `python -m benchmarks.first_token STORE SELECTOR [KEY=VALUE …] [--cold]`.

Prints seconds, as one JSON object: of the imports (as the commands import, and all of Numba), of opening
store and model, and of a question's forward pass up to its first token. `--cold` first drops the files of
store and indexes from the system's page cache; on a virtual machine the host may hold them still.
"""

import argparse
import json
import os
import time
from pathlib import Path

QUESTION = "What is the special magic number for brisk-lantern mentioned in the provided text?"


def main(store: Path, selector: str, options: list[str], cold: bool) -> None:
    began = time.perf_counter()
    from offload_decode.common.fast_import import skip_slow_imports

    skip_slow_imports()  # as the commands do
    from offload_decode.common.rows.scan import ordered
    from offload_decode.config import split_pairs
    from offload_decode.engine.engine import Engine
    from offload_decode.kv.indexes import indexes_folder

    ordered(1.0)  # Numba imports the rest of itself when the first function is called
    imported = time.perf_counter()
    if cold:
        drop(store)
        drop(indexes_folder(store))
    ready = time.perf_counter()
    engine = Engine.open(store, selector=selector, options=split_pairs(options), device="cpu")
    opened = time.perf_counter()
    engine.ask(QUESTION)
    asked = time.perf_counter()
    print(json.dumps({"imports": imported - began, "open": opened - ready, "question": asked - opened}))


def drop(folder: Path) -> None:
    """Take all files of a folder out of the page cache."""
    for file in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("selector")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--cold", action="store_true", help="nothing of the store is in the page cache")
    main(**vars(parser.parse_args()))
