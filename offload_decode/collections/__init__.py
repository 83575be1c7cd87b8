"""Stores of many documents: the journal, the list, BM25 over their words.

`Collection`, `journal`, `words`. It may import `engine` and what lies below it.
"""
