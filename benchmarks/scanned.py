"""What share of a cluster index's codes one query row reads: `python -m benchmarks.scanned [--tokens N,…]`.

`indexes.clusters` states what a search reads from a curve that is fitted to this, on long-tailed keys. Beside
each measured share stands what the curve says.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks import tables
from benchmarks.layers import Float32, long_tailed
from benchmarks.ways import INDEX_K, RECALL
from indexes.clusters import ClusteredIndex, share_read

BUDGETS = (64, 1024, 0.02)  # tokens, or a share of them


def share(index: ClusteredIndex, queries: Float32, k: int) -> float:
    """Of the codes: those of cells whose bound reaches a row's k-th best score, the mean of the rows."""
    cells = index.cells
    spread = np.sqrt(np.maximum(queries**2 @ cells.variances.T, 0))
    bounds = queries @ cells.means.T + index.reach(k) * spread
    asked = bounds >= index.search(queries, k).scores[:, -1:]
    return float((asked @ cells.counts).mean() / cells.counts.sum())


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def sizes(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser.add_argument("--tokens", type=sizes, default=[16_384, 131_072, 1_048_576], help="sizes")
    parser.add_argument("--heads", type=int, default=2, help="KV heads of each")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.heads = [4096], 1
    lines = []
    for tokens in arguments.tokens:
        layer = long_tailed(tokens, heads=arguments.heads)
        steps = layer.steps.swapaxes(0, 1).reshape(arguments.heads, -1, layer.steps.shape[-1])
        built = [
            ClusteredIndex.build(keys, tuning, digest="benchmark", target_recall=RECALL, k=INDEX_K)
            for keys, tuning in zip(layer.keys, layer.tuning, strict=True)
        ]
        for budget in BUDGETS:
            k = budget if isinstance(budget, int) else round(budget * tokens)
            found = [share(index, queries, k) for index, queries in zip(built, steps, strict=True)]
            lines.append([f"{tokens:,}", f"{k:,}", f"{np.mean(found):.3f}", f"{share_read(tokens, k):.3f}"])
    print(tables.table(["tokens", "k", "share read", "as stated"], lines))


if __name__ == "__main__":
    main()
