"""RULER (arXiv 2404.06654): needles in a haystack (section 3.1 and appendix B), variables to trace (3.2), and
words to count (3.3), under the names that its code gives them. Its questions about documents: `ruler_qa`.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import pi
from string import ascii_uppercase
from typing import ClassVar, Literal

from offload_decode.evals.haystack import Material
from offload_decode.evals.tasks import base, words
from offload_decode.evals.tasks.base import Context, Episode, HiddenFacts, Question, Task

FACT = "One of the special magic numbers for {key} is: {value}."
ASK = "What is the special magic number for {key} mentioned in the provided text?"
_PREFIX = " The special magic number for {key} mentioned in the provided text is"
_ASK_ALL = "What are all the special magic numbers for {key} mentioned in the provided text?"
_PREFIX_ALL = " The special magic numbers for {key} mentioned in the provided text are"
_INSTRUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
_INSTRUCTION_ALL = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n"
)
Kind = Literal["number", "uuid"]
_VALUES: dict[Kind, Callable[[random.Random], str]] = {"number": words.number, "uuid": words.identifier}


def _hidden(key: str, value: str, kind: Kind) -> tuple[str, Question]:
    """A needle and the question for it."""
    fact, asked, prefix = (
        text.replace("number", kind).format(key=key, value=value) for text in (FACT, ASK, _PREFIX)
    )
    return fact, Question(asked, prefix, (value,))


def _asked_together(pairs: Sequence[tuple[str, str]], asked: str) -> Episode:
    """Needles for keys and values, and one question for all values."""
    question = Question(
        _ASK_ALL.format(key=asked), _PREFIX_ALL.format(key=asked), tuple(value for _, value in pairs)
    )
    return Episode(tuple(FACT.format(key=key, value=value) for key, value in pairs), (question,))


@dataclass(frozen=True)
class Needle(HiddenFacts):
    """One number for one key, in prose."""

    name: ClassVar[str] = "niah_single_2"
    max_new_tokens: ClassVar[int] = 40
    instruction: ClassVar[str] = _INSTRUCTION
    kind: ClassVar[Kind] = "number"
    distractors: int = 0

    def sample(self, rng: random.Random) -> Episode:
        keys = words.keys(rng, 1 + self.distractors)
        values = words.distinct(lambda: _VALUES[self.kind](rng), len(keys))
        pairs = [_hidden(key, value, self.kind) for key, value in zip(keys, values, strict=True)]
        return Episode(tuple(fact for fact, _ in pairs), tuple(question for _, question in pairs))


class InNoise(HiddenFacts):
    """Facts among lines that are all alike, each before the line that is at its depth."""

    behind: ClassVar[str] = "\n"
    """What stands behind a fact."""

    def haystack(self, material: Material, tokens: int) -> str:
        return base.noise(base.fitting(material, tokens, base.noise))

    def placed(self, haystack: str, facts: Sequence[str], depths: Sequence[float]) -> str:
        lines = haystack.split("\n")
        at = [round(depth * len(lines)) for depth in depths]
        parts: list[str] = []
        for number, line in enumerate([*lines, ""]):
            here = [fact for fact, place in zip(facts, at, strict=True) if place == number]
            parts.append("".join(fact + self.behind for fact in here) + line)
        return "\n".join(parts).removesuffix("\n")


def needle_at(share: float) -> Needle:
    """The needle at a depth that is given, from 0 (the start of the text) to 1 (the end)."""

    class NeedleAt(Needle):
        name: ClassVar[str] = f"needle at {100 * share:.4g} %"

        def ordered(self, depths: list[float]) -> list[float]:
            return [share]

    return NeedleAt()


class NeedleInNoise(InNoise, Needle):
    """One number for one key, on a line of its own."""

    name: ClassVar[str] = "niah_single_1"


class UuidNeedle(Needle):
    """One UUID for one key, in prose."""

    name: ClassVar[str] = "niah_single_3"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = _INSTRUCTION.replace("number", "uuid")
    kind: ClassVar[Kind] = "uuid"


@dataclass(frozen=True)
class MultiKeyNeedle(Needle):
    """One number for each of four keys, in prose; each is asked for by itself."""

    name: ClassVar[str] = "niah_multikey_1"
    distractors: int = 3


@dataclass(frozen=True)
class MultiValueNeedle(HiddenFacts):
    """Four numbers for one key, in prose: all are asked for."""

    name: ClassVar[str] = "niah_multivalue"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = _INSTRUCTION_ALL
    values: int = 4

    def sample(self, rng: random.Random) -> Episode:
        key = words.key(rng)
        values = words.distinct(lambda: words.number(rng), self.values)
        return _asked_together([(key, value) for value in values], key)

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


@dataclass(frozen=True)
class MultiQueryNeedle(HiddenFacts):
    """One number for each of four keys, in prose: all are asked for at once."""

    name: ClassVar[str] = "niah_multiquery"
    max_new_tokens: ClassVar[int] = 128
    instruction: ClassVar[str] = _INSTRUCTION_ALL
    keys: int = 4

    def sample(self, rng: random.Random) -> Episode:
        keys = words.keys(rng, self.keys)
        values = words.distinct(lambda: words.number(rng), self.keys)
        *most, last = keys
        return _asked_together([*zip(keys, values, strict=True)], f"{', '.join(most)}, and {last}")


@dataclass(frozen=True)
class NeedleAmongNeedles(Task):
    """Every line is a needle of another key; some of them are asked for, each by itself."""

    name: ClassVar[str] = "niah_multikey_2"
    max_new_tokens: ClassVar[int] = 40
    kind: ClassVar[Kind] = "number"
    asked: int = 4

    @property
    def per_context(self) -> int:
        return self.asked

    def context(self, rng: random.Random, material: Material) -> Context:
        """As many lines as there is room for. The control has others in place of those asked for."""
        drawn: dict[str, str] = {}
        draw_key = words.identifier if self.kind == "uuid" else words.key

        def more(count: int) -> list[tuple[str, str]]:
            used = set(drawn.values())
            while len(drawn) < count:
                key, value = draw_key(rng), _VALUES[self.kind](rng)
                if key not in drawn and value not in used:
                    used.add(value)
                    drawn[key] = value
            return list(drawn.items())[:count]

        def write(pairs: list[tuple[str, str]]) -> str:
            needles = "\n".join(_hidden(*pair, self.kind)[0] for pair in pairs)
            return _INSTRUCTION.replace("number", self.kind) + needles

        count = base.fitting(material, material.tokens, lambda count: write(more(count)), least=self.asked)
        if count < self.asked:
            raise base.too_short(self, material.tokens)
        pairs, others = more(count), more(count + self.asked)[count:]
        at = rng.sample(range(count), self.asked)
        control = list(pairs)
        for place, other in zip(at, others, strict=True):
            control[place] = other
        text = write(pairs)
        hidden = [_hidden(*pairs[place], self.kind) for place in at]
        return Context(
            text,
            write(control),
            tuple(question for _, question in hidden),
            tuple(text.index(fact) / len(text) for fact, _ in hidden),
        )

    def guess(self, rng: random.Random, question: Question) -> str:
        return _VALUES[self.kind](rng)


class UuidAmongUuids(NeedleAmongNeedles):
    """The same with UUIDs for keys and values."""

    name: ClassVar[str] = "niah_multikey_3"
    max_new_tokens: ClassVar[int] = 96
    kind: ClassVar[Kind] = "uuid"


@dataclass(frozen=True)
class VariableTracking(InNoise):
    """A chain `VAR ABCDE = 12345 … VAR FGHIJ = VAR ABCDE …`, in order, in lines that are all alike."""

    name: ClassVar[str] = "vt"
    max_new_tokens: ClassVar[int] = 96
    instruction: ClassVar[str] = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    behind: ClassVar[str] = " "
    hops: int = 4

    def sample(self, rng: random.Random) -> Episode:
        names = words.distinct(lambda: words.letters(rng, ascii_uppercase, 5), 1 + self.hops)
        value = words.number(rng, 5)
        sources = [value, *(f"VAR {name}" for name in names)]
        facts = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=False)]
        asked = f"Question: Find all variables that are assigned the value {value} in the text above."
        prefix = (
            " According to the chain(s) of variable assignment in the text above, "
            f"{len(names)} variables are assigned the value {value}, they are:"
        )
        return Episode(tuple(facts), (Question(asked, prefix, tuple(names)),))

    def ordered(self, depths: list[float]) -> list[float]:
        return sorted(depths)


_SPARE = 60  # words from which the control's are taken


def _as_long(material: Material, drawn: Sequence[str], spare: Sequence[str]) -> list[str]:
    """For each word another one, of as many tokens where there is one."""
    sizes = {other: material.count(f" {other}") for other in spare}
    found: list[str] = []
    for word in drawn:
        size = material.count(f" {word}")
        found.append(min(sizes, key=lambda other: abs(sizes[other] - size)))
        del sizes[found[-1]]
    return found


@dataclass(frozen=True)
class CommonWords(Task):
    """A numbered list in which ten words come thirty times each, and the others three times.

    A text of fewer than 4,096 tokens has them six times and once.
    """

    name: ClassVar[str] = "cwe"
    max_new_tokens: ClassVar[int] = 120
    common: int = 10
    times: int = 30
    others_times: int = 3
    short_times: int = 6
    short_others_times: int = 1

    def context(self, rng: random.Random, material: Material) -> Context:
        """As many other words as there is room for; in the control other words are the common ones."""
        times, others_times = self.times, self.others_times
        if material.tokens < 4096:
            times, others_times = self.short_times, self.short_others_times
        vocabulary, drawn = words.vocabulary(rng), list[str]()

        def first(count: int) -> list[str]:
            drawn.extend(islice(vocabulary, max(0, count - len(drawn))))
            return drawn[:count]

        common = first(self.common)
        instead = _as_long(material, common, first(_SPARE)[self.common :])
        kept_out = {*common, *instead}
        order = rng.getrandbits(64)

        def write(count: int, common: list[str] = common) -> str:
            others = [w for w in first(2 * self.common + count) if w not in kept_out]
            listed = common * times + others[:count] * others_times
            random.Random(order).shuffle(listed)
            return (
                "Below is a numbered list of words. In these words, some appear more often than others. "
                "Memorize the ones that appear most often.\n"
                + " ".join(f"{number}. {word}" for number, word in enumerate(listed, 1))
            )

        count = base.fitting(material, material.tokens, write, least=1)
        if count < 1:
            raise base.too_short(self, material.tokens)
        question = Question(
            f"Question: What are the {self.common} most common words in the above list?",
            f" The top {self.common} words that appear most often in the list are:",
            tuple(common),
        )
        return Context(write(count), write(count, instead), (question,), (None,))

    def guess(self, rng: random.Random, question: Question) -> str:
        return ", ".join(islice(words.vocabulary(rng), self.common))


@dataclass(frozen=True)
class FrequentWords(Task):
    """Words of six letters in disorder whose frequencies fall by Zipf's law: which three come most often?

    The most frequent of all is `...`, which is to be ignored.
    """

    name: ClassVar[str] = "fwe"
    max_new_tokens: ClassVar[int] = 50
    alpha: ClassVar[float] = 2.0
    asked: int = 3

    def counts(self, total: int, kinds: int) -> list[int]:
        """How often each of so many kinds of word comes, the most frequent first."""
        zeta = pi**2 / 6  # of alpha 2.0
        return [int(total * rank**-self.alpha / zeta) for rank in range(1, kinds + 1)]

    def context(self, rng: random.Random, material: Material) -> Context:
        """As many words as there is room for, of a fiftieth as many kinds as the text has tokens; in the
        control the three have other names.
        """
        kinds = max(material.tokens // 50, self.asked + 2)
        drawn = words.distinct(lambda: words.coded(rng), kinds - 1 + _SPARE)
        coded, spare = ["...", *drawn[_SPARE:]], drawn[:_SPARE]
        most = slice(1, 1 + self.asked)
        instead = list(coded)
        instead[most] = _as_long(material, coded[most], spare)
        order = rng.getrandbits(64)

        def write(total: int, named: Sequence[str] = coded) -> str:
            listed = [w for w, n in zip(named, self.counts(total, kinds), strict=True) for _ in range(n)]
            random.Random(order).shuffle(listed)
            return (
                "Read the following coded text and track the frequency of each coded word. Find the "
                "three most frequently appeared coded words. " + " ".join(listed)
            )

        total = base.fitting(material, material.tokens, write, least=1)
        counts = self.counts(total, kinds)
        if counts[self.asked] == counts[self.asked + 1]:  # nobody could say which it was
            raise base.too_short(self, material.tokens)
        asked = "three most frequently appeared words"
        question = Question(
            "Question: Do not provide any explanation. Please ignore the dots '....'. "
            f"What are the {asked} in the above coded text?",
            f" According to the coded text above, the {asked} are:",
            tuple(coded[most]),
        )
        return Context(write(total), write(total, instead), (question,), (None,))

    def guess(self, rng: random.Random, question: Question) -> str:
        return ", ".join(words.distinct(lambda: words.coded(rng), self.asked))


TASKS: tuple[type[Task], ...] = (
    NeedleInNoise,
    Needle,
    UuidNeedle,
    MultiKeyNeedle,
    NeedleAmongNeedles,
    UuidAmongUuids,
    MultiValueNeedle,
    MultiQueryNeedle,
    VariableTracking,
    CommonWords,
    FrequentWords,
)
SUITE = (*(task.name for task in TASKS), "qa_1", "qa_2")
