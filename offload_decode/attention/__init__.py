"""The mathematics of attention, and its compiled and device kernels, each tested equal to its reference.

`queries` (and `AttentionState`s, merged exactly), `dense`, `host_tokens` and `device_tokens` (chosen
tokens), `pages` (Quest: reference, host and device). It may import `indexes`, `types`, `common`.
"""
