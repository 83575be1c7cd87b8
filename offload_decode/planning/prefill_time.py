"""How long a dense prefill takes: arithmetic on a model's outline and on rates, measured or assumed."""

from __future__ import annotations

from dataclasses import dataclass

from offload_decode.models.outline import Outline
from offload_decode.planning import sizes
from offload_decode.planning.plan import Plan, card_room
from offload_decode.planning.request import Workload


@dataclass(frozen=True)
class Rates:
    """What a machine does a second in a prefill. `matmul`, `attention`: floating-point operations, of a
    model's linear layers and of attention to keys in the model's dtype. `write`: stored bytes of keys and
    values, from what a layer has of them to the disk. On a card also `fill`: bytes from the store to pinned
    memory, and `bus`: from there to the card.
    """

    matmul: float
    attention: float
    write: float
    fill: float | None = None
    bus: float | None = None


@dataclass(frozen=True)
class PrefillTime:
    """A prefill in seconds: in all, and by what is done, which on a card is done beside each other, so that
    each chunk takes as long as what takes longest. `operations`: floating-point, in all. `kept`: tokens that
    stay on the card; `bus`: bytes that go there.
    """

    seconds: float
    parts: dict[str, float]
    operations: float
    kept: int = 0
    bus: int = 0

    @property
    def limit(self) -> str:
        """What takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def expected_prefill(planned: Plan, rates: Rates) -> PrefillTime:
    """Of a plan's request, where every chunk attends to everything before it."""
    outline, request, gpu = planned.outline, planned.request, planned.machine.gpu
    kept = 0
    if gpu is not None:
        room = card_room(outline, request, gpu)
        kept = sizes.kept_tokens(outline, request.chunk, request.tokens, room, request.kv)
    return prefill_time(outline, request, rates, kept, on_card=gpu is not None)


def prefill_time(outline: Outline, request: Workload, rates: Rates, kept: int, on_card: bool) -> PrefillTime:
    """`kept` tokens stay on the card."""
    token = sizes.kv_token_bytes(outline.shape, request.kv, outline.dtype)
    linear = 2 * _read_by_a_token(outline)
    # Streamed weights come for every chunk, from pinned memory.
    weights = outline.layered * sizes.itemsize(outline.dtype) if request.streamed else 0
    bus = rates.bus or float("inf")
    both = min(bus, rates.fill or float("inf"))
    parts = dict.fromkeys(("matrix products", "attention", "writing", *(("bus",) if on_card else ())), 0.0)
    seconds, operations, moved = 0.0, 0.0, 0
    for start in range(0, request.tokens, request.chunk):
        rows = min(request.chunk, request.tokens - start)
        attended = _attention(outline, rows, start)
        coming = token * max(0, start - kept)
        own = {
            "matrix products": rows * linear / rates.matmul,
            "attention": attended / rates.attention,
            "writing": rows * token / rates.write,
        }
        if on_card:
            own["bus"] = coming / both + weights / bus
            moved += coming + weights
            computed = own["matrix products"] + own["attention"]
            seconds += max(computed, own["writing"], own["bus"])
        else:
            seconds += sum(own.values())
        for name, took in own.items():
            parts[name] += took
        operations += rows * linear + attended
    return PrefillTime(seconds, parts, operations, kept, moved)


def _read_by_a_token(outline: Outline) -> float:
    """The weights that a token is multiplied with: no table of embeddings, no output layer (a prefill makes
    no logits), and of the experts those that it is sent to.
    """
    table = outline.vocabulary * outline.hidden
    return outline.parameters - table - outline.output - outline.experts * (1 - outline.active)


def _attention(outline: Outline, rows: int, start: int) -> float:
    """Floating-point operations of a chunk's attention to itself and to what came before it."""
    total = 0.0
    for own in outline.shape.layers:
        most = start + rows if own.window is None else own.window
        fewer = max(0, min(rows, most - start))  # rows that see all up to themselves
        seen = fewer * start + fewer * (fewer + 1) / 2 + (rows - fewer) * most
        total += 2 * seen * outline.shape.query_heads * (own.key_dim + own.value_dim)
    return total
