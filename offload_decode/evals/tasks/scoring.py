"""How right an answer is, read alone and as a whole.

Whatever else looks like an answer counts against it: what the right one looks like (a number, a UUID, a
variable's name) says what else could have been meant for one. So an answer that lists everything, hedges, or
goes on with other candidates is not right for holding the right one somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.hedges import all_denied, denied, refused, unsure, vague
from offload_decode.evals.tasks.plain_answers import LEAD, plain

if TYPE_CHECKING:
    from offload_decode.evals.tasks.base import Question

Find = Callable[[str, Sequence[str], frozenset[str]], "list[re.Match[str]]"]

# Words that stand around an answer and are never one: none of them is in the lists that words are drawn from.
_AROUND = """
a above according all also an and another answer answers any appear appeared appears are as assigned at based
be been both by called certainly chain chains coded common contains count counts do document does each every
exactly first five following for found four frequency frequent frequently from given has have header here
hidden i in is it item items its key keys last list listed lists mention mentioned more most name named
namely names number numbered numbers occurs of often on one only order others out provided question read
respectively say says second seven six so some special stated states sure ten text than that the their them
then there these they third thirty this those three time times to top total two uuid uuids value values var
variable variables was we were what when where which who whose with word words would written you your
"""
AROUND = frozenset(_AROUND.split())
# Letters of scripts that put no space between words: Thai, Chinese, Japanese, Korean.
_SPACELESS = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_NOT_IN_WORD, _WORD_ENDS = rf"(?<![^\W{_SPACELESS}])", rf"(?![^\W{_SPACELESS}])"
_SEPARATED = re.compile(r"(?<!\w)(?<!\d[.,])\d{1,3}(?:(?:[,.' ]\d{3})+|(?:,\d{2})+,\d{3})(?!\d)")
_GLUED = re.compile(r"(?<!\w)\d+(?:[-/]\d+|,\d{3}(?!\d))+(?!\w)")
_WORD = re.compile(r"(?<![\w-])(?<!\w')[^\W\d_]+(?![\w-])(?!'\w)")
_NAME = re.compile(r"(?<![\w-])[a-z]+-[a-z]+(?![\w-])", re.IGNORECASE)
_ITEM = re.compile(r"(?:^|(?<=[,\n])|(?<=\d[.)]))\s*[a-z]+(?=\s*(?:[,\n]|\d+[.)]|$))", re.IGNORECASE)
_KEY = re.compile(r"(?<![\w-])[a-z]+-[a-z]+(?![\w-])")
_HALVES = [(frozenset(words.ADJECTIVES[half]), frozenset(words.NOUNS[half])) for half in words.ADJECTIVES]
_PAIR = re.compile(r"(?<![\w-])([a-z]+)( ?- ?| )(?=([a-z]+)(?![\w-]))", re.IGNORECASE)
_FOR = re.compile(r"\bfor\s+(?:the\s+)?(?:key\s+)?[\"'(]*$", re.IGNORECASE)
_HAS = re.compile(r"[a-z]+[\"')]*\s*(?:=|\b(?:is|has)\b)", re.IGNORECASE)
_BREAK = re.compile(r"[\n,;:.!?|/()\[\]{}\u2022-]|\d+[.)]?|\band\b", re.IGNORECASE)
_WORDS, _WORDS_EACH = 40, 20  # an answer has no more, and so many more for each thing that was asked for
_OTHERS, _OTHERS_EACH = 3, 3  # words that are neither the question's nor stand around answers
_WORD_OF_A_SENTENCE = re.compile(r"(?<![\w-])[a-z]+(?![\w-])")
_LEAST = re.compile(r"\b(?:least|rarest|fewest|less often|only once)\b", re.IGNORECASE)  # no listed words


def score(question: Question, said: str) -> float:
    """From 0 to 1. One answer is right or wrong; several score |right| / max(|expected|, |given|).

    Where the question has `keys`, an answer is right with its key: `1 for a, 2 for b`, or in the order of the
    question where the keys are not named.
    """
    answers = [plain(answer) for answer in question.answers]
    text = plain(said)
    find = next((find for looks, find in _LOOKS if all(looks.fullmatch(a) for a in answers)), None)
    if find is None:
        return alone(question, said)
    if rambles(question, text):
        return 0.0
    text = _joined(text, answers)
    asked = frozenset(re.findall(r"\w+", (question.text + question.answer_prefix).lower()))
    bare = _without(_NAME, text, question.text.lower())
    found = [m for m in find(text, answers, asked) if not denied(bare, m)]
    if unsure(bare) or any(vague(bare, m) or _FOR.search(text, 0, m.start()) for m in found):
        return 0.0
    if len(answers) == 1 and refused(bare):
        return 0.0
    if none_of(question, text, [*question.keys, *answers, *(match.group() for match in found)], bare):
        return 0.0
    if find is _variables and _of_another_value(text, asked):
        return 0.0
    others = _other_keys(question, text, asked) if find is not _compounds else []
    if question.keys:
        pairs = _pairs(text, [*question.keys, *others], found)
        return share(zip(_lower(question.keys), _lower(answers), strict=True), pairs)
    if others:
        return 0.0  # whatever is said is said of them
    given = {match.group().lower() for match in found}
    if len(answers) == 1:
        return float(given == {answers[0].lower()})
    return share(_lower(answers), given)


def alone(question: Question, said: str) -> float:
    """1 where one of the answers is said and nothing else, but for words that stand around an answer."""
    answers = [plain(answer) for answer in question.answers]
    text = _joined(plain(said), answers)
    if _too_long(text, answers):
        return 0.0
    return max(float(_says_only(question, text, answer)) for answer in answers)


def says(said: str, answer: str, asked: str = "") -> bool:
    """Whether an answer says this and nothing else that looks like it."""
    from offload_decode.evals.tasks.base import Question

    return score(Question(asked, "", (answer,)), said) == 1


def share(expected: Iterable[object], given: Iterable[object]) -> float:
    """|right| / max(|expected|, |given|), each counted once."""
    wanted, given = set(expected), set(given)
    return len(wanted & given) / max(len(wanted), len(given))


def words_score(question: Question, said: str, looks: re.Pattern[str] | None = None) -> float:
    """The same for words of any kind, of which those that are listed count, wherever they are from, and in
    sentences those that could have been meant: those of the lists, or what `looks` like an answer and is not
    of the lists.
    """
    text = LEAD.sub("", plain(said))
    bare = _without(_ITEM, text)
    if _too_long(text, question.answers) or unsure(bare, words.KNOWN):
        return 0.0
    if none_of(question, text, question.answers, bare) or _LEAST.search(bare):
        return 0.0
    asked = frozenset(re.findall(r"\w+", (question.text + question.answer_prefix).lower()))

    def meant(word: str) -> bool:
        return word in words.KNOWN if looks is None else bool(looks.fullmatch(word)) > (word in words.KNOWN)

    given: set[str] = set()
    breaks = [*_BREAK.finditer(text)]
    begins, ends = [0, *(m.end() for m in breaks)], [*(m.start() for m in breaks), len(text)]
    for begin, end in zip(begins, ends, strict=True):
        piece = [m for m in _WORD.finditer(text, begin, end) if not denied(bare, m)]
        drawn = [m.group().lower() for m in piece]
        rest = [word for word in drawn if word not in AROUND and word not in asked]
        if len(rest) < len(drawn):
            rest = [word for word in rest if meant(word)]
        given.update(rest)
    return share(_lower(question.answers), given)


def _without(names: re.Pattern[str], text: str, asked: str = "") -> str:
    """The text, where words that are drawn or `asked` for and not said (`plausible-otter`, `2. wrong`) are
    letters that mean nothing, as many.
    """

    def blank(match: re.Match[str]) -> str:
        name = match.group().lower()
        drawn = name in asked or set(re.findall(r"[a-z]+", name)) <= words.KNOWN
        return re.sub(r"[^\W\d_]|-", "x", match.group()) if drawn else match.group()

    return names.sub(blank, text)


def _lower(texts: Sequence[str]) -> list[str]:
    return [text.lower() for text in texts]


def rambles(question: Question, text: str) -> bool:
    """Whether so much is said that it is no answer but a piece of the text, right answers and all."""
    about = " ".join([question.text, question.answer_prefix, question.statement, *question.answers]).lower()
    known = AROUND | set(re.findall(r"\w+", about))
    others = sum(match.group() not in known for match in _WORD_OF_A_SENTENCE.finditer(text))
    return _too_long(text, question.answers) or others > _OTHERS + _OTHERS_EACH * len(question.answers)


def _too_long(text: str, answers: Sequence[str]) -> bool:
    return len(text.split()) > _WORDS + _WORDS_EACH * len(answers)


def _first(text: str, said: Iterable[str]) -> int:
    """Where the first of these stands in a text; its end where none does."""
    small = text.lower()
    return min((at for each in said if (at := small.find(each.lower())) >= 0), default=len(text))


def none_of(question: Question, text: str, said: Iterable[str], bare: str | None = None) -> bool:
    """Whether a list of these is refused or denied as a whole, before it begins (and not by the question).
    `bare`: the text without names, letter by letter.
    """
    bare, asked = bare or text, plain(question.text)
    at = text.find(asked)
    while asked and at >= 0:
        behind = at + len(asked)
        text, bare = (f"{each[:at]}{' ' * len(asked)}{each[behind:]}" for each in (text, bare))
        at = text.find(asked, behind)
    before = bare[: _first(text, said)]
    return refused(before) or all_denied(before)


def _joined(text: str, answers: Sequence[str]) -> str:
    """Numbers without thousands separators, where that makes them as long as an answer."""
    lengths = {len(answer) for answer in answers if answer.isdigit()}

    def join(match: re.Match[str]) -> str:
        digits = re.sub(r"\D", "", match.group())
        return digits if len(digits) in lengths else match.group()

    return _SEPARATED.sub(join, text)


def _numbers(text: str, answers: Sequence[str], asked: frozenset[str]) -> list[re.Match[str]]:
    """Numbers of at least half as many digits as an answer, and none of the question's: `1.`, `four of 10`
    and the like are not meant. What has digits of another length glued to it (`1234567-8`) is one number.
    """
    lengths = set(map(len, answers))
    minus = "-?" if len(answers) == 1 else ""  # in a list it stands before an item
    number = rf"{_NOT_IN_WORD}(?<!\d\.){minus}(\d+)(?:\.\d+)?{_WORD_ENDS}"
    every = {m.start(1): m for m in re.finditer(number, text)}
    for glued in _GLUED.finditer(text):
        if not {len(part) for part in re.split(r"\D", glued.group())} <= lengths:
            every = {at: m for at, m in every.items() if not glued.start() <= at < glued.end()}
            every[glued.start()] = glued
    return [
        m
        for _, m in sorted(every.items())
        if _digits(m) >= min(lengths) / 2 and (m.group() in answers or m.group() not in asked)
    ]


def _digits(number: re.Match[str]) -> int:
    """How many it has before the point."""
    return len(number.group().lstrip("-").partition(".")[0])


def _codes(text: str, answers: Sequence[str], asked: frozenset[str]) -> list[re.Match[str]]:
    found = re.finditer(r"(?<![\w-])(?=\S*\d)[0-9a-f]+(?:-[0-9a-f]+)+(?![\w-])", text, re.IGNORECASE)
    return [m for m in found if not set(m.group().lower().split("-")) <= asked]


def _compounds(text: str, answers: Sequence[str], asked: frozenset[str]) -> list[re.Match[str]]:
    parts = [(m, set(m.group().lower().split("-"))) for m in _NAME.finditer(text)]
    return [m for m, both in parts if both <= words.KNOWN and not both <= asked]


def _other_keys(question: Question, text: str, asked: frozenset[str]) -> list[str]:
    """Keys such as `quiet-river` that an answer names and a question about such a key does not: pairs of
    words that keys are drawn from, whatever has a part of a key that is asked for, and whatever else
    something is said to be `for`, or to be.
    """
    parts = {part for key in _KEY.findall(question.text) for part in key.split("-")}
    if not parts:
        return []
    found: dict[str, None] = {}
    for match in _PAIR.finditer(text):
        one, between, other = (part.lower() for part in match.groups())
        if re.search(rf"\b{one}[- ]{other}\b", question.text.lower()) or {one, other} & AROUND:
            continue
        drawn = any(one in adjectives and other in nouns for adjectives, nouns in _HALVES)
        told = _FOR.search(text, 0, match.start()) or (between == "-" and _HAS.match(text, match.end()))
        told = told or parts & {one, other}
        if (drawn and (between == "-" or told)) or (told and between == "-"):
            found[f"{one}-{other}"] = None
    return list(found)


def _of_another_value(text: str, asked: frozenset[str]) -> bool:
    """Whether variables are said to have a value, and not the one that is asked for."""
    values = set(re.findall(r"(?<!\w)\d{4,}(?!\w)", text))
    return bool(values) and not values & asked


def _variables(text: str, answers: Sequence[str], asked: frozenset[str]) -> list[re.Match[str]]:
    """Words in capitals, and words of as many letters as an answer that are none of a language."""
    most = max(map(len, answers))
    found = re.finditer(rf"(?<!\w)(?:[A-Z]{{{most - 1},}}|[A-Za-z]{{{most}}})(?!\w)", text)
    return [m for m in found if m.group().lower() not in asked | AROUND | words.KNOWN]


_LOOKS: tuple[tuple[re.Pattern[str], Find], ...] = (
    (re.compile(r"\d+"), _numbers),
    (re.compile(r"(?=.*\d)[0-9a-f]+(-[0-9a-f]+)+"), _codes),
    (re.compile(r"[a-z]+-[a-z]+"), _compounds),
    (re.compile(r"[A-Z]{4,8}"), _variables),
)


def _pairs(text: str, keys: Sequence[str], found: list[re.Match[str]]) -> set[tuple[str, str]]:
    """Which value is said to be of which key."""
    named = "|".join(re.escape(key).replace(r"\-", "[- ]") for key in keys)
    mentions = list(re.finditer(rf"(?<![\w-])(?:{named})(?![\w-])", text, re.IGNORECASE))
    if not mentions:
        # The order is the question's; what is given beyond it belongs to no key.
        return {(keys[at].lower() if at < len(keys) else "", m.group().lower()) for at, m in enumerate(found)}
    runs: list[tuple[bool, list[str]]] = []
    for match in sorted([*mentions, *found], key=lambda match: match.start()):
        is_key = match in mentions
        if not runs or runs[-1][0] != is_key:
            runs.append((is_key, []))
        runs[-1][1].append(match.group().lower().replace(" ", "-"))
    again = {key for is_key, run in runs[1:] if is_key for key in run}
    if runs[0][0] and runs[-1][0] and len(runs) > 2 and again <= set(runs[0][1]):
        runs = runs[1:]  # the keys that were asked for, and then `1 for a, 2 for b`
    return set(_matched(runs))


def _matched(runs: list[tuple[bool, list[str]]]) -> Iterator[tuple[str, str]]:
    keys_first = runs[0][0]
    named: list[str] = []
    waiting: list[str] = []
    for is_key, run in runs:
        if is_key and keys_first:
            named = run
        elif keys_first:
            yield from zip(named if len(named) == len(run) else named[-1:] * len(run), run, strict=True)
        elif not is_key:
            waiting = run
        else:
            yield from zip(run if len(run) == len(waiting) else run[:1] * len(waiting), waiting, strict=True)
            waiting = []
    yield from (("", value) for value in waiting)


def _says_only(question: Question, text: str, answer: str) -> bool:
    """Whether nothing but the answer is said, but for words that stand around it."""
    wanted = " ".join(_tokens(answer))
    rest = f" {' '.join(_tokens(text))} "
    if not wanted or f" {wanted} " not in rest:
        return False
    around = AROUND | set(_tokens(f"{question.text} {question.answer_prefix}"))
    if question.statement.endswith(answer):
        around |= set(_tokens(question.statement.removesuffix(answer)))
    while f" {wanted} " in rest:
        rest = rest.replace(f" {wanted} ", " ")
    return set(rest.split()) <= around


def _tokens(text: str) -> list[str]:
    """Words, with what stands inside them: `07-Mar-2011`, `a@b.org`."""
    return [token for part in text.lower().split() if (token := part.strip("\"'.,;:!?()[]{}<>-=#$%|"))]
