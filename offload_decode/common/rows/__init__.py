"""Stored rows and the compiled loops over them: codecs, scores, copies, threads; GGUF's blocks."""

import os

from offload_decode.common.errors import NotCompiled

if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
    raise NotCompiled(
        "NUMBA_DISABLE_JIT is set, and interpreted loops over stored rows would take hours: unset it."
    )
