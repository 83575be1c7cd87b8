"""The Triton kernels of pages and of chosen rows equal the plain torch references: under Triton's interpreter
where there is no CUDA device, and on the card where there is one.
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from offload_decode.attention import device_tokens
from offload_decode.attention import pages_reference as paging
from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError
from offload_decode.types import AttentionState
from tests.card import stand_in

pytest.importorskip("triton", reason="triton is not installed: pip install triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# (KV heads, lists, group, head dimension, pages, page size)
SHAPES = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 4, 5, 11, 3),
    (1, 1, 40, 16, 12, 16),
    (3, 1, 7, 80, 9, 7),
    (1, 1, 17, 128, 10, 32),
    (1, 1, 2, 300, 4, 16),
]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and (INTERPRETED or not torch.cuda.is_available()):
        pytest.skip("no CUDA device, or TRITON_INTERPRET is set")
    if request.param == "cpu" and not INTERPRETED:
        pytest.skip("Triton compiles for the card here; TRITON_INTERPRET=1 interprets")
    return torch.device(request.param)


@pytest.fixture
def kernels():
    return importlib.import_module("offload_decode.attention.pages_device")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bounds_of(kind: str, heads: int, pages: int, dim: int) -> PageBounds:
    middle, half = random(heads, pages, dim, seed=1), random(heads, pages, dim, seed=2).abs()
    lower, upper = middle - half, middle + half
    if kind == "int8":
        scale = random(heads, -(-pages // SCALE_PAGES), dim, seed=3).abs()
        return PageBounds((lower * 20).to(torch.int8), (upper * 20).to(torch.int8), scale)
    return PageBounds(lower.to(getattr(torch, kind)), upper.to(getattr(torch, kind)))


def on(device, bounds: PageBounds) -> PageBounds:
    return PageBounds(*(None if part is None else part.to(device) for part in bounds))


def same(state, expected, atol=2e-5, rtol=2e-5):
    torch.testing.assert_close(state.out.cpu(), expected.out, atol=atol, rtol=rtol)
    torch.testing.assert_close(state.lse.cpu(), expected.lse, atol=atol, rtol=rtol)


@pytest.mark.parametrize("kind", ["float32", "float16", "int8"])
@pytest.mark.parametrize("shape", [*SHAPES, (2, 1, 2, 3, 600, 16)], ids=str)
def test_scores_equal_the_reference(kernels, device, shape, kind):
    heads, lists, group, dim, pages, _ = shape
    query, bounds = random(heads, lists, group, dim) * 3, bounds_of(kind, heads, pages, dim)
    scores = kernels.page_scores(query.to(device), on(device, bounds))
    torch.testing.assert_close(scores.cpu(), paging.page_scores(query, bounds), atol=2e-5, rtol=1e-5)


def test_scores_of_queries_far_apart_in_size(kernels, device):
    """A query is split into float16 parts relative to its largest channel: neither tiny nor huge ones may be
    lost.
    """
    query = torch.stack([random(1, 1, 32) * 1e-9, random(1, 1, 32) * 1e9, torch.zeros(1, 1, 32)], dim=1)
    bounds = bounds_of("float16", 1, 20, 32)
    scores = kernels.page_scores(query.to(device), on(device, bounds)).cpu()
    torch.testing.assert_close(scores, paging.page_scores(query, bounds), atol=1e-15, rtol=1e-5)


def test_views_of_any_stride(kernels, device):
    given = bounds_of("float16", 2, 9, 6)
    bounds = PageBounds(given.lower.mT.contiguous().mT, given.upper)
    query = random(2, 6, 2, 3).transpose(1, 3)
    scores = kernels.page_scores(query.to(device), on(device, bounds)).cpu()
    torch.testing.assert_close(scores, paging.page_scores(query, bounds), atol=2e-5, rtol=1e-5)
    keys, values = random(2, 9 * 4, 2, 6).transpose(1, 2)
    pages, limit = paging.top_pages(scores, 4), torch.tensor(16).expand(2)
    state = kernels.attend_pages(
        query.to(device), keys.to(device), values.to(device), pages.to(device), 4, limit.to(device), 0.3
    )
    same(state, paging.attend_pages(query, keys, values, pages, 4, limit, 0.3))


@pytest.mark.parametrize("k", [0, 1, 7, 16, 90, 999])
def test_top_pages_are_exactly_the_best_and_ties_go_to_the_earlier(kernels, device, monkeypatch, k):
    scores = torch.randint(-3, 4, (2, 3, 90), generator=torch.Generator().manual_seed(0)).float()
    scores[0, 0] = 1.0
    scores[0, 1, ::3], scores[0, 2, ::5] = -torch.inf, torch.inf
    scores[1, 0, ::2] *= -1.0  # both zeros
    scores[1, 2] = random(90)
    expected = paging.top_pages(scores, k)
    for chunk in (8192, 32):  # one round; several, or too small a chunk for any
        monkeypatch.setattr(kernels, "CHUNK", chunk)
        assert torch.equal(kernels.top_pages(scores.to(device), k).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [None, 24, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_the_reference(kernels, device, shape, value_dim, dtype):
    heads, lists, group, dim, pages, size = shape
    n_tokens = pages * size - size // 2  # the last page is ragged
    query = random(heads, lists, group, dim)
    keys = random(heads, n_tokens, dim, seed=1).to(dtype)
    values = random(heads, n_tokens, value_dim or dim, seed=2).to(dtype)
    chosen = random(heads, lists, pages, seed=3).argsort(-1)[..., : pages // 2 + 1]
    chosen[..., 1::4] = -1
    chosen[0, 0, -1] = pages - 1
    for limit, softcap in (
        (torch.full((heads,), 10**10), None),
        (torch.arange(heads) * size + size // 2, 2.0),  # within a page; nothing at all for size 1
    ):
        expected = paging.attend_pages(query, keys, values, chosen, size, limit, 0.4, softcap)
        on_device = (part.to(device) for part in (query, keys, values, chosen))
        same(kernels.attend_pages(*on_device, size, limit.to(device), 0.4, softcap), expected)


def test_an_attention_in_one_piece_equals_the_merged_one(kernels, device, monkeypatch):
    query, chosen = random(1, 2, 3, 8), torch.arange(20).expand(1, 2, 20)
    keys, values = random(2, 1, 80, 8, seed=1)
    expected = paging.attend_pages(query, keys, values, chosen, 4, torch.tensor([77]), 0.4)
    for programs in (1, 256):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        on_device = (part.to(device) for part in (query, keys, values, chosen))
        same(kernels.attend_pages(*on_device, 4, torch.tensor([77], device=device), 0.4), expected)


def test_nothing_to_attend_to_is_the_empty_state(kernels, device):
    query, keys, values = (random(*own).to(device) for own in ((2, 3, 4, 8), (2, 50, 8), (2, 50, 5)))
    padding = torch.full((2, 3, 9), -1, device=device)
    none = torch.empty(2, 3, 0, dtype=torch.int64, device=device)
    plenty = torch.full((2,), 1000, device=device)
    for pages, limit in ((padding, plenty), (none, plenty), (padding.clamp(min=0), plenty * 0)):
        state = kernels.attend_pages(query, keys, values, pages, 16, limit, 0.4)
        assert torch.equal(state.out.cpu(), torch.zeros(2, 3, 4, 5))
        assert torch.isneginf(state.lse).all()


def sparse(path: Path, device, dtype, *shape):
    """Zeros of which only the touched parts take memory (on a card: all of them)."""
    if device.type == "cuda":
        if torch.cuda.mem_get_info()[0] < 2 * np.prod(shape, dtype=np.int64) * np.dtype(dtype).itemsize:
            pytest.skip("the card has too little memory")
        return torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device=device)
    return torch.from_numpy(np.memmap(path, dtype, "w+", shape=shape))


def test_bounds_beyond_two_to_the_31_elements(kernels, device, tmp_path):
    """Each stride fits into 32 bits, their products with a head's number do not."""
    heads, pages, dim, stride = 5, 3, 16, 2**29 + 16
    lower, upper = (
        sparse(tmp_path / name, device, np.int8, 4 * stride + pages * dim).as_strided(
            (heads, pages, dim), (stride, dim, 1)
        )
        for name in ("lower", "upper")
    )
    small = bounds_of("int8", heads, pages, dim)
    lower.copy_(small.lower)
    upper.copy_(small.upper)
    query = random(heads, 1, 2, dim)
    scores = kernels.page_scores(query.to(device), PageBounds(lower, upper, small.scale.to(device)))
    torch.testing.assert_close(scores.cpu(), paging.page_scores(query, small), atol=2e-5, rtol=1e-5)


