"""`error=E@P`: outputs are within the error of dense attention as often as is stated, or are dense."""

import numpy as np
import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.common.rows import threads
from offload_decode.common.rows.encodings import INT8, encode
from offload_decode.engine.step import ScatteredPrefix, StoredPrefix
from offload_decode.kv.host_cache import HostKV
from offload_decode.selectors.budgets import ErrorBound
from offload_decode.store.memory import MemoryStore
from offload_decode.testing.stores import WIDTHS, of_parameter
from offload_decode.types import LayerKind, ModelShape

HEADS, GROUP, DIM = 2, 3, 16
SHORT, LONG, SHORTER = 4000, 11_000, 2500  # of one rung, of two, and of none
SCALING = DIM**-0.5
LAYERS = 8


def drawn(*shape, seed):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def rows(seed=9, tokens=1, length=1.0):
    return torch.from_numpy(length * drawn(1, HEADS * GROUP, tokens, DIM, seed=seed))


def host_of(keys, values, layers=LAYERS):
    """Layers differ in what is drawn of them alone."""
    shape = ModelShape.uniform((LayerKind.FULL,) * layers, HEADS * GROUP, HEADS, DIM)
    return HostKV(MemoryStore(shape, [keys] * layers, [values] * layers), torch.device("cpu"))


def made(n_tokens, spread=1.0, mean=1.0, layers=LAYERS):
    """The larger `spread`, the more peaked is attention; the larger `mean`, the more alike are values."""
    keys = spread * drawn(HEADS, n_tokens, DIM, seed=1)
    return host_of(keys, mean + drawn(HEADS, n_tokens, DIM, seed=2), layers)


def heavy_tailed(n_tokens):
    keys = np.random.default_rng(3).standard_t(3, (HEADS, n_tokens, DIM)).astype(np.float32)
    return host_of(keys, 1 + drawn(HEADS, n_tokens, DIM, seed=4))


def with_a_spike(n_tokens):
    """One token in the midst of keys like each other has nearly all of every query's attention."""
    keys = 0.01 * drawn(HEADS, n_tokens, DIM, seed=5)
    values = 1 + drawn(HEADS, n_tokens, DIM, seed=6)
    keys[:, 1234, 0], values[:, 1234] = 100, -7
    return host_of(keys, values)


def on_a_plateau(n_tokens, heavy):
    """Some more tokens than the first rung's best weigh as much as these, and no other weighs anything: of so
    few, a sample of the others often has none.
    """
    keys = np.zeros((HEADS, n_tokens, DIM), np.float32)
    keys[:, np.random.default_rng(8).choice(n_tokens, heavy, replace=False)] = 12
    return host_of(keys, 1 + drawn(HEADS, n_tokens, DIM, seed=9))


def alike(n_tokens):
    return host_of(np.ones((HEADS, n_tokens, DIM), np.float32), 1 + drawn(HEADS, n_tokens, DIM, seed=7))


def prefix_of(host, error="0.05@0.95", **options):
    shape = host.store.manifest.shape
    return StoredPrefix.over(host, shape, "topk", {"error": error, **options} if error else options)


def dense(host, query, layer=0, softcap=None):
    shape = host.store.manifest.shape
    return StoredPrefix.over(host, shape, "dense", {}).attend(layer, query, SCALING, softcap)


def errors(state, exact):
    return ((state.out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)).flatten()


@pytest.mark.parametrize("bound", ["0.02@0.95", "0.05@0.95", "0.1@0.9"])
@pytest.mark.parametrize(
    "host",
    [
        made(SHORT, spread=0.1),
        made(SHORT, spread=2.0),
        made(LONG, spread=1.0),
        made(SHORT, mean=0.0),
        heavy_tailed(LONG),
        with_a_spike(SHORT),
        alike(SHORT),
        on_a_plateau(LONG, 285),
    ],
    ids=["flat", "peaked", "two rungs", "no direction", "heavy-tailed", "spike", "alike", "plateau"],
)
def test_the_error_is_kept_to(host, bound):
    prefix, asked = prefix_of(host, bound), ErrorBound.parse(bound)
    kept, of_sum = [], []
    for layer in range(LAYERS):
        query = rows(seed=layer, tokens=8).abs()
        state, exact = prefix.attend(layer, query, SCALING, None), dense(host, query)
        kept.append(errors(state, exact) <= asked.error)
        of_sum.append(((state.lse - exact.lse).exp() - 1).abs() <= asked.error)
    assert torch.cat(kept).float().mean() >= asked.share
    assert torch.cat(of_sum).float().mean() >= asked.share
    assert prefix.take_stats().tail_error <= asked.error


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_what_is_stated_holds_as_often_as_it_says(share):
    """Layer by layer other tokens are drawn, of which none is enough to know the error exactly."""
    host, kept = made(SHORT, spread=0.5, layers=60), []
    prefix = prefix_of(host, f"0.3@{share}")
    exact = dense(host, rows())
    for layer in range(60):
        state = prefix.attend(layer, rows(), SCALING, None)
        stats = prefix.take_stats()
        assert not stats.whole_rows
        kept += (errors(state, exact) <= stats.tail_error).tolist()
    assert share - 0.08 < np.mean(kept) < share + 0.08


