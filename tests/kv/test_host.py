"""The generated on the device, and attending to selected rows of a stored prefix."""

import numpy as np
import pytest
import torch

from offload_decode.attention.queries import Queries, attend
from offload_decode.attention.rows import numpy_view, tensor_view
from offload_decode.common.rows import threads
from offload_decode.kv import host_cache as kv
from offload_decode.kv.generated import GeneratedKV
from offload_decode.kv.host_cache import HostKV
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, LayerShape, ModelShape, PageSelection, Selection, StepStats

N, HKV, R, D, VALUE_D = 50, 2, 6, 8, 5
PLACES = [
    ("cpu", "host"),
    ("cpu", "device"),  # what a device does, without pinning and streams
    ("cpu", "pinned"),
    *(pytest.param("cuda", place, marks=pytest.mark.gpu) for place in ("host", "device", "pinned", "auto")),
]


def made_store(dtype=np.float32):
    """One layer of random keys and values."""
    rng = np.random.default_rng(0)
    keys, values = (rng.standard_normal((1, HKV, N, dim)).astype(dtype) for dim in (D, VALUE_D))
    shape = ModelShape((LayerShape(LayerKind.FULL, HKV, D, VALUE_D),), R)
    return MemoryStore(shape, keys, values)


def stacked(read):
    """What a store has of every head of layer 0: `[Hkv, N, D]` float32."""
    return torch.from_numpy(np.stack([read(0, head) for head in range(HKV)]).astype(np.float32))


def queries(rows=R):
    return torch.randn(HKV, rows, D, generator=torch.Generator().manual_seed(3))


def ids(k, rows=R):
    generator = torch.Generator().manual_seed(4)
    return torch.stack(
        [torch.stack([torch.randperm(N, generator=generator)[:k] for _ in range(rows)]) for _ in range(HKV)]
    )


def by_mask(store, query, chosen, softcap=None):
    """Dense reference: every key, with those masked that a row did not select."""
    key, value = (stacked(read)[None] for read in (store.keys, store.values))
    seen = torch.zeros(HKV, query.shape[1], N + 1, dtype=torch.bool)
    seen.scatter_(2, torch.where(chosen < 0, N, chosen), True)
    own = [slice(h, h + 1) for h in range(HKV)]
    states = [
        attend(query[None, h], key[:, h], value[:, h], 0.4, seen[h, None, :, :N][0], softcap) for h in own
    ]
    return torch.cat([s.out[0] for s in states]), torch.cat([s.lse[0] for s in states])


