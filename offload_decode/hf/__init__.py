"""All that touches the modules of transformers: a model attends to a stored prefix through here.

`hooks` (a model switched over, every pass checked), `attention`, `cache` with `cache_layers`, `packed_batch`,
`mla`, `recurrent`, `cuda_graphs`, `verify` (the equivalence check). It may import `kv` and below.
"""
