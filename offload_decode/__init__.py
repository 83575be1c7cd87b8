"""offload-decode: prefill a corpus once, answer from its KV store again and again on a small GPU."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.store.reader import KVStore
    from offload_decode.types import Answer

__all__ = ["Answer", "Engine", "KVStore"]

# Read when OpenMP is loaded, with torch or Faiss. Its threads would otherwise spin for milliseconds after
# every operation, on the cores that the search of the next layer needs: steps were up to four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def __getattr__(name: str) -> object:
    # Imported when asked for: torch and transformers take seconds that `offload-decode --help` should not.
    if name == "Engine":
        from offload_decode.engine.engine import Engine

        return Engine
    if name == "Answer":
        from offload_decode.types import Answer

        return Answer
    if name == "KVStore":
        from offload_decode.store.reader import KVStore

        return KVStore
    raise AttributeError(f"module 'offload_decode' has no attribute '{name}'")
