"""Compressed stores: what is written of every row, what it cost, and that no interruption changes either."""

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from offload_decode.common.errors import ConfigError, StoreDamaged, StoreError, StoreMismatch
from offload_decode.common.rows import encodings
from offload_decode.store import KVStore, layout
from offload_decode.store.format import stored_types
from offload_decode.store.pages import rounded_outward
from offload_decode.types import LayerKind, LayerShape, ModelShape
from tests.store.jobs import FULL, SLIDING, Job, begun, make_job, tree
from tests.store.test_resume import ends_alike, resumed_from_kills

KVS = {"int8": (encodings.INT8, encodings.INT8), "int4-values": (encodings.INT8, encodings.INT4)}
DTYPES = ["float16", "bfloat16", "float32"]


@pytest.fixture(params=KVS)
def kv(request) -> str:
    return request.param


@pytest.fixture
def job(kv: str) -> Job:
    return make_job(700, layers=(FULL, SLIDING), kv=kv)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_is_encoded_by_itself(kv: str, dtype: str, tmp_path: Path) -> None:
    job = make_job(1300, dtype, kv=kv)
    store = KVStore.open(job.write(tmp_path / "store", [1, 7, 400]))
    for layer in store.manifest.shape.full_layers:
        for head in range(2):
            stored = (store.keys(layer, head), store.values(layer, head))
            for rows, encoding, own in zip((job.keys, job.values), KVS[kv], stored, strict=True):
                assert encodings.encoding_of(own) == encoding
                assert own.shape == (1300,)
                assert own.tobytes() == encodings.encode(rows[layer, head], encoding).tobytes()
            keys = encodings.decode(store.keys(layer, head))
            norms = np.linalg.norm(keys.astype(np.float64), axis=1)
            np.testing.assert_allclose(store.key_norms(layer, head), norms, rtol=1e-6)
            lower, upper = store.pages(layer, head)
            assert lower.dtype == upper.dtype == store.manifest.numpy_dtype
            for page, start in enumerate(range(0, 1300, 16)):
                inside, step = (
                    keys[start : start + 16],
                    np.finfo(np.float32).eps if dtype == "float32" else 0.01,
                )
                for bound, true, sign in ((lower, inside.min(0), 1), (upper, inside.max(0), -1)):
                    gap = sign * (true - bound[page].astype(np.float32))
                    assert (gap >= 0).all()
                    assert (gap <= step * np.abs(true) + 1e-6).all()
    assert store.window(1)[0].dtype == store.queries(0, 0).dtype == store.manifest.numpy_dtype


