"""What answers lose at which budget: needles, RULER, perplexity, fidelity, sparsity, and their reports.

`runs`, `answering`, `summary`, `fidelity`, `report`; `tasks/` has one file a family of tasks.
It may import `prefill_jobs` and what lies below it.
"""
