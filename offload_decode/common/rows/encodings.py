"""Rows of keys or values in few bits: every row is one record of its scale and its codes, symmetric about 0.

`int8-rows`: a code from -127 to 127 in each byte. `int4-rows`: codes from -7 to 7, two in a byte, the channel
with the even number in the low half, each stored with 8 added. A code c stands for c · scale. One record is
one piece of memory, so that fetching a row touches no second one. Plain rows are arrays of floats.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import InvalidIndexInput

Rows = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

INT8, INT4 = "int8-rows", "int4-rows"
LARGEST_CODE = {INT8: 127, INT4: 7}
SCALE_BYTES = 4
_OFFSET = 8
_CODES = {INT8: np.dtype(np.int8), INT4: np.dtype(np.uint8)}


def row_bytes(encoding: str, dim: int) -> int:
    """Bytes of an encoded row of `dim` channels. Raises InvalidIndexInput where int4 cannot pair them."""
    if encoding == INT4 and dim % 2:
        raise InvalidIndexInput(
            f"{INT4} keeps two channels in a byte, and {dim} is an odd number of them: choose {INT8}."
        )
    return SCALE_BYTES + (dim if encoding == INT8 else dim // 2)


def row_size(dim: int, dtype: np.dtype[Any]) -> int:
    """Bytes of a row of `dim` channels: floats of `dtype`, or a record."""
    return dtype.itemsize * (dim if dtype.names is None else 1)


def row_dtype(encoding: str, dim: int) -> np.dtype[Any]:
    """The record of an encoded row of `dim` channels."""
    codes = row_bytes(encoding, dim) - SCALE_BYTES
    return np.dtype([("scale", "<f4"), ("codes", _CODES[encoding], (codes,))])


def encoding_of(rows: Rows) -> str | None:
    """How `rows` are encoded; None where they are no encoded rows."""
    names, codes = rows.dtype.names, rows.dtype.fields and rows.dtype.fields.get("codes")
    if names != ("scale", "codes") or not codes or len(codes[0].shape) != 1:
        return None
    encoding = INT8 if codes[0].base == _CODES[INT8] else INT4
    width = codes[0].shape[0] * (1 if encoding == INT8 else 2)
    return encoding if rows.dtype == row_dtype(encoding, width) else None


def name_of(rows: Rows) -> str:
    """The encoding of rows, or the name of their floats' dtype."""
    return encoding_of(rows) or str(rows.dtype.name)


def dim(rows: Rows) -> int:
    """Channels of each row: the last dimension of plain rows, the codes of encoded ones."""
    encoding = encoding_of(rows)
    if encoding is None:
        return int(rows.shape[-1])
    codes = rows.dtype["codes"].shape[0]
    return int(codes if encoding == INT8 else 2 * codes)


def encode(rows: Rows, encoding: str) -> Rows:
    """Floats `[..., D]` as records `[...]`. Each channel is off by at most half a scale (a row's largest
    magnitude by 127 or 7), and none grows beyond that largest magnitude.

    Raises InvalidIndexInput for values that are not finite.
    """
    wide = np.asarray(rows, dtype=np.float32)
    if not np.isfinite(wide).all():
        raise InvalidIndexInput("NaN and infinite values have no code.")
    steps = np.float32(LARGEST_CODE[encoding])
    largest = np.abs(wide).max(axis=-1, initial=0)
    scale = largest / steps
    with np.errstate(over="ignore"):
        beyond = scale * steps > largest
    scale = np.where(beyond, np.nextafter(scale, np.float32(0)), scale)
    whole = np.zeros_like(wide)
    np.divide(wide, scale[..., None], out=whole, where=scale[..., None] > 0)
    codes: npt.NDArray[Any] = np.clip(np.rint(whole), -steps, steps).astype(np.int8)
    records = np.empty(wide.shape[:-1], row_dtype(encoding, wide.shape[-1]))
    records["scale"] = scale
    if encoding == INT4:
        halves = (codes + np.int8(_OFFSET)).view(np.uint8)
        codes = halves[..., 0::2] | (halves[..., 1::2] << np.uint8(4))
    records["codes"] = codes
    return records


def decode(rows: Rows) -> Float32:
    """Rows as float32 `[..., D]`: what scale and codes of encoded rows stand for, or plain rows widened."""
    encoding = encoding_of(rows)
    if encoding is None:
        return np.asarray(rows, dtype=np.float32)
    codes = rows["codes"]
    if encoding == INT4:
        halves = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1).view(np.int8)
        codes = halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1]) - np.int8(_OFFSET)
    wide: Float32 = codes.astype(np.float32) * rows["scale"][..., None]
    return wide


def as_records(raw: npt.NDArray[np.uint8], encoding: str) -> Rows:
    """The bytes `[N, width]` of encoded rows as records `[N]`, without a copy."""
    channels = (raw.shape[-1] - SCALE_BYTES) * (1 if encoding == INT8 else 2)
    records: Rows = raw.view(row_dtype(encoding, channels))[..., 0]
    return records


def as_raw(records: Rows) -> npt.NDArray[np.uint8]:
    """Records `[..., N]` as their bytes `[..., N, width]`, without a copy where they are contiguous."""
    return np.ascontiguousarray(records)[..., None].view(np.uint8)
