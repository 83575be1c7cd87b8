"""Encoded rows: what they lose, what they refuse, and that the compiled loops read them as numpy does."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offload_decode.common.errors import InvalidIndexInput
from offload_decode.common.rows import encodings, scan
from offload_decode.common.rows.encodings import INT4, INT8
from offload_decode.indexes import keys_digest
from offload_decode.indexes.clusters import cells
from offload_decode.indexes.clusters.summaries import summarize

ENCODINGS = [INT8, INT4]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32]
LARGEST = float(np.finfo(np.float32).max)
numbers = st.floats(-LARGEST, LARGEST, width=32) | st.sampled_from([0.0, 1e-45, -1e-40, 1e-30, 6e4, 127.0])
some_rows = st.tuples(st.integers(0, 6), st.integers(1, 9)).flatmap(
    lambda shape: arrays.arrays(np.float32, (shape[0], 2 * shape[1]), elements=numbers)
)


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(deadline=None, max_examples=200)
@given(rows=some_rows)
def test_no_channel_is_off_by_more_than_half_a_scale(encoding: str, rows: Any) -> None:
    records = encodings.encode(rows, encoding)
    decoded = encodings.decode(records)
    largest = np.abs(rows).max(axis=1, initial=0)
    steps = encodings.LARGEST_CODE[encoding]
    scale = records["scale"].astype(np.float64)
    np.testing.assert_allclose(scale, largest.astype(np.float64) / steps, rtol=3e-7, atol=2e-45)
    off = np.abs(rows.astype(np.float64) - decoded)
    rounding = 2e-7 * largest.astype(np.float64) + steps * 2e-45  # of the scale, which may be subnormal
    assert (off <= (scale / 2 + rounding)[:, None]).all()
    assert (np.abs(decoded) <= largest[:, None]).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_any_shape_are_encoded_one_by_one(encoding: str, dtype: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 5, 6)).astype(dtype)
    rows[1, 2] = 0
    records = encodings.encode(rows, encoding)
    assert records.shape == (2, 5)
    assert records.dtype.itemsize == encodings.row_bytes(encoding, 6)
    assert (encodings.decode(records[1, 2]) == 0).all()
    assert encodings.decode(records).shape == rows.shape
    for place in np.ndindex(2, 5):
        assert (
            encodings.decode(records[place]) == encodings.decode(encodings.encode(rows[place], encoding))
        ).all()
    raw = encodings.as_raw(records)
    assert raw.shape == (2, 5, records.dtype.itemsize)
    assert encodings.as_records(raw[1], encoding).tobytes() == records[1].tobytes()
    assert np.shares_memory(raw, records)


def test_the_bytes_of_a_row_are_as_documented() -> None:
    whole = encodings.as_raw(encodings.encode(np.array([[127, -127, 2, 0]], np.float32), INT8))
    assert whole.tolist() == [[0, 0, 128, 63, 127, 129, 2, 0]]  # 1.0, then the codes
    pairs = encodings.as_raw(encodings.encode(np.array([[7, -7, 2, 0]], np.float32), INT4))
    assert pairs.tolist() == [[0, 0, 128, 63, 0x1F, 0x8A]]  # even channels in the low half, 8 added


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("dim", [2, 4, 6, 30, 64, 128])
def test_the_compiled_loop_widens_exactly_what_decode_does(encoding: str, dim: int) -> None:
    rows = np.random.default_rng(dim).standard_normal((300, dim)).astype(np.float32)
    rows[7] = 0
    rows[8] *= 1e-44
    records = encodings.encode(rows, encoding)
    widened = np.empty((300, dim), np.float32)
    for bits, out in zip(scan.bits(records), widened, strict=True):
        scan.widen_row(bits, scan.layout(records), out)
    np.testing.assert_array_equal(widened, encodings.decode(records))
    queries = np.random.default_rng(1).standard_normal((3, dim)).astype(np.float32)
    scores = np.empty((3, 300), np.float32)
    scan.score_rows(scan.bits(records), scan.layout(records), queries, scores)
    np.testing.assert_allclose(scores, queries @ encodings.decode(records).T, atol=1e-4)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(encoding: str, bad: float) -> None:
    rows = np.ones((3, 4), np.float32)
    rows[1, 2] = bad
    with pytest.raises(InvalidIndexInput, match="no code"):
        encodings.encode(rows, encoding)


def test_int4_needs_pairs() -> None:
    with pytest.raises(InvalidIndexInput, match="odd number"):
        encodings.encode(np.ones((3, 5)), INT4)
    assert encodings.encode(np.ones((3, 5)), INT8).dtype.itemsize == 9


def test_names_and_dimensions_of_rows() -> None:
    rows = np.ones((3, 6), np.float16)
    for array, name in ((rows, "float16"), *((encodings.encode(rows, e), e) for e in ENCODINGS)):
        assert (encodings.name_of(array), encodings.dim(array)) == (name, 6)
    other = np.zeros(3, [("scale", "<f8"), ("codes", "i1", (6,))])
    assert encodings.encoding_of(other) is None
    same_bytes = (rows, rows.view(ml_dtypes.bfloat16))
    assert len({keys_digest(array) for array in same_bytes}) == 2


def test_groups_of_encoded_keys_are_those_of_what_they_decode_to() -> None:
    records = encodings.encode(np.random.default_rng(0).standard_normal((500, 8)), INT8)
    plain = encodings.decode(records)
    own = cells.build(records)
    for found, expected in zip(summarize(own, records, records), summarize(own, plain, plain), strict=True):
        np.testing.assert_array_equal(found, expected)
