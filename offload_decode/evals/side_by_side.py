"""The same questions to one store in several ways, and what each answer cost.

`python -m offload_decode.evals.side_by_side` does it in a process of its own, which knows nothing but the
request (JSON) on standard input; it prints one JSON object a line: first the process, then every answer.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.fast_import import skip_slow_imports

if TYPE_CHECKING:
    from offload_decode.engine.engine import Engine


@dataclass(frozen=True)
class Way:
    """A selector with options, and what people call it."""

    name: str
    selector: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class WayAnswer:
    """An answer and what its decoding steps cost, the question's own pass not counted.

    `attended` is the mean number of stored tokens that a step attends to in a full-attention layer and head,
    `bytes_moved` (of stored keys and values) and `seconds` are for each generated token. `cut`: it ended with
    the last token that it was allowed.
    """

    question: str
    way: str
    text: str
    attended: float
    bytes_moved: float
    seconds: float
    cut: bool = False


@dataclass(frozen=True)
class Opened:
    """The process that answers: its id, and the tokens of the store that it has open."""

    process: int
    stored_tokens: int


def reply(engine: Engine, way: str, question: str, max_new_tokens: int, begun: str = "") -> WayAnswer:
    """Answer one question greedily, as `Engine.answer` does, with the costs of its decoding steps; `begun` is
    how the answer begins, and is no part of its text.
    """
    forked = engine.fork()
    logits = forked.ask(question, begun)
    asking = forked.prefix.take_stats()
    most = forked.most_new(max_new_tokens)
    tokens = list(forked.generate(logits, most))
    writing = forked.prefix.take_stats()
    cost = writing if writing.tokens else asking  # an empty answer took no step of its own
    return WayAnswer(
        question=question,
        way=way,
        text=engine.decode(tokens).strip(),
        attended=cost.selected / max(1, cost.rows),
        bytes_moved=cost.bytes_moved / cost.tokens,
        seconds=cost.total_s / cost.tokens,
        cut=len(tokens) == most,
    )


def main() -> None:
    """Answer the request on standard input."""
    skip_slow_imports()
    from offload_decode.engine.engine import Engine
    from offload_decode.models.loading import load
    from offload_decode.store.reader import KVStore

    request = json.load(sys.stdin)
    # As commands print them: in words, without the line of code that gave them.
    warnings.showwarning = lambda message, *_, **__: print(message, file=sys.stderr)
    try:
        store = KVStore.open(request["store"])
        manifest = store.manifest
        how = manifest.dtype, manifest.weights, manifest.scaled, manifest.adapter
        loaded = load(manifest.model_id, request["device"], *how)
        ways = [Way(**way) for way in request["ways"]]
        engines = [Engine.open(store, loaded, selector=way.selector, options=way.options) for way in ways]
        for engine in engines:
            # Maps files and loads compiled code, which the first answer's costs would otherwise hold.
            reply(engine, "warm-up", request["questions"][0], max_new_tokens=2)
        _print(asdict(Opened(os.getpid(), store.manifest.n_tokens)))
        for question in request["questions"]:
            for way, engine in zip(ways, engines, strict=True):
                _print(asdict(reply(engine, way.name, question, request["max_new_tokens"])))
    except OffloadDecodeError as error:
        _print({"error": str(error)})


def _print(value: Mapping[str, object]) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
