"""What fits on a machine: bytes counted from a model's shape, limits checked before anything starts.

`plan`, `sizes`, `workload`, `caps`, `proposals`, `opening`. It may import `engine` and what lies below it.
"""
