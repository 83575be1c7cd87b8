"""Checks and views of the stored keys that every index meets."""

import hashlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings

Keys = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KEY_DTYPES = (np.dtype(np.float16), BFLOAT16, np.dtype(np.float32))
MAX_KEYS = 2**32 - 1  # the exact scan packs a score and an id into 64 bits
_BLOCK_BYTES = 32 << 20


def check_keys(keys: Keys) -> Keys:
    """`keys` if they are C-contiguous, `[N, D]` of a known dtype or `[N]` encoded; values are not read."""
    encoded = isinstance(keys, np.ndarray) and encodings.encoding_of(keys) is not None
    if not isinstance(keys, np.ndarray) or keys.ndim != (1 if encoded else 2):
        raise InvalidIndexInput("Keys must be a numpy array of shape [N, D], or [N] of encoded rows.")
    if not encoded and keys.dtype not in KEY_DTYPES:
        raise InvalidIndexInput(f"Keys are {keys.dtype}; convert them to float16, bfloat16 or float32.")
    if encodings.dim(keys) == 0:
        raise InvalidIndexInput("Keys have no dimensions; their shape must be [N, D] with D of at least 1.")
    if not keys.flags.c_contiguous:
        raise InvalidIndexInput("Keys must be C-contiguous; pass numpy.ascontiguousarray(keys).")
    if len(keys) > MAX_KEYS:
        raise InvalidIndexInput(f"An index holds at most {MAX_KEYS:,} keys, got {len(keys):,}; split them.")
    return keys


def check_more(keys: Keys, more: Keys) -> None:
    """Refuses keys that cannot be `keys` and further ones; that they are the same is not looked at."""
    check_keys(more)
    if more.dtype != keys.dtype or more.shape[1:] != keys.shape[1:] or len(more) < len(keys):
        raise InvalidIndexInput(
            f"An index of {len(keys):,} keys cannot be extended to fewer of them, or to others."
        )


def float32_blocks(keys: Keys) -> Iterator[tuple[int, Float32]]:
    """`(first id, block as float32)` over all keys, at most 32 MiB a block, each checked to be finite."""
    rows = max(1, _BLOCK_BYTES // (4 * encodings.dim(keys)))
    for first in range(0, len(keys), rows):
        block = encodings.decode(keys[first : first + rows])
        check_finite(block)
        yield first, block


def drawn(
    keys: Keys, count: int, rng: np.random.Generator, ids: npt.NDArray[np.int32] | None = None
) -> Float32:
    """Up to `count` of the keys, or of those that `ids` name, in order, as finite float32: at random and not
    strided, as rotary keys repeat with the position's period.
    """
    among = len(keys) if ids is None else len(ids)
    rows = rng.choice(among, min(among, count), replace=False)
    rows = np.sort(rows if ids is None else ids[rows])
    sample = encodings.decode(keys[rows])
    check_finite(sample)
    return sample


def check_finite(block: Float32) -> None:
    """Refuses keys that hold NaN or infinity."""
    if not np.isfinite(block).all():
        raise InvalidIndexInput("Keys hold NaN or infinite values; the store must be prefilled again.")


def keys_digest(keys: Keys) -> str:
    """SHA-256, in hex, of the keys' encoding, shape and bytes. Reads every byte once."""
    check_keys(keys)
    shape = f"{len(keys)}x{encodings.dim(keys)}"
    digest = hashlib.sha256(f"{encodings.name_of(keys)} {shape}\n".encode())
    digest.update(keys.view(np.uint8).data)
    return digest.hexdigest()
