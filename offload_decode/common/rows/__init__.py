"""Stored rows and the compiled loops over them: codecs, scores, copies, threads; GGUF's blocks."""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from offload_decode.common.errors import NotCompiled

if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
    raise NotCompiled(
        "NUMBA_DISABLE_JIT is set, and interpreted loops over stored rows would take hours: unset it."
    )

_HOME = "~/Library/Caches" if sys.platform == "darwin" else os.environ.get("XDG_CACHE_HOME", "~/.cache")
PLACES = Path(__file__).parent / "__pycache__", Path(os.path.expanduser(_HOME)) / "numba"
"""Where numba keeps what it compiles: beside the sources, or else in the user's cache."""


def _writable(folder: Path) -> bool:
    """Whether a folder can be written, or made."""
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    return there.is_dir() and os.access(there, os.W_OK | os.X_OK)


TEMPORARY: TemporaryDirectory[str] | None = None
"""Takes the place of both where neither can be written, as numba would refuse to compile; it goes with the
process.
"""
if not os.environ.get("NUMBA_CACHE_DIR") and not any(map(_writable, PLACES)):
    try:
        TEMPORARY = TemporaryDirectory(prefix="offload-decode-loops-")
    except OSError as error:
        raise NotCompiled(
            "no folder can be written for compiled loops: set NUMBA_CACHE_DIR to one that can"
        ) from error
    os.environ["NUMBA_CACHE_DIR"] = TEMPORARY.name
    if "numba" in sys.modules:  # which has read its settings
        sys.modules["numba"].config.CACHE_DIR = TEMPORARY.name
