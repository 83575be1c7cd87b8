"""Dense prefill of a model in bfloat16 on a CPU: `python -m benchmarks.cpu_prefill`.

Layers of a real width with random weights (`--shape`: of Llama 3.2 1B or 3B) prefill random
tokens; first with attention to earlier chunks in float32, as on processors without products of bfloat16,
then with them (`kernels.half_products`). Prints tokens/s of both, of all of the text and of its last tenth,
and how far the values of the last layer are apart, relative to their size (root mean square).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.width_parts import SHAPES, distance, made
from cli.counts import token_count
from offload_decode.evals.made_with import made_with
from offload_decode.kernels import half_products
from offload_decode.kernels.rows import tensor_view
from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore
from offload_decode.types import Document
from prefill_jobs.job import Settings, prefill_tokens


@dataclass(frozen=True)
class Result:
    """One prefill: tokens a second of all of it, and of its last tenth, where that is several chunks."""

    products: str
    tokens: int
    seconds: float
    tokens_per_second: float
    at_the_end: float | None


def prefilled(loaded: LoadedModel, products: str, tokens: np.ndarray, folder: Path) -> Result:
    """`products`: float32 or bfloat16."""
    marks = [(0, time.perf_counter())]

    def watch(stage: str, now: int, total: int) -> None:
        if stage == "prefill":
            marks.append((now, time.perf_counter()))

    with patch.object(half_products, "has_half_products", lambda: products == "bfloat16"):
        prefill_tokens(
            loaded, tokens, [Document("random", 0, len(tokens))], folder, Settings(), progress=watch
        )
    (done, ended), (before, then) = marks[-1], next(mark for mark in marks if mark[0] >= 0.9 * len(tokens))
    seconds = ended - marks[0][1]
    late = round((done - before) / (ended - then), 1) if done > before else None
    return Result(products, len(tokens), round(seconds, 1), round(len(tokens) / seconds, 1), late)


def last_values(folder: Path) -> torch.Tensor:
    store = KVStore.open(folder)
    shape = store.manifest.shape
    heads = range(shape.kv_heads)
    return torch.stack([tensor_view(store.values(shape.full_layers[-1], head)).float() for head in heads])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=token_count, default=50_000)
    parser.add_argument("--out", type=Path, help="folder for the figures")
    options = parser.parse_args()
    loaded, _ = made(options.shape, options.layers)
    tokens = (
        np.random.default_rng(0).integers(0, loaded.model.config.vocab_size, options.tokens).astype(np.int32)
    )
    if not half_products.has_half_products():
        print("This processor has no products of bfloat16; below they are emulated.", flush=True)
    results, values = [], []
    with TemporaryDirectory(prefix="offload-decode-cpu-", dir=".") as inside:
        for products in ("float32", "bfloat16"):
            results.append(prefilled(loaded, products, tokens, Path(inside) / products))
            print(json.dumps(asdict(results[-1])), flush=True)
            values.append(last_values(Path(inside) / products))
    figures = {
        "made_with": made_with(loaded),
        "shape": options.shape,
        "layers": options.layers,
        "results": [asdict(result) for result in results],
        "faster": round(results[0].seconds / results[1].seconds, 2),
        "values_apart": round(distance(values[1], values[0]), 5),
    }
    print(json.dumps(figures, indent=1))
    if options.out:
        (options.out / "cpu_prefill.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
