"""Which kind of line is the most frequent? Lines do not name their kind. Chance: one in five."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from offload_decode.evals.tasks import scoring
from offload_decode.evals.tasks.aggregate import names, reading
from offload_decode.evals.tasks.aggregate.spread import Choice, Draw, Fact, SpreadFacts
from offload_decode.evals.tasks.base import Question
from offload_decode.evals.tasks.plain_answers import plain
from offload_decode.evals.tasks.words import Split

_LEAD = 0.15  # by which the most frequent kind is ahead of the second
_FEWEST = 0.6  # the least frequent kind, as a share of the second
_LETTERS = {
    "complaint": (
        "The {thing} arrived with a crack in it, and I am not pleased.",
        "After two days the {thing} fell to pieces.",
        "I have never been treated as rudely as in your shop in {town}.",
        "The {thing} looks nothing like the picture.",
        "You have charged me twice for the {thing}.",
        "For such a price the {thing} ought to work, and it does not.",
    ),
    "compliment": (
        "The {thing} is the finest I have ever owned.",
        "Everybody in {town} admires my {thing}.",
        "Your people in {town} could not have been kinder.",
        "I am delighted with the {thing}.",
        "What a beautiful {thing} you make!",
        "The {thing} has made my mother very happy.",
    ),
    "question": (
        "Does the {thing} come in another size?",
        "When does your shop in {town} open in the morning?",
        "How do I clean the {thing}?",
        "Is the {thing} made of wood or of metal?",
        "Could you tell me where in {town} I can see the {thing}?",
        "How much does the {thing} weigh?",
    ),
    "order": (
        "Please send me one {thing} to {town}.",
        "I would like to buy the {thing} and will pay on delivery.",
        "Put me down for one more {thing}, please.",
        "I take the {thing}; my address in {town} you know.",
        "Kindly deliver the {thing} before the holidays.",
        "We need another {thing} here in {town} by Monday.",
    ),
    "cancellation": (
        "I no longer want the {thing}; do not send it.",
        "As we are moving to {town}, please strike the {thing} from your list.",
        "I have changed my mind about the {thing} and shall not take it.",
        "Do not deliver the {thing} after all.",
        "My brother gave me a {thing}, so I withdraw mine.",
        "Please forget that I asked for the {thing}.",
    ),
}
_OPENINGS = ("Letter from {name}: ", "{name} writes: ", "From a letter by {name}: ", "{name} to the shop: ")
_ASK = (
    "Every letter to the shop is a {kinds}. Which kind is the most frequent? Answer with the kind alone.",
    "Sort the letters in the text into these kinds: {kinds}. Which kind has the most letters? Name only it.",
    "Of which kind are most of the letters to the shop: {kinds}? Answer with one of these words.",
)


_ANOTHER_RANK = re.compile(
    r"\b(?:least|fewest|rare|rarest|less|fewer|lowest|smallest|minority|infrequent|second|third|fourth|fifth|last)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class TallyLines(SpreadFacts):
    """Letters to a shop, of five kinds that are to be told from what they say.

    The most frequent kind is a little ahead of the second, so that an oracle reads all letters: one more
    that is unread could be of any kind. In the control letters of other kinds stand in place of the most
    frequent one's, which is then the rarest.
    """

    name: ClassVar[str] = "tally-lines"
    max_new_tokens: ClassVar[int] = 16
    share: ClassVar[float] = 0.5
    fewest: ClassVar[int] = 6

    def draw(self, rng: random.Random, facts: int, split: Split) -> Draw:
        kinds = rng.sample(list(_LETTERS), len(_LETTERS))
        shares = [1 + _LEAD, 1.0, *(rng.uniform(_FEWEST, 1) for _ in kinds[2:])]
        second = max(1, int(facts / sum(shares)))
        counts = [second + max(1, round(_LEAD * second)), *(int(share * second) for share in shares[1:])]
        listed = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        rng.shuffle(listed)
        written: list[Fact] = []
        for kind in listed:
            text = _letter(rng, kind, split)
            control = _letter(rng, rng.choice(kinds[1:]), split) if kind == kinds[0] else text
            written.append(Fact(text, control))
        named = rng.sample(kinds, len(kinds))
        asked = rng.choice(_ASK).format(kinds=", ".join(named[:-1]) + f" or {named[-1]}")
        question = Choice(asked, " The most frequent kind is", (kinds[0],), choices=tuple(sorted(_LETTERS)))
        return Draw(tuple(written), (question,), (tuple(range(len(written))),))

    def score(self, question: Question, said: str) -> float:
        """1 for the right kind alone, and not for its being the second or the least frequent."""
        said = plain(said)
        if scoring.rambles(question, said) or _ANOTHER_RANK.search(said):
            return 0.0
        return float(reading.label(said, _LETTERS) == question.answers[0])


def _letter(rng: random.Random, kind: str, split: Split) -> str:
    line = rng.choice(_OPENINGS).format(name=names.person(rng, split)) + rng.choice(_LETTERS[kind])
    return line.format(thing=names.thing(rng, split), town=names.towns(rng, 1, split)[0])


TASKS: tuple[type[SpreadFacts], ...] = (TallyLines,)
