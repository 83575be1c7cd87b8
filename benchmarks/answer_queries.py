"""What does an index find for the queries of answers? python -m benchmarks.answer_queries STORE

An index is tuned on queries of the prefill, and its report is of others of these. Here two questions are
answered with dense attention, and each query of the answers is put to the indexes: how often the best key is
found, how many queries lose more than a tenth of the attention that exact top-k holds (and of the worst
head), the share of that attention that is found, and milliseconds of a head's queries in one call.
"""

import time
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.common import option_parser, table
from offload_decode.common.rows.arrays import Float32
from offload_decode.engine.engine import Engine
from offload_decode.evals.recorded_queries import run_dense
from offload_decode.indexes import registry
from offload_decode.indexes.approximate import Quality, quality
from offload_decode.indexes.flat import FlatIndex
from offload_decode.kv.indexes import DEFAULT, heads_of, index_path, kind_folder
from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore

QUESTIONS = "What is this text about?", "List the most important names and numbers in it."


def asked(store: KVStore, loaded: LoadedModel, tokens: int) -> dict[int, Float32]:
    """The queries of so many tokens of each answer by layer, `[Hkv, R, D]`."""
    found = dict[int, list[torch.Tensor]]()
    for question in QUESTIONS:
        for call in run_dense(loaded, store, question, tokens, lambda: None).calls:
            rows = call.queries(store.manifest.shape.kv_heads)
            # Logits by the scaling of a head's width, as `quality` takes them.
            own = rows.vectors * (rows.scaling * rows.vectors.shape[-1] ** 0.5)
            found.setdefault(call.layer, []).append(own)
    return {layer: torch.cat(own, 1).numpy().astype(np.float32) for layer, own in found.items()}


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("stores", type=Path, nargs="+", metavar="STORE")
    parser.add_argument("--kind", default=DEFAULT)
    parser.add_argument("--k", default="1,8,64,320", help="keys, with commas between")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    given = parser.parse_args()
    rows = []
    for path in given.stores:
        store = KVStore.open(path)
        queries = asked(store, Engine.open(path, selector="dense").loaded, given.tokens)
        for k in map(int, given.k.split(",")):
            found, seconds = list[Quality](), list[float]()
            for layer, head in heads_of(store):
                keys, own = store.keys(layer, head), queries[layer][head]
                file = index_path(kind_folder(store.path, given.kind), layer, head)
                index = registry.get(given.kind).load(file, keys, digest=store.digest(layer, head))
                hits = index.search(own, k)
                began = time.perf_counter()
                index.search(own, k)
                seconds.append(time.perf_counter() - began)
                found.append(quality(hits, FlatIndex(keys, "").search(own, k), own.shape[1] ** -0.5))
            rows.append(
                [
                    f"{path.stem}, k = {k}",
                    f"{fmean(one.best for one in found):.2%}",
                    f"{fmean(one.lost for one in found):.3%} ({max(one.lost for one in found):.1%})",
                    f"{fmean(one.mass for one in found):.3%}",
                    f"{1000 * fmean(seconds):.2f}",
                ]
            )
    print(table(["store", "best key found", "a tenth lost (worst head)", "attention", "ms"], rows))


if __name__ == "__main__":
    main()
