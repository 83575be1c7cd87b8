"""Stored rows, plain and encoded: what is read is what they stand for, and no more than was asked for."""

import ml_dtypes
import numpy as np
import pytest
import torch

from offload_decode.attention import rows
from offload_decode.attention.pages import gather_pages
from offload_decode.attention.rows import Rows, unite
from offload_decode.common.rows import encodings
from offload_decode.engine.engine import Engine
from offload_decode.hf.compat import with_cache
from offload_decode.kv.page_bounds import stored_bounds
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from tests.families import VOCAB
from tests.tiny import tiny_model

CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=pytest.mark.gpu)]
N, D = 50, 6
FORMS = ["float16", "bfloat16", "float32", encodings.INT8, encodings.INT4]
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def array_of(form, n=N, dim=D, seed=0):
    rows = np.random.default_rng(seed).standard_normal((n, dim)).astype(np.float32)
    array = rows.astype(DTYPES[form]) if form in DTYPES else encodings.encode(rows, form)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_is_what_the_rows_stand_for(form, device):
    array = array_of(form)
    stored, expected = Rows(array), torch.from_numpy(np.array(encodings.decode(array)))
    assert (len(stored), stored.dim, stored.row_bytes) == (N, D, array.nbytes // N)
    assert torch.equal(stored.floats(stored.raw.to(device)).float().cpu(), expected)
    ids = torch.tensor([7, 0, 49, 7])
    for which in (slice(None), slice(3, 9), slice(40, 90), ids, ids[:0]):
        read = stored.read(which, device)
        assert read.device.type == device.type
        assert read.dtype is torch.float32
        assert torch.equal(read.cpu(), expected[which])


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize(("keys", "values"), [(FORMS[3], FORMS[4]), (FORMS[0], FORMS[3])])
def test_pages_travel_as_they_are_stored(keys, values, device):
    stored = [[Rows(array_of(form, seed=head)) for head in range(2)] for form in (keys, values)]
    pages = torch.tensor([[[3, 12]], [[0, -1]]])  # the twelfth page of 4 is ragged
    own_keys, own_values, numbers = gather_pages(*stored, pages, 4, device)
    for parts, copied in zip(stored, (own_keys, own_values), strict=True):
        for head, place in ((0, 0), (0, 1), (1, 0)):
            page, moved = int(pages[head, 0, place]), int(numbers[head, 0, place])
            original = parts[head].read(slice(4 * page, 4 * page + 4), CPU)
            copy = copied[head, 4 * moved : 4 * moved + 4].float().cpu()
            assert torch.equal(copy, original)


def compressed(folder, kv, tokens=300):
    """A model, its ids, and their store."""
    ids = torch.randint(3, VOCAB, (tokens,), generator=torch.Generator().manual_seed(5)).numpy()
    loaded = wrap(tiny_model("llama"))
    documents = [Document("all", 0, tokens)]
    settings = Settings(options={"chunk": 64}, query_samples=40, kv=kv)
    prefill_tokens(loaded, ids.astype(np.int32), documents, folder / "store", settings)
    return loaded, ids, KVStore.open(folder / "store")


@pytest.mark.parametrize("kv", ["int8", "int4-values"])
@pytest.mark.parametrize(
    ("selector", "options"),
    [
        ("dense", {}),
        ("oracle", {"budget": "20"}),
        ("topk", {"budget": "20"}),
        ("quoka", {"budget": "20"}),
        ("quest", {"budget": "32", "dense_layers": ""}),
        ("quest", {"budget": "32", "page_size": "7", "dense_layers": ""}),
        ("quest+topk", {"budget": "20", "dense_layers": ""}),
        ("topk", {"budget": "20", "tail": "clusters"}),
        ("h2o", {"budget": "20"}),
    ],
)
def test_no_head_is_ever_decoded_whole(tmp_path, monkeypatch, kv, selector, options):
    """Every way from bytes to floats is watched; blocks are made smaller than the store."""
    loaded, _, store = compressed(tmp_path, kv)
    most, seen = 64, []
    monkeypatch.setattr("offload_decode.kv.host_cache.BLOCK_TOKENS", most)
    monkeypatch.setattr("offload_decode.selectors.scores.BLOCK_TOKENS", most)
    monkeypatch.setattr("offload_decode.kv.page_bounds.STEP_TOKENS", most)
    monkeypatch.setattr("offload_decode.common.rows.arrays._BLOCK_BYTES", 4 * most * 16)
    monkeypatch.setattr("offload_decode.indexes.clusters.summaries._TOGETHER", most // 4)
    monkeypatch.setattr("offload_decode.indexes.clusters.cells.SAMPLE", most)
    ways = (
        (rows, "widen_rows", lambda bits, layout, ids, out: len(ids)),
        (Rows, "floats", lambda stored, raw: raw.shape[:-1].numel()),
        (encodings, "decode", len),
    )
    for owner, name, count in ways:
        real = getattr(owner, name)

        def watched(*given, run=real, count=count):
            seen.append(count(*given))
            return run(*given)

        monkeypatch.setattr(owner, name, watched)
    engine = Engine.open(store, loaded, selector=selector, options=options)
    engine.extend([5])
    assert max(seen, default=0) <= most


@pytest.mark.parametrize("kv", ["int8", "int4-values"])
@pytest.mark.parametrize("selector", ["dense", "topk", "quest"])
def test_an_encoded_store_is_attended_to_as_its_decoded_rows(tmp_path, kv, selector):
    """A cache of transformers' own, filled with the decoded rows, is the plain computation."""
    from transformers import DynamicCache

    loaded, ids, store = compressed(tmp_path, kv)
    cache = DynamicCache()
    heads = range(store.manifest.shape.kv_heads)
    for layer in store.manifest.shape.full_layers:
        own = [
            torch.from_numpy(np.stack([encodings.decode(read(layer, head)) for head in heads]))[None]
            for read in (store.keys, store.values)
        ]
        cache.update(*own, layer)
    question = [5, 6, 7, 8]
    plain = tiny_model("llama")
    with torch.no_grad():
        expected = plain(torch.tensor([question]), **with_cache(plain, cache)).logits[0, -1]
    found = Engine.open(store, loaded, selector=selector, options={"budget": "100%"}).extend(question)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    dense = plain(torch.tensor([[*ids.tolist(), *question]])).logits[0, -1]
    assert (found - dense).abs().max() > 1e-4, "the rows were compressed"


@pytest.mark.parametrize("kv", ["int8", "int4-values"])
@pytest.mark.parametrize("page_size", [16, 32, 7])
def test_page_bounds_hold_for_the_keys_as_they_are_stored(tmp_path, kv, page_size):
    _, _, store = compressed(tmp_path, kv)
    for layer in store.manifest.shape.full_layers:
        lower, upper = stored_bounds(store, layer, page_size, "fp16").bounds.widened()
        for head in range(store.manifest.shape.kv_heads):
            page = torch.arange(store.manifest.n_tokens) // page_size
            keys = Rows(store.keys(layer, head)).read(slice(None), CPU)
            assert (lower[head, page] <= keys).all()
            assert (keys <= upper[head, page]).all()


@pytest.mark.parametrize("ids", [[-1], [0, 9], [2**40]])
def test_an_id_outside_the_rows_is_an_error_and_no_address(ids):
    """Also where asserts are left out (`python -O`)."""
    with pytest.raises(IndexError, match="9 rows"):
        Rows(array_of(encodings.INT8, n=9)).read(torch.tensor(ids), CPU)
    if max(ids) >= 0:  # -1 is padding there
        with pytest.raises(IndexError, match="9 rows"):
            unite(torch.tensor([[ids]]), 9)
