"""Questions to a store: one layer's step, conversations, batches, citations.

`Engine` (open, ask, answer), `Conversation`, `step` (select, attend, estimate, merge), `batching`, `sampler`.
It may import `selectors`, `models` and what lies below them; never `prefill_jobs`: stages meet on disk.
"""
