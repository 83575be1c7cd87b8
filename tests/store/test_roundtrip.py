import shutil
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload_decode.common.errors import StoreExists, StoreIncomplete, StoreMismatch
from offload_decode.store import KVStore, sample_plan
from offload_decode.store.layout import ArraySpec, array_name
from offload_decode.types import Document
from tests.store.jobs import FULL, SLIDING, Job, make_job, tree


def zarr_array(store: Path, name: str) -> np.ndarray:
    array = zarr.open(str(store), mode="r")[name]
    data = np.asarray(array[...])
    return data.view(KVStore.open(store).manifest.numpy_dtype) if data.dtype == np.uint16 else data


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("n_tokens", [1, 15, 512, 513, 1024, 1300])
def test_views_zarr_and_the_source_agree(dtype: str, n_tokens: int, tmp_path: Path) -> None:
    job = make_job(n_tokens, dtype)
    path = job.write(tmp_path / "store", [n_tokens // 3 + 1])
    store = KVStore.open(path)
    assert store.manifest == job.manifest
    positions, heads = sample_plan(n_tokens, 2, 24)
    for layer in (0, 2):
        for name in ("keys", "values", "page_min", "page_max", "queries"):
            assert zarr_array(path, f"layers/{layer:03d}/{name}").dtype == job.manifest.numpy_dtype
        for head in range(2):
            views = {
                "keys": store.keys(layer, head),
                "values": store.values(layer, head),
                "page_min": store.pages(layer, head)[0],
                "page_max": store.pages(layer, head)[1],
                "queries": store.queries(layer, head),
            }
            for name, view in views.items():
                assert view.dtype == job.manifest.numpy_dtype
                assert view.flags.c_contiguous
                assert not view.flags.writeable
                assert view.tobytes() == zarr_array(path, f"layers/{layer:03d}/{name}")[head].tobytes(), name
            assert views["keys"].tobytes() == job.keys[layer, head].tobytes()
            assert views["values"].tobytes() == job.values[layer, head].tobytes()
            assert views["queries"].tobytes() == job.queries[layer, 2 * head + heads, positions].tobytes()
            pages = [job.keys[layer, head, start : start + 16] for start in range(0, n_tokens, 16)]
            np.testing.assert_array_equal(views["page_min"], np.stack([p.min(axis=0) for p in pages]))
            np.testing.assert_array_equal(views["page_max"], np.stack([p.max(axis=0) for p in pages]))
    for name, window, source in zip(
        ("window_keys", "window_values"), store.window(1), (job.keys[1], job.values[1]), strict=True
    ):
        assert window.tobytes() == source[:, -32:].tobytes(), "the last min(N, W - 1) tokens"
        assert window.tobytes() == zarr_array(path, f"layers/001/{name}").tobytes()
    np.testing.assert_array_equal(store.tokens, job.tokens)
    np.testing.assert_array_equal(zarr_array(path, "tokens"), job.tokens)
    np.testing.assert_array_equal(store.query_positions, positions)
    assert store.documents == job.documents
    store.verify()


def test_several_chunk_files_are_in_play(store: Path) -> None:
    assert len(list(store.glob("layers/000/keys/c.0.*.0"))) == 3


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 700), max_size=8),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    n_tokens=st.integers(1, 1300),
    window=st.integers(2, 300),
)
def test_any_pattern_of_appends_gives_the_same_bytes(
    sizes: list[int], dtype: str, n_tokens: int, window: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("patterns")
    job = make_job(n_tokens, dtype, layers=(SLIDING, FULL), window=window)
    whole = tree(job.write(folder / "whole", [n_tokens]))
    assert tree(job.write(folder / "pieces", sizes)) == whole
    shutil.rmtree(folder)


def test_layers_may_append_in_pieces_and_out_of_step(job: Job, tmp_path: Path) -> None:
    with job.open(tmp_path / "odd") as writer:
        for layer, sizes in ((2, [50, 1, 49]), (1, [1, 99]), (0, [100])):
            start = 0
            for size in sizes:
                job.append(writer, layer, start, start + size)
                start += size
        writer.commit(100)
        job.feed(writer)
        writer.publish()
    assert tree(tmp_path / "odd") == tree(job.write(tmp_path / "even"))


def test_prefill_can_read_what_it_has_appended(job: Job, tmp_path: Path) -> None:
    with job.open(tmp_path / "store") as writer:
        for start, stop in ((0, 20), (20, 600), (600, 1100)):
            keys, values = writer.window(1)
            first = max(0, start - 32)
            np.testing.assert_array_equal(keys, job.keys[1, :, first:start])
            np.testing.assert_array_equal(values, job.values[1, :, first:start])
            for layer in range(3):
                job.append(writer, layer, start, stop)
                if layer != 1:
                    assert writer.keys(layer, 1).tobytes() == job.keys[layer, 1, :stop].tobytes()
                    assert writer.values(layer, 0).tobytes() == job.values[layer, 0, :stop].tobytes()
            writer.commit(stop)
        assert not writer.keys(0, 0).flags.writeable


def test_what_a_commit_must_hold(job: Job, tmp_path: Path) -> None:
    with job.open(tmp_path / "store") as writer:
        for layer in (0, 1):
            job.append(writer, layer, 0, 100)
        with pytest.raises(AssertionError, match="layers/002"):
            writer.commit(100)
        job.append(writer, 2, 0, 99)
        with pytest.raises(AssertionError, match="layers/002"):
            writer.commit(100)
        with pytest.raises(StoreIncomplete, match="0 of 1,300 tokens"):
            writer.publish()


def test_checksums_are_those_of_sha256sum(store: Path) -> None:
    for name in ("SHA256SUMS", "SHA256SUMS.sha256"):
        subprocess.run(["sha256sum", "--strict", "--quiet", "-c", name], cwd=store, check=True)
    lines = (store / "SHA256SUMS").read_text().splitlines()
    names = [line[66:] for line in lines]
    assert names == sorted(names)
    assert {*names, "SHA256SUMS", "SHA256SUMS.sha256"} == tree(store).keys()


def test_publishing_leaves_the_store_and_nothing_else(store: Path) -> None:
    assert [path.name for path in store.parent.iterdir()] == ["store"]


def test_a_published_path_is_not_written_again(job: Job, store: Path) -> None:
    before = tree(store)
    with pytest.raises(StoreExists, match="exists already"):
        job.open(store)
    assert tree(store) == before


def test_digests_name_the_keys(job: Job, store: Path, tmp_path: Path) -> None:
    first = KVStore.open(store)
    digests = [first.digest(layer, head) for layer in (0, 2) for head in range(2)]
    assert len(set(digests)) == 4
    assert KVStore.open(job.write(tmp_path / "again")).digest(0, 1) == digests[1]
    job.keys[0, 1, 700, 3] += 1
    changed = KVStore.open(job.write(tmp_path / "changed"))
    assert changed.digest(0, 1) != digests[1]
    assert changed.digest(0, 0) == digests[0]
    assert changed.store_digest != first.store_digest


def test_cost_counts_every_byte(store: Path) -> None:
    cost = KVStore.open(store).cost()
    assert sum(cost.values()) == sum(map(len, tree(store).values()))
    assert cost["keys"] == 2 * 2 * 3 * 512 * 64 * 2
    assert cost["values"] == 2 * 2 * 2 * 1024 * 32 * 2
    assert cost["tokens"] == 1300 * 4


def test_another_model_is_refused(store: Path) -> None:
    opened = KVStore.open(store)
    same = {"config_hash": "c0ffee", "weights_hash": "beef", "tokenizer_hash": "decade", "dtype": "float16"}
    opened.check_model(**same)
    opened.check_model()
    for name, other in dict.fromkeys(same, "other").items():
        word = name.partition("_")[0].replace("config", "configuration")
        with pytest.raises(
            StoreMismatch, match=rf"test/model in float16, and this model has (an)?other {word}"
        ):
            opened.check_model(**same | {name: other})


def test_kinds_of_corpus_and_model(tmp_path: Path) -> None:
    for i, layers in enumerate([(FULL,), (SLIDING,), (SLIDING, SLIDING, FULL)]):
        job = make_job(50, layers=layers, window=1000)
        store = KVStore.open(job.write(tmp_path / str(i)))
        store.verify()
        kinds = tuple(own.kind for own in store.manifest.shape.layers)
        assert kinds == layers
        for layer, kind in enumerate(layers):
            if kind is SLIDING:
                assert store.window(layer)[0].shape == (2, 50, 64), "a window longer than the corpus"


def test_documents_may_leave_out_the_first_and_last_tokens(tmp_path: Path) -> None:
    job = make_job(50)
    for i, documents in enumerate(
        [(), (Document("only", 3, 48),), (Document("a", 0, 0), Document("a", 0, 9))]
    ):
        one = Job(job.manifest, job.tokens, documents, job.keys, job.values, job.queries)
        store = KVStore.open(one.write(tmp_path / str(i)))
        assert store.documents == documents
        store.verify()


def test_zarr_lists_the_arrays(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr remarks on the two checksum files
        members = dict(zarr.open_group(str(store), mode="r").members(max_depth=None))
    assert {"tokens", "documents/names", "layers/000/keys", "layers/001/window_keys"} <= members.keys()
    assert members["layers/000/keys"].shape == (2, 1300, 64)


@pytest.mark.parametrize("kv", ["auto", "int8"])
def test_further_chunks_build_no_names(kv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    head_files = ArraySpec.head_files

    def counted(spec: ArraySpec, head: int) -> list[str]:
        built.append(spec.name)
        return head_files(spec, head)

    monkeypatch.setattr(ArraySpec, "head_files", counted)
    array_name.cache_clear()
    job = make_job(1300, kv=kv)
    with job.open(tmp_path / "store") as writer:
        job.feed(writer, [100], until=100)
        assert len(built) == 2 * 2 * 6, "two layers with two heads, of six arrays each"
        misses = array_name.cache_info().misses
        assert misses >= 2 * 6
        job.feed(writer, until=1300)
        assert len(built) == 2 * 2 * 6
        assert array_name.cache_info().misses == misses
        writer.publish()
