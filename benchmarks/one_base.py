"""What several stores cost beside one: `python -m benchmarks.one_base MODEL STORE [--steps N]`.

N conversations take steps of one token in packed passes: on N stores that were opened each by itself, as the
children of one base are, and all on the one store, whose searches they share. The difference is the most that
children could save by sharing the scan of a base of that length, as what each has of its own is left out.
Prints milliseconds of processor time (user and system) a step, medians of rounds in which the ways take
turns, those of the clock in the search and the attention to what it finds, and the bytes of the indexes:
4-bit keys, moments and means, which a search may read.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.common import option_parser, table
from offload_decode.engine.batching import Turn, run_turns
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.models.loading import load
from offload_decode.store.reader import KVStore

NUMBERS = 1, 2, 4, 16
QUESTIONS = [f"In which year did number {number} come, and who brought it?" for number in range(16)]


def main(model: str, store: str, steps: int) -> None:
    loaded = load(model, "cpu", "auto", "auto")
    engines = [Engine.open(KVStore.open(store), loaded) for _ in QUESTIONS]
    held = sum(file.stat().st_size for file in Path(f"{store}.indexes").rglob("*.cells"))
    print(f"{engines[0].length:,} tokens, selector {engines[0].selector.name}, {held / 1e6:,.0f} MB of cells")
    rows = []
    for number in NUMBERS:
        apart = asked(engines[:number])
        together = asked([engines[0]] * number)
        taken = [[step(apart), step(together)] for _ in range(steps)]
        by_way = [1e3 * median(own) for own in zip(*taken, strict=True)]
        searched = [searching(own, 3) for own in (apart, together)]
        saved = f"{100 * (1 - by_way[1] / by_way[0]):.1f} %"
        rows.append([str(number), *(f"{ms:.1f}" for ms in by_way), saved, *searched])
    heads = ["conversations", "N stores, ms", "one store, ms", "saved", "in search, N", "in search, one"]
    print(table(heads, rows))


def asked(engines: Sequence[Engine]) -> list[Conversation]:
    """A conversation with each, which has asked its question."""
    conversations = [engine.fork() for engine in engines]
    for conversation, question in zip(conversations, QUESTIONS, strict=False):
        conversation.ask(question)
    step(conversations)
    return conversations


def step(conversations: Sequence[Conversation]) -> float:
    """Processor seconds of one more token for each."""
    began = time.process_time()
    run_turns([Turn(own, [100 + number]) for number, own in enumerate(conversations)])
    return time.process_time() - began


def searching(conversations: Sequence[Conversation], steps: int) -> str:
    """Milliseconds of the clock in the search of a step, and in the attention to what it found."""
    for own in conversations:
        own.prefix.take_stats()
    for _ in range(steps):
        step(conversations)
    stats = [own.prefix.take_stats() for own in conversations]
    return f"{1e3 * sum(own.search_s + own.attend_s for own in stats) / steps:.1f}"


if __name__ == "__main__":
    parser = option_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("store")
    parser.add_argument("--steps", type=int, default=9)
    main(**vars(parser.parse_args()))
