"""Stores in other people's frameworks: retrievers of the passages that a question attends to.

`passages` (searches stores and collections), `langchain`, `llama_index`. It may import `planning`,
`collections` and what lies below them; each framework is imported in its own file alone.
"""
