"""How faiss stores keys so that its scores stay exact: in the keys' own 16 bits, or in float32, which holds
encoded keys too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from indexes import backends
from indexes.base import Hits
from indexes.keys import BFLOAT16, Keys
from indexes.rows import encodings

faiss = backends.faiss()


def scalar_quantizer(keys: Keys) -> Any:
    """faiss' 16-bit code that holds these keys without loss, or None for plain float32."""
    if keys.dtype == np.float16:
        return faiss.ScalarQuantizer.QT_fp16
    if keys.dtype == BFLOAT16:
        return getattr(faiss.ScalarQuantizer, "QT_bf16", None)  # from faiss 1.9 on
    return None


def hits(scores: Any, ids: Any) -> Hits:
    """faiss' answer with the scores of unused places made -inf."""
    scores[ids < 0] = -np.inf
    return Hits(ids, scores)


def write(index: Any, file: str) -> None:
    """Write a faiss index, through Python: faiss' own writer does not look whether its last bytes fit."""
    with open(file, "wb") as out:
        faiss.write_index(index, faiss.PyCallbackIOWriter(out.write, 1 << 20))


def read(file: str, kind: Any, keys: Keys) -> Any:
    """The faiss index in `file`. Raises RuntimeError unless it is a `kind` over keys of that shape."""
    index = faiss.read_index(file)
    if not isinstance(index, kind) or index.ntotal != len(keys) or index.d != encodings.dim(keys):
        raise RuntimeError(f"it holds {type(index).__name__} of {index.ntotal} x {index.d}")
    return index
