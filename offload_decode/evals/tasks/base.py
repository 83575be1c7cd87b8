"""What an eval task is: a text of a given length, questions about it, and a score of the answer alone.

Every text has a control, the same without what the questions ask for: a model that still answers has not
read the answer from the text. `guess` answers from the question alone, which is what chance comes to.
"""

import random
import re
import string
import unicodedata
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import cycle, islice
from typing import Any, ClassVar

from offload_decode.common.errors import ConfigError
from offload_decode.evals.haystack import Material

_BOUNDARY = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
_CLOSE = 0.002  # of the tokens: a text that much too short is long enough
_MOST_TRIES = 8
_LEAST_RATE = 0.1  # tokens of a piece, whatever was measured
_QUOTES = {**dict.fromkeys(map(ord, "‘’‚‛"), "'"), **dict.fromkeys(map(ord, "“”„‟«»"), '"')}
_LAST_LINE, _LAST_WORD = re.compile(r"\S\s*\n(?=[^\n]*$)"), re.compile(r"\S\s+(?=\S*$)")


def string_match(answers: Sequence[str], said: str, any_of: bool = False) -> float:
    """RULER's score (arXiv 2404.06654): the share of the answers that occur anywhere in what was said, in any
    case and with quotation marks of any form (`string_match_all` of its code); with `any_of`, 1 where one of
    them does (`string_match_part`).
    """
    text = said.lower().translate(_QUOTES)
    found = [answer.lower().translate(_QUOTES) in text for answer in answers]
    return float(any(found)) if any_of else sum(found) / len(found)


def normal(text: str) -> str:
    """SQuAD's normal form (arXiv 1606.05250): small letters, no punctuation, no articles, single spaces. Here
    typographic quotation marks and dashes are punctuation too, which SQuAD's script leaves.

    Where that leaves nothing, as of `**`, the text as it is.
    """
    kept = "".join(one for one in text.lower() if not _is_punctuation(one))
    return " ".join(_ARTICLES.sub(" ", kept).split()) or text.strip()


def _is_punctuation(one: str) -> bool:
    return one in string.punctuation or unicodedata.category(one).startswith("P")


def exact_match(answers: Sequence[str], said: str) -> float:
    """SQuAD's exact match (section 6.1): 1 where all that was said is one of the answers, in normal form."""
    return float(normal(said) in map(normal, answers))


def token_f1(answers: Sequence[str], said: str) -> float:
    """SQuAD's F1 (section 6.1): of the words said and those of an answer; the best over the answers."""
    return max(_f1(normal(answer).split(), normal(said).split()) for answer in answers)


def _f1(expected: list[str], given: list[str]) -> float:
    common = (Counter(expected) & Counter(given)).total()
    return 2 * common / (len(expected) + len(given)) if common else float(expected == given)


@dataclass(frozen=True)
class Question:
    """A question; `answer_prefix` may be put after `Answer:`; answers are in the order of the text.

    `any_of`: the answers are several ways to say the same; otherwise all of them are asked for. `choices`:
    what even a guess knows that the answer may be, if it does.
    """

    text: str
    answer_prefix: str
    answers: tuple[str, ...]
    any_of: bool = False
    choices: tuple[str, ...] = ()

    @property
    def response(self) -> str:
        """The right answer without a word more."""
        return self.answers[0] if self.any_of else ", ".join(self.answers)


@dataclass(frozen=True)
class Episode:
    """Facts for one context and questions about them; the first question is about the first fact."""

    facts: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Context:
    """A text to prefill, the same without what is asked for (`control`), and the questions about it.

    `depths`: where in the text, from 0 to 1, what each question asks for stands; None where that is no
    single place.
    """

    text: str
    control: str
    questions: tuple[Question, ...]
    depths: tuple[float | None, ...]


class Task(ABC):
    """One kind of question.

    Subclasses set `name` and `max_new_tokens` and write `context` and `guess`. An answer's score is RULER's
    string match; SQuAD's exact match for tasks that ask for the answer alone (`exact`); and what `score` is
    written to be where the answer is no string (JSON, which is no `short_answer` either).
    """

    exact: ClassVar[bool] = False
    short_answer: ClassVar[bool] = True
    name: ClassVar[str]
    max_new_tokens: ClassVar[int] = 32

    @property
    def per_context(self) -> int:
        """How many questions a context has."""
        return 1

    def parameters(self) -> dict[str, Any]:
        """What decides the task's texts beside its name: plain JSON values."""
        return {field.name: getattr(self, field.name) for field in fields(self)} if is_dataclass(self) else {}

    @abstractmethod
    def context(self, rng: random.Random, material: Material) -> Context:
        """Draw a text of about `material.tokens` tokens, and `per_context` questions about it.

        Keys, values and places are drawn afresh. Raises `ConfigError` where so few tokens do not hold what
        is asked for.
        """

    @abstractmethod
    def guess(self, rng: random.Random, question: Question) -> str:
        """An answer from the question alone, as good as can be without the text."""

    def most_tokens(self, question: Question, material: Material) -> int:
        """How many tokens an answer may take: more than `max_new_tokens` where answers grow with the text."""
        return self.max_new_tokens

    def complete(self, said: str) -> str:
        """An answer that was cut by its length, without the line or of a single line the word, it ends in."""
        last = _LAST_LINE.search(said) or _LAST_WORD.search(said)
        return said[: last.start() + 1] if last else said

    def score(self, question: Question, said: str) -> float:
        """From 0 to 1, how right an answer is; the prompt is not read."""
        if self.exact:
            return exact_match(question.answers, said)
        return self.ruler_score(question, said)

    def ruler_score(self, question: Question, said: str) -> float:
        """RULER's string match."""
        return string_match(question.answers, said, question.any_of)

    def squad_scores(self, question: Question, said: str) -> tuple[float, float] | None:
        """SQuAD's exact match and F1; None where there is no one short answer to compare with."""
        if not self.short_answer or (len(question.answers) > 1 and not question.any_of):
            return None
        return exact_match(question.answers, said), token_f1(question.answers, said)


