"""Questions to a store: one layer's step, conversations, batches, citations.

`Engine` (open, ask, answer), `Conversation`, `Sampler`, `step` (select, attend, estimate, merge), `batching`.
It may import `selectors`, `models` and what lies below them; never `prefill_jobs`: stages meet on disk.
"""
