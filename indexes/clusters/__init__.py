"""The index kind `clusters`: cells of 4-bit codes found by k-means, scanned and pruned.

`index` (`ClusteredIndex`), `cells`, `search`, `scan`, `summaries`, `estimate`. It may import `indexes`
and `common`.
"""
