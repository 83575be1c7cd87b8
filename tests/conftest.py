"""Settings that must stand before anything else is imported."""

import os
import tempfile

import torch

# Without a CUDA device Triton's kernels run under its interpreter. Triton reads this as it is first imported,
# and transformers may be the first to import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What is remembered between runs stays out of the user's cache.
_CACHE = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = _CACHE.name
