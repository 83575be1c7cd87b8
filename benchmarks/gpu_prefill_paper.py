"""How long a dense prefill of an 8B-shaped model would take on cards that are not here:
`python -m benchmarks.gpu_prefill_paper`.

On paper: arithmetic (`planning.prefill_time`) with rates that are assumed, which are printed too. Nothing of
it was run. A card is taken to reach a share of its stated peak in half precision, in matrix products and in
attention; the host is taken to encode and write so many bytes a second. Where weights do not fit, they are
streamed layer by layer, and come over the bus for every chunk.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu_prefill import EIGHT_BILLION
from cli.counts import token_count
from offload_decode.models.gate import shape_of
from offload_decode.models.outline import Outline, outline_of
from offload_decode.planning import sizes
from offload_decode.planning.plan import card_room
from offload_decode.planning.prefill_time import PrefillTime, Rates, prefill_time
from offload_decode.planning.request import Workload, weights_given

MATMUL, ATTENTION = 0.6, 0.5
"""Shares of a card's stated peak."""
NAMED = {"auto": "bfloat16", "streamed": "bfloat16, streamed", "int8": "int8", "int4": "int4"}
"""How weights are held."""


@dataclass(frozen=True)
class Card:
    """A card with its memory in bytes, its stated peak in half precision with float32 sums (dense), and what
    its bus moves, each a second.
    """

    name: str
    memory: int
    peak: float
    bus: float


CARDS = (
    Card("16 GB (as an RTX 4080: 97.5 TFLOP/s, PCIe 4)", 16 << 30, 97.5e12, 25e9),
    Card("H200 (989 TFLOP/s, PCIe 5)", 139 << 30, 989e12, 50e9),
)


def eight_billion() -> Outline:
    """The outline of the 8B shape in bfloat16."""
    config = LlamaConfig(**EIGHT_BILLION, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return outline_of(model, "8B", shape_of(config, torch.bfloat16))


def on_card(
    outline: Outline, card: Card, weights: str, tokens: int, rates: Rates
) -> tuple[Workload, PrefillTime]:
    """A prefill with such weights, in the chunks that fit."""
    request = Workload(tokens, **weights_given(weights))
    room = card_room(outline, request, card.memory)
    request = replace(request, chunk=sizes.largest_chunk(outline, room, tokens))
    kept = sizes.kept_tokens(outline, request.chunk, tokens, room, request.kv)
    return request, prefill_time(outline, request, rates, kept, on_card=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1M")
    parser.add_argument("--write", type=float, default=1.0, help="GB/s that the host encodes and writes")
    arguments = parser.parse_args()
    tokens, outline = token_count(arguments.tokens), eight_billion()
    print(
        f"On paper, not run: {tokens:,} tokens, {outline.parameters / 1e9:.3g} billion parameters in "
        f"{outline.dtype}.\nAssumed: {MATMUL:.0%} of a card's peak in matrix products, {ATTENTION:.0%} in "
        f"attention; {arguments.write:g} GB/s encoded and written; pinned memory filled as fast as the bus.\n"
    )
    for card in CARDS:
        rates = Rates(MATMUL * card.peak, ATTENTION * card.peak, arguments.write * 1e9, card.bus, card.bus)
        fits = card_room(outline, Workload(tokens), card.memory) > sizes.prefill_bytes(
            outline, 512, tokens, True
        )
        for weights in ("auto", "int8", "int4") if fits else ("streamed", "int8", "int4"):
            request, took = on_card(outline, card, weights, tokens, rates)
            print(f"{card.name}, {NAMED[weights]} weights: {said(request, took, card)}")


def said(request: Workload, took: PrefillTime, card: Card) -> str:
    """A prefill in a sentence."""
    parts = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in took.parts.items())
    return (
        f"{took.seconds / 60:.1f} min ({request.tokens / took.seconds:,.0f} tokens/s) in chunks of "
        f"{request.chunk:,}; {took.kept:,} tokens stay on the card, {took.bus / 1e12:.2f} TB cross the bus; "
        f"minutes each alone: {parts}; {took.operations / took.seconds / card.peak:.0%} of the stated peak"
    )


if __name__ == "__main__":
    main()
