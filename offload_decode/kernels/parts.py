"""Work on every KV head, in parts that keep the threads busy."""

from __future__ import annotations

from collections.abc import Callable

from offload_decode.indexes.rows import pool


def run(work: Callable[[int, slice], None], heads: int, length: int, multiple: int = 1) -> None:
    """`work(head, part)` over all of `range(length)` for every head, parts beginning at multiples.

    About two tasks a thread, so that none waits long for the last.
    """
    parts = max(1, 2 * pool.THREADS // max(1, heads))
    step = max(1, -(-length // (parts * multiple))) * multiple
    tasks = [
        (head, slice(start, min(start + step, length)))
        for head in range(heads)
        for start in range(0, length, step)
    ]
    if tasks:
        pool.run(lambda task: work(*task), tasks)