class HiddenFacts(Task):
    """Facts hidden in a text: subclasses say which, and what is asked of them (`sample`).

    `instruction` is said before the text. The text is the material's own, unless `haystack` and `placed` say
    otherwise.
    """

    instruction: ClassVar[str] = ""

    @abstractmethod
    def sample(self, rng: random.Random) -> Episode:
        """Draw facts and questions."""

    @property
    def per_context(self) -> int:
        """How many questions a draw of facts has."""
        return len(self.sample(random.Random(0)).questions)

    def guess(self, rng: random.Random, question: Question) -> str:
        """An answer to another draw of facts: of the right kind, and no more."""
        return self.sample(rng).questions[0].response

    def context(self, rng: random.Random, material: Material) -> Context:
        """The facts at places drawn afresh; the control has more of the haystack instead of them."""
        episode = self.sample(rng)
        whole = material.tokens - (material.count(self.instruction) if self.instruction else 0)
        room = whole - sum(material.count(f"\n\n{fact}\n\n") for fact in episode.facts)
        if room < 1:
            raise too_short(self, material.tokens)
        depths = self.ordered([rng.random() for _ in episode.facts])
        asked = episode.questions[: self.per_context]
        one_each = len(episode.facts) == len(episode.questions)
        return Context(
            self.instruction + self.placed(self.haystack(material, room), episode.facts, depths),
            self.instruction + self.haystack(material, whole),
            asked,
            tuple(depths[: len(asked)]) if one_each else (None,) * len(asked),
        )

    def haystack(self, material: Material, tokens: int) -> str:
        """Text of so many tokens to hide the facts in."""
        return material.filler(tokens)

    def placed(self, haystack: str, facts: Sequence[str], depths: Sequence[float]) -> str:
        """The facts in a haystack, each near its depth."""
        return insert(haystack, facts, depths)

    def ordered(self, depths: list[float]) -> list[float]:
        """The depths as the task wants them; tasks whose facts must come in order sort them."""
        return depths


def too_short(task: Task, tokens: int) -> ConfigError:
    """What is raised where a text of so many tokens does not hold what is asked for."""
    return ConfigError(
        f"{tokens:,} tokens do not hold the facts of the task '{task.name}': take a longer text, or ask "
        "other tasks"
    )


def _nearest(boundaries: list[int], at: float) -> int:
    after = min(bisect_left(boundaries, at), len(boundaries) - 1)
    return min(boundaries[max(after - 1, 0)], boundaries[after], key=lambda boundary: abs(boundary - at))


def insert(filler: str, facts: Sequence[str], depths: Sequence[float]) -> str:
    """Put every fact at the sentence boundary nearest its depth; one of several lines as a paragraph."""
    boundaries = [0, *(m.end() for m in _BOUNDARY.finditer(filler)), len(filler)]
    placed = sorted(
        (_nearest(boundaries, depth * len(filler)), order, fact)
        for order, (fact, depth) in enumerate(zip(facts, depths, strict=True))
    )
    parts: list[str] = []
    last = 0
    for at, _, fact in placed:
        gap, after = ("\n\n", "\n\n") if "\n" in fact else ("" if filler[at - 1 : at].isspace() else " ", " ")
        parts += [filler[last:at], gap if at else "", fact.strip("\n"), after]
        last = at
    return "".join([*parts, filler[last:]])


def noise(sentences: int) -> str:
    """The five sentences of RULER over and over, five to a line."""
    drawn = list(islice(cycle(NOISE), sentences))
    return "\n".join(" ".join(drawn[at : at + len(NOISE)]) for at in range(0, sentences, len(NOISE)))


def fitting(material: Material, tokens: int, write: Callable[[int], str], least: int = 0) -> int:
    """The number of pieces of which `write` makes a text of at most so many tokens, and hardly fewer.

    The text is written and counted whole a few times. Returns less than `least` where even so few are too
    many.
    """
    before, pieces = (least, material.count(write(least))), least + 16
    best = least if before[1] <= tokens else least - 1
    tried = {least}
    for _ in range(_MOST_TRIES):
        size = material.count(write(pieces))
        tried.add(pieces)
        if size <= tokens:
            best = max(best, pieces)
        if 0 <= tokens - size <= _CLOSE * tokens:
            break
        rate = max((size - before[1]) / (pieces - before[0]), _LEAST_RATE)
        before, pieces = (pieces, size), max(least, pieces + int((tokens - size) // rate))
        if pieces in tried:
            break
    return best
