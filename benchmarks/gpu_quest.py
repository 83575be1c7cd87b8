"""Quest's kernels on a CUDA device, beside dense attention: `python benchmarks/gpu_quest.py [--dim 128]`.

Every kernel is first checked against the plain torch reference on the sizes it is timed on. Times are medians
of CUDA-graph replays with a cold cache, so that they hold the device's work and not Python's launches. Dense
attention is the fastest of torch's fused backends, with the group's keys shared or repeated. Needs torch and
triton alone. Exit code 2 without a CUDA device. `--tiny` runs every step on small sizes, without times on a
CPU.
"""

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from offload_decode.attention import pages_reference as paging
from offload_decode.attention.pages_reference import SCALE_PAGES, PageBounds
from offload_decode.types import AttentionState

BUDGET = 2048
REPEATS = 30
DENSE_TOKENS = 2**17  # beyond, repeated keys and values outgrow small cards
# Llama-3-8B's layer, and the paper's (Llama-2-7B: no shared heads). (KV heads, group)
LLAMA_3, LLAMA_2 = (8, 4), (32, 1)
BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.MATH,
)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time of a replay with a cold cache; 0 where there is no device to time."""
    if device.type != "cuda":
        work()
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles and warms up outside the capture
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    size = 4 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(size, dtype=torch.int8, device=device)
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def make_bounds(keys: torch.Tensor, page_size: int, kind: str) -> PageBounds:
    """True bounds of pages; in int8 rounded outward to a scale's steps."""
    heads, tokens, dim = keys.shape
    pages = keys[:, : tokens // page_size * page_size].reshape(heads, -1, page_size, dim)
    lower, upper = pages.amin(2), pages.amax(2)
    if kind == "float16":  # the keys are float16: so are their extremes
        return PageBounds(lower, upper)
    blocks = -(-lower.shape[1] // SCALE_PAGES)
    reach = torch.zeros(heads, blocks * SCALE_PAGES, dim, device=keys.device)
    reach[:, : lower.shape[1]] = torch.maximum(lower.abs(), upper.abs())
    scale = (reach.reshape(heads, blocks, SCALE_PAGES, dim).amax(2) / 126).clamp(min=1e-9)
    step = scale.repeat_interleave(SCALE_PAGES, 1)[:, : lower.shape[1]]
    return PageBounds((lower / step).floor().to(torch.int8), (upper / step).ceil().to(torch.int8), scale)


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal to the reference, relative to its largest value; else the run ends here."""
    gap = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1)
    if not gap <= tolerance:
        sys.exit(f"{name} is off the torch reference by {float(gap):.1e} of its largest value")


def dense_time(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[float, str]:
    """The time of the fastest way torch has for one token's attention over all keys, and its name;
    `query [Hkv, G, D]` in the keys' dtype.
    """
    kv_heads, group, dim = query.shape
    shared = keys[None], values[None]
    # The group's heads as queries of their KV head read each key once, as grouped heads would.
    forms = {"group as rows": (query[None], shared)}
    if group > 1:
        heads = query.reshape(1, kv_heads * group, 1, dim)
        repeated = keys[None].repeat_interleave(group, 1), values[None].repeat_interleave(group, 1)
        forms |= {"repeated": (heads, repeated), "enable_gqa": (heads, shared)}
    attend = torch.nn.functional.scaled_dot_product_attention
    times = []
    for backend in BACKENDS:
        for form, (rows, stored) in forms.items():
            work = partial(attend, rows, *stored, enable_gqa=rows.shape[1] != stored[0].shape[1])
            try:
                with sdpa_kernel(backend):
                    times.append((milliseconds(work, query.device), f"{backend.name.lower()}, {form}"))
            except RuntimeError as refusal:  # a backend that cannot take this shape on this card
                reason = str(refusal).splitlines()[0]
                print(f"{backend.name.lower()}, {form}: refused: {reason}", file=sys.stderr)
    return min(times)


def measure(
    heads: tuple[int, int], tokens: int, dim: int, page_size: int, kind: str, device: torch.device
) -> dict[str, object]:
    """Scoring, top-k and attention of one layer's step for one token."""
    from offload_decode.attention import pages_device as device_pages

    kv_heads, group = heads
    torch.manual_seed(0)
    keys, values = (torch.randn(kv_heads, tokens, dim, dtype=torch.float16, device=device) for _ in range(2))
    query = torch.randn(kv_heads, 1, group, dim, device=device).half().float()
    bounds = make_bounds(keys, page_size, kind)
    k, scaling = min(BUDGET, tokens) // page_size, dim**-0.5
    limit = torch.full((kv_heads,), BUDGET, device=device)

    def score() -> torch.Tensor:
        return device_pages.page_scores(query, bounds)

    def attend(chosen: torch.Tensor) -> AttentionState:
        return device_pages.attend_pages(query, keys, values, chosen, page_size, limit, scaling)

    scores = score()
    check("page_scores", scores, paging.page_scores(query, bounds), 1e-5)
    pages = device_pages.top_pages(scores, k)
    if not torch.equal(pages, paging.top_pages(scores, k)):
        sys.exit("top_pages differs from the torch reference")
    state = attend(pages)
    expected = paging.attend_pages(query, keys, values, pages, page_size, limit, scaling)
    check("attend_pages", state.out, expected.out, 1e-4)
    check("attend_pages' log-sum-exp", state.lse, expected.lse, 1e-4)

    works: dict[str, Callable[[], object]] = {
        "scoring_ms": score,
        "top_k_ms": lambda: device_pages.top_pages(scores, k),
        "attention_ms": lambda: attend(pages),
        "quest_ms": lambda: attend(device_pages.top_pages(score(), k)),
    }
    about = {"heads": f"{kv_heads} KV heads x {group}", "tokens": tokens}
    times = {name: milliseconds(work, device) for name, work in works.items()}
    row: dict[str, object] = {**about, "page_size": page_size, "bounds": kind, **times}
    if tokens <= DENSE_TOKENS:
        dense, backend = dense_time(query[:, 0].half(), keys, values)
        row |= {"dense_ms": dense, "dense_backend": backend}
        row["dense_over_quest"] = dense / times["quest_ms"] if times["quest_ms"] else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=128, help="head dimension")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--tiny", action="store_true", help="small sizes; on a CPU the steps without times")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        print("gpu_quest.py needs a CUDA device, and there is none here.", file=sys.stderr)
        sys.exit(2)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import triton

    # The paper's shape is measured at the paper's length.
    shapes = [(LLAMA_3, tokens) for tokens in ([2**6] if options.tiny else [2**15, 2**17, 2**20])]
    shapes.append((LLAMA_2, 2**6 if options.tiny else 2**15))
    rows = []
    for (kv_heads, group), tokens in shapes:
        heads = (2 if options.tiny else kv_heads, group)
        for page_size in (16, 32):
            for kind in ("float16", "int8"):
                rows.append(measure(heads, tokens, options.dim, page_size, kind, device))
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dim": options.dim,
        "budget": BUDGET,
        "timing": f"median of {REPEATS} CUDA-graph replays with a cold L2 cache",
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu_quest.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
