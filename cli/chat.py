"""`offload-decode chat`: a conversation about a store."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

from cli import output
from cli.ask import show
from cli.limits import open_engine
from cli.options import (
    Attend,
    Device,
    DeviceCache,
    GpuMemory,
    MaxNewTokens,
    Model,
    Options,
    Ram,
    Seed,
    Selector,
    Store,
    Temperature,
    TopP,
    Weights,
)
from offload_decode.config import split_pairs

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine
    from offload_decode.engine.sampler import Sampler

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves"


def chat(
    store: Store,
    selector: Selector = "topk",
    option: Options = None,
    model: Model = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    weights: Weights = "auto",
    device: Device = "auto",
    attend: Attend = "auto",
    device_cache: DeviceCache = None,
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
) -> None:
    """Talk about a store, line by line.

    Every answer sees the turns before it. /reset forgets the conversation,
    /exit or the end of the input leaves.
    """
    options = split_pairs(option or [])

    from offload_decode.engine.sampler import Sampler

    engine = open_engine(
        store, model, selector, options, weights, device, attend, device_cache, gpu_memory, ram
    )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a line that is not UTF-8 must not end the conversation
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if at_terminal:
        import readline  # noqa: F401  # editing and history for input()

        output.note(f"{engine.prefix.length:,} tokens from {store}; {HELP}")
    _converse(engine, Sampler(temperature, top_p, seed), max_new_tokens, at_terminal)


def _converse(engine: Engine, sampler: Sampler, max_new_tokens: int, at_terminal: bool) -> None:
    while True:
        try:
            line = input("> " if at_terminal else "").strip()
        except EOFError:
            if at_terminal:
                output.note("")
            return
        if line == "/exit":
            return
        if line == "/reset":
            engine.crop(engine.prefix.length)
        elif line.startswith("/") and line[1:].isalpha():
            output.note(f"there is no {line}: {HELP}")
        elif line:
            try:
                show(engine.stream(line, max_new_tokens, sampler))
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                output.note("\nstopped")