def test_several_chunk_files_hold_whole_rows(kv: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(layout, "ALIGNMENT", 4096)
    job = make_job(1300, kv=kv)
    path = job.write(tmp_path / "store", [1000, 100])
    assert len(list((path / "layers/000/keys").glob("c.0.*"))) > 1
    store = KVStore.open(path)
    for rows, encoding, read in zip((job.keys, job.values), KVS[kv], (store.keys, store.values), strict=True):
        assert read(2, 1).tobytes() == encodings.encode(rows[2, 1], encoding).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_manifest_says_what_encoding_cost(kv: str, dtype: str, tmp_path: Path) -> None:
    job = make_job(dtype=dtype, kv=kv)
    manifest = KVStore.open(job.write(tmp_path / "store")).manifest
    assert manifest.kv == dict(zip(("keys", "values"), KVS[kv], strict=True))
    for kind, rows, encoding in zip(("keys", "values"), (job.keys, job.values), KVS[kv], strict=True):
        assert [entry["layer"] for entry in manifest.kv_error[kind]] == [0, 2]
        for entry in manifest.kv_error[kind]:
            wide = rows[entry["layer"]].astype(np.float64)
            off = wide - encodings.decode(encodings.encode(rows[entry["layer"]], encoding))
            assert entry["largest"] == np.abs(off).max()
            expected = np.sqrt((off**2).sum() / (wide**2).sum())
            np.testing.assert_allclose(entry["relative_rms"], expected, rtol=1e-12)


def test_a_plain_store_has_no_errors(tmp_path: Path) -> None:
    manifest = KVStore.open(make_job().write(tmp_path / "store")).manifest
    assert (manifest.kv, manifest.kv_error) == ({"keys": "float16", "values": "float16"}, {})


@pytest.mark.parametrize("sizes", [[1] * 40, [16, 17, 300], [699], [5, 90, 91]])
def test_bytes_do_not_depend_on_how_tokens_were_grouped(job: Job, tmp_path: Path, sizes: list[int]) -> None:
    assert tree(job.write(tmp_path / "one", sizes)) == tree(job.write(tmp_path / "other"))


def test_resume_from_kill_points_is_bit_identical(job: Job, tmp_path: Path) -> None:
    resumed_from_kills(job, tmp_path, lambda last: (*range(1, last - 12, 14), *range(last - 12, last + 1)))


def test_another_encoding_is_another_prefill(job: Job, kv: str, tmp_path: Path) -> None:
    begun(job, tmp_path / "store", 300)
    for other in ("auto", *(KVS.keys() - {kv})):
        with pytest.raises(StoreMismatch, match="another kv"):
            make_job(700, layers=(FULL, SLIDING), kv=other).open(tmp_path / "store")


def test_errors_that_changed_while_they_waited_are_found(job: Job, tmp_path: Path) -> None:
    file = begun(job, tmp_path / "store", 300) / "progress.json"
    progress = json.loads(file.read_bytes())
    progress["errors"]["layers/000/keys"][2] *= 2
    file.write_text(json.dumps(progress))
    with pytest.raises(StoreDamaged, match=r"progress\.json"):
        job.open(tmp_path / "store")


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_and_what_was_committed_stays(
    job: Job, kind: str, bad: float, tmp_path: Path
) -> None:
    broken = getattr(job, kind).copy()
    broken[0, 1, 400, 3] = bad
    with (
        job.open(tmp_path / "store") as writer,
        pytest.raises(StoreError, match=f"{kind} of layer 0 hold NaN or infinite"),
    ):
        replace(job, **{kind: broken}).feed(writer)
    ends_alike(job, tmp_path)


def test_kinds_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="unknown kv 'int2'; known are: auto, int8, int4-values"):
        stored_types("int2", "float16", shape_of(64, 64))
    with pytest.raises(ConfigError, match="values have 3: choose kv int8"):
        stored_types("int4-values", "float16", shape_of(4, 3))
    with pytest.raises(ConfigError, match="values are its keys: choose kv int8"):
        stored_types("int4-values", "float16", shape_of(4, 4, latent=True))
    assert stored_types("int4-values", "float16", shape_of(3, 4))["values"] == "int4-rows"
    assert stored_types("int8", "float16", shape_of(4, 3)) == {"keys": "int8-rows", "values": "int8-rows"}


def shape_of(key_dim: int, value_dim: int, latent: bool = False) -> ModelShape:
    return ModelShape((LayerShape(LayerKind.FULL, 1, key_dim, value_dim, latent=latent),), 2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@given(arrays.arrays(np.float32, (1, 3, 2), elements=st.floats(-65504, 65504, width=32)))
def test_bounds_in_fewer_bits_are_never_inside(dtype: type, numbers: np.ndarray) -> None:
    lower, upper = rounded_outward(numbers, numbers, np.dtype(dtype))
    assert lower.dtype == upper.dtype == dtype
    wide_lower, wide_upper = lower.astype(np.float32), upper.astype(np.float32)
    assert (wide_lower <= numbers).all()
    assert (numbers <= wide_upper).all()
    tight = numbers.astype(dtype).astype(np.float32) == numbers
    assert (wide_lower[tight] == wide_upper[tight]).all()
