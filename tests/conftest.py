"""Settings that must stand before anything else is imported."""

import os

import torch

# Without a CUDA device Triton's kernels run under its interpreter. Triton reads this as it is first imported,
# and transformers may be the first to import it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
