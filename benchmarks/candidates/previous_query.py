"""What was found for the previous token's query, taken over: `python -m benchmarks.candidates.previous_query
--store STORE`.

FreeKV (Liu et al. 2025, arXiv 2505.13109), speculative retrieval with correction, there of pages and here of
tokens: a step attends to the k best keys of the query before it, while its own are searched for, for the next
step. A KV head whose queries have turned away, by the mean cosine over its group, is searched before it
attends. The queries are those of a dense answer, behind the store, by the model that made it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from benchmarks.tables import table
from offload_decode.engine.engine import Engine
from offload_decode.evals.recorded_queries import Call, run_dense
from offload_decode.kv.host import HostKV

QUESTION = "What is this text about?"
BARS = (0.9, 0.7, 0.5, 0.3, -1.0)


def taken_over(rows: Tensor, logits: Tensor, k: int) -> Tensor:
    """What each step of one KV head would take over from the one before it: the mean cosine of their queries
    `rows [T, G, D]`, the share of its k best that are among those taken over, and their attention in units of
    that of its own k best, by `logits [T, G, N]`: `[3, T - 1]`.
    """
    cosine = cosine_similarity(rows[1:], rows[:-1], dim=-1).mean(-1)
    best, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
    over = logits[1:].gather(-1, ids[:-1])
    recall = (over >= best[1:, :, -1:]).float().mean((-2, -1))
    highest = best[1:, :, :1]
    mass = (over - highest).exp().sum(-1) / (best[1:] - highest).exp().sum(-1)
    return torch.stack([cosine, recall, mass.mean(-1)])


def by_layer(calls: Sequence[Call], host: HostKV, k: int) -> dict[int, Tensor]:
    """`taken_over` of the calls of one token, layer by layer: `[3, T - 1, Hkv]`."""
    kv_heads, found = host.store.manifest.shape.kv_heads, {}
    for layer in dict.fromkeys(call.layer for call in calls):
        steps = [call.queries(kv_heads) for call in calls if call.layer == layer and call.query.shape[2] == 1]
        heads = []
        for head in range(kv_heads):
            keys = host.keys(layer, head).read(slice(None), host.device)
            rows = torch.stack([step.rows[head] for step in steps])
            heads.append(taken_over(rows, steps[0].logits(rows @ keys.T), k))
        found[layer] = torch.stack(heads, dim=-1)
    return found


def show(layers: dict[int, Tensor]) -> str:
    """For each bar: how many heads are searched after all, and what is found in all heads together."""
    together = torch.cat([measured.flatten(1) for measured in layers.values()], dim=1)
    cosine, recall, mass = together
    lines = [
        f"layer {layer}: the cosine of neighbouring queries is {measured[0].median():.2f} in the median"
        for layer, measured in layers.items()
    ]
    cells = []
    for bar in BARS:
        searched = cosine < bar
        shares = (torch.where(searched, 1.0, own).mean() for own in (recall, mass))
        cells.append([f"{bar:g}", *(f"{share:.1%}" for share in (searched.float().mean(), *shares))])
    heads = ["similarity", "heads searched first", "recall", "attention of the exact top-k's"]
    return "\n".join([*lines, "", table(heads, cells)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--question", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=64, help="of the answer")
    parser.add_argument("--k", type=int, default=1024)
    asked = parser.parse_args(arguments)
    engine = Engine.open(asked.store, selector="dense", device="cpu")
    with torch.inference_mode():
        run = run_dense(engine.loaded, engine.store, asked.question, asked.tokens, lambda: None)
        print(show(by_layer(run.calls, HostKV(engine.store, engine.loaded.device), asked.k)))


if __name__ == "__main__":
    main()