def test_the_fewer_tokens_suffice_the_fewer_are_read():
    read = []
    for bound in ("0.3@0.9", "0.03@0.9", "0.0001@0.9"):
        prefix = prefix_of(made(LONG), bound)
        prefix.attend(0, rows(), SCALING, None)
        stats = prefix.take_stats()
        read.append(stats.selected / stats.rows)
    assert read[0] <= 256 + 1024 < read[1] < read[2] == LONG


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_what_cannot_be_kept_to_is_dense(softcap):
    """Values of no direction: the length of their mean is as small as the error of a sample."""
    host = made(SHORT, spread=0.01, mean=0.0)
    prefix = prefix_of(host, "0.01@0.95")
    state, exact = prefix.attend(0, rows(), SCALING, softcap), dense(host, rows(), softcap=softcap)
    torch.testing.assert_close(state.out, exact.out)
    torch.testing.assert_close(state.lse, exact.lse)
    stats = prefix.take_stats()
    assert stats.whole_rows == stats.rows
    assert stats.selected == stats.rows * SHORT
    assert not stats.tail_error


@pytest.mark.parametrize("n_tokens", [1, 300, SHORTER])
def test_a_few_tokens_are_all_attended_to(n_tokens):
    host = made(n_tokens)
    prefix = prefix_of(host)
    state, exact = prefix.attend(0, rows(), SCALING, None), dense(host, rows())
    torch.testing.assert_close(state.out, exact.out)
    assert prefix.take_stats().whole_rows == HEADS * GROUP


@pytest.mark.parametrize("host", [made(LONG), heavy_tailed(SHORT)], ids=["two rungs", "heavy-tailed"])
def test_a_row_depends_on_no_other_row_nor_on_threads(host, monkeypatch):
    query = rows(tokens=100)  # more than are taken at once
    prefix = prefix_of(host, "0.03@0.95")
    together = prefix.attend(0, query, SCALING, None)
    cost = prefix.take_stats()
    assert cost.tail_error > 0
    for number in (1, 2):
        monkeypatch.setattr(threads, "THREADS", number)
        fresh = prefix_of(host, "0.03@0.95")
        alone = [fresh.attend(0, query[:, :, t : t + 1], SCALING, None) for t in range(query.shape[2])]
        for part, own in zip(together, zip(*alone, strict=True), strict=True):
            torch.testing.assert_close(part, torch.cat(own, dim=2), rtol=1e-5, atol=1e-6)
        stats = fresh.take_stats()
        assert (stats.selected, stats.whole_rows) == (cost.selected, cost.whole_rows)
        assert stats.tail_error == pytest.approx(cost.tail_error, rel=1e-3)


def test_encoded_rows_are_drawn_too():
    keys, values = drawn(HEADS, SHORT, DIM, seed=1), 1 + drawn(HEADS, SHORT, DIM, seed=2)
    host = host_of(encode(keys, INT8), encode(values, INT8))
    prefix = prefix_of(host, "0.1@0.95")
    assert errors(prefix.attend(0, rows(), SCALING, 20.0), dense(host, rows(), softcap=20.0)).max() <= 0.1
    assert prefix.take_stats().whole_rows < HEADS * GROUP


def test_forks_share_what_was_drawn_and_dense_layers_are_dense():
    host = made(SHORT)
    prefix = prefix_of(host, dense_layers="1")
    prefix.attend(0, rows(), SCALING, None)
    assert prefix.fork().selector.within is prefix.selector.within
    exact = dense(host, rows(), layer=1)
    torch.testing.assert_close(prefix.attend(1, rows(), SCALING, None).out, exact.out)
    assert prefix.take_stats().by_layer[1] == HEADS * GROUP * SHORT


@pytest.mark.parametrize(
    "options",
    [
        {"error": error}
        for error in ("0.05", "@0.9", "0@0.9", "1@0.9", "0.1@1", "0.1@0.4", "a@b", "nan@0.9", "0.1@nan")
    ]
    + [{"budget": "64"}, {"tail": "sample"}, {"schedule": "linear"}],
)
def test_what_makes_no_sense_is_refused(options):
    with pytest.raises(ConfigError, match="error"):
        prefix_of(made(SHORTER), **options)


def test_latents_and_parts_of_a_store_are_refused():
    latent = of_parameter(WIDTHS[-1])
    with pytest.raises(ConfigError, match="latents"):
        prefix_of(HostKV(latent, torch.device("cpu")))
    with pytest.raises(ConfigError, match="each worker sees a part"):
        ScatteredPrefix(prefix_of(made(SHORTER)), lambda *_: lambda: [])