def test_tokens_beyond_two_to_the_31_elements(kernels, device, tmp_path):
    dim, size = 16, 16
    tokens = 2**31 // dim + size + 5
    keys = sparse(tmp_path / "keys", device, np.float16, 1, tokens, dim)
    last = torch.tensor([tokens // size, tokens // size - 1])
    rows = random(1, size + 5, dim).half()
    keys[:, -(size + 5) :] = rows.to(device)
    query = random(1, 1, 2, dim)
    state = kernels.attend_pages(
        query.to(device),
        keys,
        keys,
        last[None, None].to(device),
        size,
        torch.tensor([32], device=device),
        0.4,
    )
    same(
        state, paging.attend_pages(query, rows, rows, torch.tensor([[[1, 0]]]), size, torch.tensor([32]), 0.4)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shapes"), [(90, 5), (89, 5), (80, 5)])
def test_kernels_compile_for_cards_that_are_not_here(tmp_path, capability, shapes):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.attention.compiling_pages", str(capability), str(shapes)],
        cwd=Path(__file__).parents[2],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {
        f"{name}_program" for name in ("score", "select", "order", "attend", "attend_rows", "merge")
    }


def test_a_missing_triton_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "offload_decode.attention.pages_device", raising=False)
    with pytest.raises(ConfigError, match="pip install triton"):
        importlib.import_module("offload_decode.attention.pages_device")


WITHOUT_THE_REST = """
import runpy, sys
sys.modules.update(dict.fromkeys(["zarr", "transformers", "faiss", "hnswlib", "numba", "typer"]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow  # a second copy of torch, and the kernels interpreted
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_benchmark_runs_with_torch_and_triton_alone(tmp_path):
    script = str(Path(__file__).parents[2] / "benchmarks" / "gpu_quest.py")

    def run(*options: str):
        command = [sys.executable, "-c", WITHOUT_THE_REST, script, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    refused = run()
    assert refused.returncode == 2
    assert "needs a CUDA device" in refused.stderr
    done = run("--tiny", "--dim", "16", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu_quest.json").read_text())
    assert {"date", "card", "torch", "triton"} <= result.keys()
    assert {(row["page_size"], row["bounds"]) for row in result["rows"]} == {
        (16, "float16"),
        (16, "int8"),
        (32, "float16"),
        (32, "int8"),
    }


# Chosen rows: (KV heads, rows, k, channels of keys and of values, rows there are)
ROWS = [(1, 1, 1, 1, 1, 1), (2, 3, 17, 5, 9, 40), (3, 2, 700, 64, 64, 900), (1, 4, 130, 300, 128, 200)]
CLOSE = {"atol": 3e-6, "rtol": 2e-6}


def asked(heads, rows, k, dim, value_dim, there, dtype=torch.float16):
    """Queries, keys, values, and places of which some are -1: for one row all of them."""
    keys, values = random(there, dim, seed=1).to(dtype), random(there, value_dim, seed=2).to(dtype)
    generator = torch.Generator().manual_seed(3)
    places = torch.stack(
        [torch.randperm(max(there, k), generator=generator)[:k] for _ in range(heads * rows)]
    ).view(heads, rows, k)
    places = places.masked_fill(random(heads, rows, k, seed=4) > 1, -1).masked_fill(places >= there, -1)
    if rows > 1:
        places[0, 1] = -1
    return random(heads, rows, dim), keys, values, places


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("scored", [False, True])
def test_attention_to_rows_equals_the_reference(device, shape, softcap, scored):
    query, keys, values, places = asked(*shape)
    scores = random(*places.shape, seed=5).masked_fill(random(*places.shape, seed=6) > 1.5, -torch.inf)
    own = None if scored else keys, values, places, scores if scored else None
    on_device = (None if part is None else part.to(device) for part in own)
    state = device_tokens._by_program(Queries(query.to(device), 0.3, softcap), *on_device)
    same(state, device_tokens.reference(Queries(query, 0.3, softcap), *own), **CLOSE)


@pytest.mark.parametrize("programs", [1, 10_000])
def test_rows_in_one_piece_equal_the_merged_one(device, monkeypatch, programs):
    monkeypatch.setattr(device_tokens, "PROGRAMS", programs)
    query, *rows = asked(2, 3, 700, 64, 32, 900, torch.bfloat16)
    on_device = (part.to(device) for part in rows)
    state = device_tokens._by_program(Queries(query.to(device), 0.3), *on_device, None)
    same(state, device_tokens.reference(Queries(query, 0.3), *rows, None), **CLOSE)


def test_rows_in_pinned_memory_are_read_where_they_lie_in_two_launches(monkeypatch):
    if not INTERPRETED:
        pytest.skip("Triton compiles for the card here; TRITON_INTERPRET=1 interprets")
    query, keys, values, places = asked(2, 3, 700, 64, 32, 900)
    expected = device_tokens.reference(Queries(query, 0.3), keys, values, places, None)
    with stand_in() as card:
        sent = Queries(query.cuda(), 0.3), places.cuda()
        launches, waits = [], len(card.waits)
        launch = card.launch
        monkeypatch.setattr(card, "launch", lambda args: launches.append(len(args)) or launch(args))
        rows = [part.pin_memory() for part in (keys, values)]
        state = device_tokens.attend_rows(sent[0], *rows, sent[1], None)
        assert len(launches) == 2
        assert len(card.waits) == waits, "nobody waits for it"
        state = [part.cpu() for part in state]
        with pytest.raises(RuntimeError, match="neither on the device nor pinned"):
            device_tokens.attend_rows(sent[0], keys, values, sent[1], None)
    same(AttentionState(*state), expected, **CLOSE)


def test_no_rows_are_the_empty_state(device):
    query, keys, values, places = (part.to(device) for part in asked(2, 3, 4, 8, 5, 9))
    for none in (places[..., :0], torch.full_like(places, -1)):
        out, lse = device_tokens.attend_rows(Queries(query, 1.0), keys, values, none, None)
        assert (out == 0).all()
        assert torch.isneginf(lse).all()


def test_rows_without_triton_are_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    query, *rows = asked(1, 1, 1, 1, 1, 1)
    with pytest.raises(ConfigError, match="attend=host"):
        device_tokens._by_program(Queries(query, 1.0), *rows, None)
