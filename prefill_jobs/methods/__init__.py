"""Methods of prefill: a module each, found by its name (`registry`); `base` says what a method is.

They may import `prefill_jobs` and what lies below it.
"""
