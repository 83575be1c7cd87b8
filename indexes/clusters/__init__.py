"""The index kind `clusters`: cells of 4-bit codes found by k-means, scanned and pruned.

`index` (`Clusters`), `cells`, `search`, `scan`, `kmeans`. It may import `indexes` and `common`.
"""