@pytest.mark.parametrize("k", [1, 3, 17, N])
@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize(("device", "place"), PLACES)
def test_attending_to_a_selection_is_masked_attention(k, scored, softcap, device, place):
    store, query, chosen = made_store(), queries(), ids(k)
    chosen[0, 0, 1:] = -1  # a row with padding
    scores = (
        (query @ stacked(store.keys).transpose(1, 2))
        .gather(2, chosen.clamp(min=0))
        .masked_fill(chosen < 0, -torch.inf)
    )
    out, lse = HostKV(store, torch.device(device), place, cache_bytes=4096).attend(
        0,
        Queries(query.to(device), 0.4, softcap),
        Selection(chosen.to(device), scores.to(device) if scored else None),
        StepStats(),
    )
    assert out.device.type == device
    expected = by_mask(store, query, chosen, softcap)
    torch.testing.assert_close(out.cpu(), expected[0], atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.cpu(), expected[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("device", "place"), PLACES)
def test_attending_to_everything_and_to_pages_is_the_same_wherever_it_is_done(device, place):
    store, query = made_store(), queries()
    host = HostKV(store, torch.device(device), place)
    everything = torch.arange(N).expand(HKV, R, N)
    pages = torch.arange(-(-N // 8)).expand(HKV, R, -1)
    limit = torch.full((HKV,), 10**6)
    for selection in (Selection(None), PageSelection(pages.to(device), 8, limit.to(device), shared=False)):
        stats = StepStats()
        out, lse = host.attend(0, Queries(query.to(device), 0.4), selection, stats)
        expected = by_mask(store, query, everything)
        torch.testing.assert_close(out.cpu(), expected[0], atol=5e-6, rtol=0)
        torch.testing.assert_close(lse.cpu(), expected[1], atol=5e-6, rtol=0)
        assert (stats.bus_bytes > 0) == (device != "cpu")


def test_selecting_everything_is_dense_block_by_block(monkeypatch):
    store, query = made_store(), queries()
    monkeypatch.setattr(kv, "BLOCK_TOKENS", 16)
    state = HostKV(store, torch.device("cpu")).attend(0, Queries(query, 0.4), Selection(None), StepStats())
    expected = by_mask(store, query, torch.arange(N).expand(HKV, R, N))
    torch.testing.assert_close(state.out, expected[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("place", ["host", "device", "pinned"])
def test_many_rows_are_taken_in_parts(place, monkeypatch):
    store, query, chosen = made_store(), queries(20), ids(5, 20)
    monkeypatch.setattr(kv, "SCORES", 100)
    host = HostKV(store, torch.device("cpu"), place)
    state = host.attend(0, Queries(query, 0.4), Selection(chosen), StepStats())
    torch.testing.assert_close(state.out, by_mask(store, query, chosen)[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("place", ["host", "device", "pinned"])
def test_a_budget_of_nothing_is_the_empty_state(place):
    state = HostKV(made_store(), torch.device("cpu"), place).attend(
        0, Queries(queries(), 0.4), Selection(torch.empty(HKV, R, 0, dtype=torch.long)), StepStats()
    )
    assert (state.out == 0).all()
    assert torch.isneginf(state.lse).all()


@pytest.mark.parametrize("place", ["host", "device", "pinned"])
def test_shared_rows_move_once_and_keys_do_not_move_with_known_scores(place, monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 1)  # rows on several threads share nothing
    store, query = made_store(), queries()
    same = torch.arange(10).expand(HKV, R, 10)
    for scores, numbers in ((None, D + VALUE_D), (torch.zeros(HKV, R, 10), VALUE_D)):
        stats = StepStats()
        host = HostKV(store, torch.device("cpu"), place)
        host.attend(0, Queries(query, 0.4), Selection(same, scores), stats)
        assert stats.attended == {place: 1}
        assert stats.bytes_moved == HKV * 10 * numbers * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numpy_and_torch_see_the_same_numbers(dtype):
    tensor = torch.randn(3, 5).to(dtype)
    array = numpy_view(tensor)
    assert array.itemsize == tensor.element_size()
    assert torch.equal(tensor_view(array), tensor)
    assert np.array_equal(array.astype(np.float32), tensor.float().numpy())


def test_generated_kv_grows_crops_and_forks_independently():
    generated = GeneratedKV()
    parts = [torch.randn(2, 3, n, 4) for n in (1, 100, 5, 300)]
    for part in parts:
        generated.append(part, -part[..., :3])
    whole = torch.cat(parts, dim=2)
    assert torch.equal(generated.view()[0], whole)
    fork = generated.fork()
    generated.crop(50)
    generated.append(parts[2], -parts[2][..., :3])
    assert torch.equal(fork.view()[1], -whole[..., :3])
    assert torch.equal(generated.view()[0], torch.cat([whole[:, :, :50], parts[2]], dim=2))
    fork.rows(torch.tensor([1, 1, 0]))
    assert torch.equal(fork.view()[0], whole[[1, 1, 0]])


def test_keys_that_are_the_values_too_are_held_once():
    generated, part = GeneratedKV(), torch.randn(2, 1, 70, 4)
    for rows in part.split(30, dim=2):
        generated.append(rows, rows)
    fork = generated.fork()
    fork.rows(torch.tensor([1]))
    for held, whole in ((generated, part), (fork, part[1:])):
        keys, values = held.view()
        assert torch.equal(keys, whole)
        assert keys.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("place", ["host", "device", "pinned"])
@pytest.mark.parametrize("selection", [Selection(None), Selection(ids(7)[:1]), "pages"])
def test_latents_are_keys_and_values_in_one_and_read_once(place, selection, monkeypatch):
    monkeypatch.setattr(threads, "THREADS", 1)
    rows = np.random.default_rng(0).standard_normal((1, 1, N, D)).astype(np.float32)
    shape = ModelShape((LayerShape(LayerKind.FULL, 1, D, D, latent=True),), R)
    store, query, tokens = MemoryStore(shape, rows, rows), queries()[:1], N
    if selection == "pages":
        everything = torch.arange(-(-N // 8)).expand(1, R, -1)
        selection = PageSelection(everything, 8, torch.tensor([N + 8]), shared=False)
    elif selection.ids is not None:
        tokens = len(selection.ids.unique())
    host, stats = HostKV(store, torch.device("cpu"), place), StepStats()
    state = host.attend(0, Queries(query, 0.4), selection, stats)
    chosen = getattr(selection, "ids", None)
    whole = torch.from_numpy(rows)[0, 0]
    seen = torch.ones(R, N, dtype=torch.bool)
    if chosen is not None:
        seen = torch.zeros(R, N, dtype=torch.bool).scatter_(1, chosen[0], True)
    expected = attend(query[None], whole[None, None], whole[None, None], 0.4, seen[None, None])
    torch.testing.assert_close(state.out, expected.out[0], atol=5e-6, rtol=0)
    assert stats.bytes_moved == tokens * D * 4
