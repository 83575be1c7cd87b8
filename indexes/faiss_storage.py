"""How faiss stores keys without loss: in their own 16 bits, or in float32, which holds encoded keys too."""

from __future__ import annotations

from typing import Any

import numpy as np

from indexes import backends
from indexes.keys import BFLOAT16, Keys

faiss = backends.faiss()


def scalar_quantizer(keys: Keys) -> Any:
    """faiss' 16-bit code that holds these keys without loss, or None for plain float32."""
    if keys.dtype == np.float16:
        return faiss.ScalarQuantizer.QT_fp16
    if keys.dtype == BFLOAT16:
        return getattr(faiss.ScalarQuantizer, "QT_bf16", None)  # from faiss 1.9 on
    return None
