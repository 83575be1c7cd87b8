"""A store in memory answers as the store on disk that was written from the same arrays."""

import numpy as np
import pytest

from offload_decode.common.errors import ConfigError
from offload_decode.common.rows.encodings import encode
from offload_decode.store import KVStore, MemoryStore, sample_plan
from offload_decode.types import ModelShape
from tests.store.jobs import FULL, SLIDING, make_job

FORMS = [
    ("float16", "auto"),
    ("bfloat16", "auto"),
    ("float32", "auto"),
    ("float16", "int8"),
    ("bfloat16", "int8"),
    ("float32", "int4-values"),
]
KNOWN = ("dtype", "shape", "n_tokens", "n_samples", "kv", "page_size", "numpy_dtype")


def in_memory(job):
    """What a prefill gives to the writer, without the writer; encoded first, where the job says so."""
    manifest, shape = job.manifest, job.manifest.shape
    positions, heads = sample_plan(manifest.n_tokens, shape.group, manifest.query_samples)
    by_group = job.queries.reshape(-1, shape.kv_heads, shape.group, *job.queries.shape[2:])
    stored = []
    for kind, rows in (("keys", job.keys), ("values", job.values)):
        encoding = manifest.encoding(kind)
        whole = [encoding if encoding and own.kind is FULL else None for own in shape.layers]
        stored.append([encode(own, e) if e else own for own, e in zip(rows, whole, strict=True)])
    queries = by_group[:, :, heads, positions]
    return MemoryStore(shape, *stored, queries=queries, page_size=manifest.page_size, dtype=manifest.dtype)


def assert_same(ours, theirs):
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.tobytes() == theirs.tobytes()
    assert ours.flags.writeable == theirs.flags.writeable


@pytest.mark.parametrize(("dtype", "kv"), FORMS)
@pytest.mark.parametrize("tokens", [1, 16, 331])
def test_every_answer_is_that_of_the_store_on_disk(tmp_path, dtype, kv, tokens):
    job = make_job(tokens, dtype, kv=kv, page_size=7)
    memory, disk = in_memory(job), KVStore.open(job.write(tmp_path / "s"))
    for name in KNOWN:
        assert getattr(memory.manifest, name) == getattr(disk.manifest, name)
    assert_same(memory.query_positions, disk.query_positions)
    np.testing.assert_array_equal(memory.query_heads, disk.query_heads)
    digests = set()
    for layer in (0, 2):
        memory.check_mapped(layer)
        for head in (0, 1):
            for name in ("keys", "values", "key_norms", "queries"):
                assert_same(getattr(memory, name)(layer, head), getattr(disk, name)(layer, head))
            for ours, theirs in zip(memory.pages(layer, head), disk.pages(layer, head), strict=True):
                assert_same(ours, theirs)
            digests.add(memory.digest(layer, head))
    for ours, theirs in zip(memory.window(1), disk.window(1), strict=True):
        assert_same(ours, theirs)
    assert len({*map(len, digests), len(memory.store_digest)}) == 1, "SHA-256, as on disk"
    assert len(digests) == 4, "every head has keys of its own"


def test_it_has_no_more_than_the_store_on_disk(tmp_path):
    job = make_job(40)
    memory, disk = in_memory(job), KVStore.open(job.write(tmp_path / "s"))
    for store in (memory, disk):
        for name in ("keys", "values", "key_norms", "pages", "queries", "digest"):
            for place in ((1, 0), (3, 0)):  # a sliding layer, and none
                with pytest.raises(KeyError):
                    _ = getattr(store, name)(*place)
        with pytest.raises(KeyError):
            store.window(0)
    names = {name for name in dir(memory) if not name.startswith("_")}
    assert names <= set(dir(disk))


@pytest.mark.parametrize("place", [0, 23])
def test_digests_name_the_keys(place):
    keys = np.arange(24, dtype=np.float32).reshape(1, 1, 6, 4)
    changed = keys.copy()
    changed.flat[place] += 1
    shape = ModelShape.uniform((FULL,), 1, 1, 4)
    one, same, other = (MemoryStore(shape, given, keys) for given in (keys, keys.copy(), changed))
    assert one.digest(0, 0) == same.digest(0, 0) != other.digest(0, 0)
    assert one.store_digest == same.store_digest != other.store_digest
    assert one.store_digest != MemoryStore(shape, keys, changed).store_digest


def test_rows_are_views_of_what_was_given():
    keys, values = np.ones((2, 1, 2, 6, 4), np.float16)
    store = MemoryStore(ModelShape.uniform((FULL,), 2, 2, 4), [list(keys[0])], values)
    assert np.shares_memory(store.keys(0, 1), keys)
    assert np.shares_memory(store.values(0, 1), values)
    assert keys.flags.writeable, "the caller's own array stays as it is"


def test_queries_that_were_not_given_are_not_made_up():
    keys = np.zeros((1, 1, 6, 4), np.float32)
    store = MemoryStore(ModelShape.uniform((FULL,), 1, 1, 4), keys, keys)
    for read in (lambda: store.queries(0, 0), lambda: store.query_positions):
        with pytest.raises(ConfigError, match="queries="):
            read()


SHAPE = ModelShape.uniform((FULL, SLIDING), 4, 2, 4, window=3)
ROWS = np.zeros((2, 2, 6, 4), np.float32)
INT8 = encode(ROWS, "int8-rows")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"keys": ROWS[:1]}, "keys must be given for 2 layers"),
        ({"keys": []}, "keys must be given for 2 layers"),
        ({"values": ROWS[:, :0]}, "values must be given for 2 layers"),
        ({"values": ROWS[:, :1]}, "values of layer 0"),
        ({"values": ROWS[:, :, :5]}, "values of layer 0"),
        ({"values": ROWS[:, :, :, 0]}, "values of layer 0"),
        ({"values": ROWS.astype(np.float16)}, "keys are float32 and values float16"),
        ({"keys": ROWS.astype(float), "values": ROWS.astype(float)}, "keys are float64"),
        ({"keys": [ROWS[0], [ROWS[1, 0], ROWS[1, 1, :, :3]]]}, "keys of layer 1"),
        ({"keys": INT8}, "keys of layer 1"),  # a sliding layer is never encoded
        ({"keys": [INT8[0, :, :5], ROWS[1]]}, "keys of layer 1 .*5, 4"),
        ({"keys": [INT8[0], ROWS[1]], "dtype": "float16"}, "keys are int8-rows and values float32"),
        ({"keys": ROWS[:, :, :0], "values": ROWS[:, :, :0]}, "at least one"),
        ({"page_size": 0}, "at least one"),
        ({"queries": ROWS[:, :, :0]}, "at least one"),
        ({"queries": np.zeros((2, 2, 13, 4), np.float32)}, "at most"),
        ({"queries": ROWS[..., :2]}, "queries of layer 0"),
        ({"shape": ModelShape.uniform((SLIDING, SLIDING), 4, 2, 4, 3)}, "nothing to search"),
    ],
    ids=str,
)
def test_arrays_that_are_no_store_are_refused(changed, message):
    given = {"shape": SHAPE, "keys": ROWS, "values": ROWS}
    with pytest.raises(ConfigError, match=message):
        MemoryStore(**given | changed)
