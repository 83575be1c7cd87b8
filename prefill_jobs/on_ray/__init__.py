"""Prefills, indexes and questions on a Ray cluster: `pool` hands work to `workers`, and on when one is lost.

It may import `prefill_jobs` and what lies below it.
"""
