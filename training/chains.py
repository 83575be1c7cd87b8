"""Chains of variables, in RULER's wording (arXiv 2404.06654, section 3.2), with its example or without."""

from __future__ import annotations

import random
import string

from offload_decode.evals.tasks import words
from training.items import NOISE, Ask, Item, Linked
from training.names import Names

TRACK = "Question: Find all variables that are assigned the value {value} in the text above."
TRACK_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACK_PREFIX = (
    " According to the chain(s) of variable assignment in the text above, {count} variables are {assigned} "
    "the value {value}, they are:"
)


def chain(rng: random.Random, length: int, letters: int) -> tuple[str, list[str], list[str]]:
    draw = lambda: words.letters(rng, "train", string.ascii_uppercase, letters)  # noqa: E731
    names = words.distinct(draw, length)
    value = words.number(rng, "train", 5)
    sources = [value, *(f"VAR {name}" for name in names)]
    return value, names, [f"VAR {n} = {s}" for n, s in zip(names, sources, strict=False)]


def linked(between: str, names: list[str], lines: list[str]) -> Linked:
    """The answer that says the names in the order of the lines that tell them."""
    return Linked(" " + between.join(names), tuple(names), tuple(line.removeprefix("VAR ") for line in lines))


def tracking(rng: random.Random, names: Names, links: int) -> Item:
    """Chains of variables; one to three of them, in RULER's form with its example or in ours."""
    chains = [chain(rng, links, 5) for _ in range(rng.choice([1, 1, 2, 3]))]
    facts: list[str] = []
    left = [list(lines) for _, _, lines in chains]
    while any(left):
        mine = rng.choice([lines for lines in left if lines])
        facts.append(mine.pop(0))
    ruler = rng.random() < 0.5
    asks: list[Ask] = []
    for value, variables, lines in chains:
        question = TRACK.format(value=value)
        prefix = TRACK_PREFIX.format(
            count=links, value=value, assigned=rng.choice(["assigned", "assgined"]) if ruler else "assigned"
        )
        if ruler:
            asks.append((f"{question} Answer:{prefix}", linked(" ", variables, lines)))
        else:
            prefix = prefix if rng.random() < 0.5 else ""
            asks.append((f"{question}\nAnswer:{prefix}", linked(", ", variables, lines)))
    noise = rng.random() < 0.6
    if not ruler:
        lines = facts if noise else [fact + "." for fact in facts]
        before = TRACK_BEFORE if rng.random() < 0.5 else ""
        return Item(lines, asks, ordered=True, before=before, noise=noise)
    before = TRACK_BEFORE
    if rng.random() < 0.3:
        value, variables, lines = chain(rng, links, 3)
        before += " ".join(f"{line}  {NOISE}\n" for line in lines)
        before += f"{TRACK.format(value=value)} Answer:" + TRACK_PREFIX.format(
            count=links, value=value, assigned="assgined"
        )
        before += " " + " ".join(variables) + "\n\n\n" + TRACK_BEFORE
    lines = [fact + " " for fact in facts]
    return Item(lines, asks, ordered=True, before=before, after="\n", noise=noise)
