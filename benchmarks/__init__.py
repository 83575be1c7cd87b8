"""Benchmarks: one script a claim. The package comes first, for it sets how torch's threads wait."""

import offload_decode  # noqa: F401
