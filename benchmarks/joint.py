"""Several conversations on one store, packed, padded and apart: `python -m benchmarks.joint --store STORE`.

Tokens a second of a decoding step with 1, 4, 16 and 64 conversations, each with a question of its own length
before it. `packed` is `run_turns`, `padded` one forward pass of a batch as `answer_many` runs it, `apart` one
conversation after another. CPU time is that of all threads, and says more than the clock on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.joint import Turn, run_turns
from offload_decode.models.passes import run_in_passes

STEPS = 12
LENGTHS = (50, 400)  # tokens of a question


def main() -> None:
    """Prints a line for each way and number of conversations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--selector", default="topk")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--lengths", type=int, nargs=2, default=LENGTHS)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    engine = Engine.open(given.store, selector=given.selector)
    one: tuple[float, float] | None = None
    for rows in given.rows:
        for way, step in (("apart", _apart), ("padded", _padded), ("packed", _packed)):
            wall, cpu = _measured(step(_talks(engine, rows, given.lengths)))
            one = one or (wall, cpu)
            faster, cheaper = rows * one[0] / wall, rows * one[1] / cpu
            told = {"way": way, "rows": rows, "tokens_s": rows / wall, "cpu_ms": 1e3 * cpu}
            if given.json:
                print(json.dumps(told))
            else:
                print(
                    f"{way:8} {rows:3}  {rows / wall:7.1f} tokens/s x{faster:5.2f}, "
                    f"{1e3 * cpu / rows:6.2f} ms of CPU a token x{cheaper:5.2f}"
                )


def _talks(engine: Engine, rows: int, lengths: Sequence[int]) -> list[Conversation]:
    """Conversations that have put questions of random lengths."""
    rng = random.Random(rows)
    talks = [engine.fork() for _ in range(rows)]
    words = engine.loaded.model.get_input_embeddings().num_embeddings
    run_turns([Turn(talk, [rng.randrange(3, words) for _ in range(rng.randint(*lengths))]) for talk in talks])
    return talks


def _measured(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of all threads, of a step: the medians."""
    for _ in range(3):
        step()
    taken = []
    for _ in range(STEPS):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return statistics.median(own[0] for own in taken), statistics.median(own[1] for own in taken)


def _packed(talks: list[Conversation]) -> Callable[[], object]:
    return lambda: run_turns([Turn(talk, [5 + place]) for place, talk in enumerate(talks)])


def _apart(talks: list[Conversation]) -> Callable[[], object]:
    return lambda: [talk.extend([5 + place]) for place, talk in enumerate(talks)]


def _padded(talks: list[Conversation]) -> Callable[[], object]:
    """The same tokens before it, padded on the left to the longest."""
    first, cache = talks[0], talks[0].fork().cache
    cache.cut(0)
    cache.batch_repeat_interleave(len(talks))
    longest = max(len(talk.tokens) for talk in talks)
    ids = torch.tensor([[0] * (longest - len(talk.tokens)) + talk.tokens for talk in talks])
    stored = first.prefix.length
    own = torch.tensor([[False] * (longest - len(talk.tokens)) + [True] * len(talk.tokens) for talk in talks])
    held = {"shown": torch.cat([torch.ones(len(talks), stored, dtype=torch.bool), own], dim=1)}

    def run(ids: torch.Tensor) -> None:
        shown = held["shown"]
        shown.offload_covered = stored  # type: ignore[attr-defined]
        tokens, positions = ids.shape[1], (shown[:, stored:].long().cumsum(-1) - 1).clamp(min=0) + stored
        run_in_passes(first.loaded, ids, cache, 512, shown, positions[:, -tokens:])
        held["shown"] = torch.nn.functional.pad(shown, (0, 1), value=True)

    run(ids)
    return lambda: run(torch.arange(5, 5 + len(talks))[:, None])


if __name__ == "__main__":
    main()
