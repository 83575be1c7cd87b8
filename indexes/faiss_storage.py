"""How faiss stores keys without loss: in their own 16 bits, or in float32, which holds encoded keys too."""

from __future__ import annotations

from typing import Any

import numpy as np

from offload_decode.indexes import backends
from offload_decode.indexes.keys import BFLOAT16, Keys

faiss = backends.Library(backends.faiss)


def code_bytes(dim: int, dtype: np.dtype[Any]) -> int:
    """Bytes of a key as faiss holds it: `dim` floats, of 16 bits where keys of `dtype` are."""
    return dim * (2 if dtype.names is None and dtype.itemsize == 2 else 4)


def scalar_quantizer(keys: Keys) -> Any:
    """faiss' 16-bit code that holds these keys without loss, or None for plain float32."""
    if keys.dtype == np.float16:
        return faiss.ScalarQuantizer.QT_fp16
    if keys.dtype == BFLOAT16:
        return getattr(faiss.ScalarQuantizer, "QT_bf16", None)  # from faiss 1.9 on
    return None
