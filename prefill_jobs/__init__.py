"""From corpora to stores and their indexes: prefilled, resumed, appended to, pushed, spread over machines.

`job.prefill` makes a store, `many` and `collect` make several, `append` and `renew` change one,
`indexing.build_indexes` indexes it; `methods` choose what a chunk attends to; `buckets`, `on_ray` and
`lm_eval` are rooms of their own. It may import `collections`, `planning` and what is below them; decoding
never imports it.
"""

if __name__ != "offload_decode.prefill_jobs":
    raise ImportError(f"import offload_decode.prefill_jobs: as {__name__} its modules would exist twice")
