"""Short articles about made-up towns, companies and people, and questions that no model answers without them.

Names, numbers and wordings (`articles.json`) are drawn, always the same ones: about 900,000 tokens.
"""

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from offload_decode.evals.tasks import words

_SAID: dict[str, Any] = json.loads(Path(__file__).with_name("articles.json").read_text("utf-8"))
_GROUPS = 2500  # a town and its mayor, a company and its founder
_LINKS = ("mayor", "river", "founder", "seat", "born", "instrument")  # asked for across two articles
_TOLD = 0.7  # of the other facts, so that lengths differ and fill any text


@dataclass(frozen=True)
class Article:
    """What is made up about a town, a company or a person, by name of the fact; `text` tells it."""

    kind: str
    name: str
    facts: dict[str, str]
    text: str


@dataclass(frozen=True)
class Asked:
    """A question, its answer, and the numbers of the articles that it takes."""

    question: str
    answer: str
    needed: tuple[int, ...]


@cache
def articles() -> tuple[Article, ...]:
    """All of them, in groups of a town, its mayor, a company and its founder."""
    rng = random.Random("made-up articles")
    names = iter(words.distinct(lambda: words.made_up(rng).capitalize(), 5 * _GROUPS))
    towns = [next(names) for _ in range(_GROUPS)]
    found: list[Article] = []
    for town in towns:
        mayor, founder = (f"{_one_of(rng, 'first names')} {next(names)}" for _ in range(2))
        company, river = f"{next(names)} {_one_of(rng, 'suffixes')}", next(names)
        made = {"river": river, "mayor": mayor, "known": _goods(rng)}
        based = {"founder": founder, "product": _goods(rng), "seat": rng.choice(towns)}
        found.append(_article(rng, "town", town, made | _numbers(rng, range(1100, 1900), 50_000)))
        found.append(_article(rng, "person", mayor, _life(rng, towns)))
        found.append(_article(rng, "company", company, based | _numbers(rng, range(1976, 2021), 900)))
        found.append(_article(rng, "person", founder, _life(rng, towns)))
    return tuple(found)


def questions(hops: int) -> list[Asked]:
    """One about each article, or (2 `hops`) up to three about each group, which take two articles each."""
    rng, every = random.Random(f"questions of {hops}"), articles()
    if hops == 1:
        return [_about(rng, number, article) for number, article in enumerate(every)]
    numbers = {article.name: number for number, article in enumerate(every)}
    found = []
    for first in range(0, len(every), 4):
        town, mayor, company, founder = range(first, first + 4)
        seat = numbers[every[company].facts["seat"]]
        for text, one, other, fact in (
            ("In which town was the founder of {} born?", company, founder, "born"),
            ("Which instrument does the mayor of {} play?", town, mayor, "instrument"),
            ("Which river runs through the town where {} has its seat?", company, seat, "river"),
        ):
            answer = every[other].facts[fact]
            # What the first article names for another reason would make a wrong way right.
            if answer not in every[one].facts.values():
                found.append(Asked(text.format(every[one].name), answer, (one, other)))
    return found


def asked_facts(article: Article) -> list[str]:
    """The names of its facts that `question` asks for."""
    return [fact for fact in _SAID["kinds"][article.kind]["asked"] if fact in article.facts]


def question(article: Article, fact: str) -> str:
    """What asks for a fact of an article."""
    return str(_SAID["kinds"][article.kind]["asked"][fact]).format(name=article.name)


def _about(rng: random.Random, number: int, article: Article) -> Asked:
    fact = rng.choice(asked_facts(article))
    return Asked(question(article, fact), article.facts[fact], (number,))


def _article(rng: random.Random, kind: str, name: str, facts: dict[str, str]) -> Article:
    said = _SAID["kinds"][kind]
    told = {fact: text for fact, text in facts.items() if fact in _LINKS or rng.random() < _TOLD}
    sentences = [rng.choice(said["facts"][fact]) for fact in told]
    sentences += rng.sample(said["further"], rng.randint(0, 4))
    rng.shuffle(sentences)
    text = " ".join([rng.choice(said["introduced"]), *sentences])
    named = {"name": name, "short": name.split()[0]}
    return Article(kind, name, told, f"{name}\n{text.format(**facts, **named, **_scenery(rng))}")


def _scenery(rng: random.Random) -> dict[str, str]:
    drawn = {"day": _SAID["days"], "month": _SAID["months"], "side": _SAID["sides"]}
    drawn |= {"adjective": words.ADJECTIVES, "noun": words.NOUNS}
    return {name: rng.choice(each) for name, each in drawn.items()} | {"number": str(rng.randrange(11, 99))}


def _one_of(rng: random.Random, kind: str) -> str:
    return str(rng.choice(_SAID[kind]))


def _goods(rng: random.Random) -> str:
    return f"{_one_of(rng, 'materials')} {_one_of(rng, 'things')}"


def _numbers(rng: random.Random, years: range, people: int) -> dict[str, str]:
    return {"year": str(rng.choice(years)), "people": str(rng.randrange(people // 20, people))}


def _life(rng: random.Random, towns: list[str]) -> dict[str, str]:
    return {
        "year": str(rng.randrange(1930, 1976)),
        "born": rng.choice(towns),
        "instrument": _one_of(rng, "instruments"),
        "trade": _one_of(rng, "trades"),
        "pet": f"{_one_of(rng, 'colours')} {_one_of(rng, 'pets')}",
    }
