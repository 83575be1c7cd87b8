"""Training rows of facts hidden in text, followed by questions until the window is full."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from offload_decode.evals.tasks import words
from offload_decode.evals.tasks.base import Episode, HiddenFacts, Question, insert
from offload_decode.evals.tasks.common_words import CommonWords
from offload_decode.evals.tasks.header import FIELD_NAMES, DocumentHeader, OneHeader
from offload_decode.evals.tasks.key_value import KeyValue, WordPairs
from offload_decode.evals.tasks.plain_fact import PlainFact
from offload_decode.evals.tasks.ruler.niah import MultiKeyNeedle, MultiQueryNeedle, MultiValueNeedle
from offload_decode.evals.tasks.ruler.tracking import VariableTracking
from offload_decode.evals.tasks.words import Split
from training.synthetic import Row, phrase_bank

CHARS_PER_TOKEN = 3.0
REST = 0.3  # weight of the phrase bank behind the last question
MONTHS = ("March", "June", "May", "October")
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


@dataclass(frozen=True)
class AnyFact(HiddenFacts):
    """`The dusty compass of Old Harbor is KX-4821.`: facts of many shapes, for training only."""

    name: ClassVar[str] = "any-fact"

    def sample(self, rng: random.Random, split: Split = "train") -> Episode:
        adjective, noun = words.key(rng, split).split("-")
        attribute = rng.choice(
            [noun, f"{adjective} {noun}", "secret code", "password", "phone number", "color", "name"]
        )
        link = rng.choice(["of", "for", "in"])
        key, value = self.key(rng, split), self.value(rng, split)
        fact, statement = (
            shape.format(a=attribute, A=attribute.capitalize(), l=link, k=key, v=value)
            for shape in rng.choice(
                [
                    ("The {a} {l} {k} is {v}.", "The {a} {l} {k} is {v}."),
                    ("The {a} {l} {k} is: {v}.", "The {a} {l} {k} is: {v}."),
                    ("Note that the {a} {l} {k} is {v}.", "The {a} {l} {k} is {v}."),
                    ("{A} {l} {k}: {v}.", "The {a} {l} {k}: {v}."),
                ]
            )
        )
        ask = rng.choice(["What is the {a} {l} {k}?", "What is the {a} {l} {k}?", "Tell me the {a} {l} {k}."])
        question = ask.format(a=attribute, l=link, k=key)
        prefix = f" The {attribute} {link} {key} is"
        return Episode((fact,), (Question(question, prefix, (value,), statement=statement),))

    def key(self, rng: random.Random, split: Split) -> str:
        """A key as people write them."""
        plain = words.key(rng, split)
        return rng.choice(
            [
                plain,
                plain.replace("-", " "),
                "the " + plain.replace("-", " "),
                "the " + plain.split("-")[1],
                plain.replace("-", " ").title(),
                plain.split("-")[1].capitalize() + " " + str(rng.randint(2, 99)),
                words.made_up(rng),
                words.made_up(rng).capitalize() + " " + words.made_up(rng).capitalize(),
            ]
        )

    def value(self, rng: random.Random, split: Split) -> str:
        """A value as people write them."""
        return rng.choice(
            [
                words.number(rng, split, rng.randint(3, 9)),
                words.number(rng, split, rng.randint(3, 7)),
                words.key(rng, split),
                words.key(rng, split).split("-")[1],
                words.made_up(rng).capitalize(),
                "".join(rng.choices(string.ascii_uppercase, k=rng.randint(2, 3)))
                + "-"
                + words.number(rng, split, 4),
                f"{words.made_up(rng).capitalize()} {words.made_up(rng).capitalize()}",
                f"{rng.randint(1, 28)} {rng.choice(MONTHS)} {rng.randint(1600, 2029)}",
            ]
        )


def episode(rng: random.Random, length: int) -> HiddenFacts:
    """A task with sizes that fit a window of length tokens."""
    many = max(2, min(8, length // 64))
    few = max(2, min(4, length // 128))
    draws: list[tuple[float, HiddenFacts]] = [
        (3, MultiKeyNeedle(distractors=rng.randint(0, many))),
        (1, MultiValueNeedle(values=rng.randint(2, few))),
        (1, MultiQueryNeedle(keys=rng.randint(2, few))),
        (2, PlainFact()),
        (4, AnyFact()),
        (2, KeyValue(pairs=rng.randint(1, many))),
        (3, WordPairs(pairs=rng.randint(1, many))),
        (1.5, VariableTracking(hops=rng.randint(1, few))),
    ]
    if length >= 512:
        draws.append(
            (0.4, CommonWords(common=rng.randint(1, 2), times=rng.randint(5, 12), others=rng.randint(6, 16)))
        )
    return rng.choices([task for _, task in draws], [weight for weight, _ in draws])[0]


class Contexts:
    """Makes rows of text, facts and questions with a tokenizer and texts for filler."""

    def __init__(self, tokenizer: Any, prose: list[str]) -> None:
        self.tokenizer = tokenizer
        self.prose = prose
        self.words = np.arange(len(tokenizer.all_special_ids), len(tokenizer))

    def row(self, rng: random.Random, length: int, stated: bool = False) -> Row:
        """One window: `<|bos|>context\\n\\nquestion\\nAnswer: answer<|eos|>\\nquestion...`.

        Answers are statements, where `stated` and the question has one. Weight 1 on them; what is left of the
        window is a phrase bank.
        """
        episodes: list[tuple[HiddenFacts, Episode]] = []
        kind = rng.random()
        if kind < 0.35:
            episodes.append((OneHeader(), OneHeader().sample(rng, "train")))
        elif kind < 0.45 and length >= 512:
            many = DocumentHeader(documents=rng.randint(2, min(6, length // 160)))
            episodes.append((many, many.sample(rng, "train")))
        most = max(1, length // 160)
        for _ in range(rng.randint(0 if episodes else 1, most)):
            task = episode(rng, length)
            episodes.append((task, task.sample(rng, "train")))
        facts = [fact for _, one in episodes for fact in one.facts]
        depths = [d for task, one in episodes for d in task.ordered([rng.random() for _ in one.facts])]
        questions = [question for _, one in episodes for question in one.questions]
        rng.shuffle(questions)
        # Room for some of the questions, and for the longest of them at least.
        sizes = [self.count("".join(written(q, True, stated))) + 4 for q in questions]
        asked_for = sum(sizes[: rng.randint(1, len(sizes))])
        room = max(max(sizes), min(asked_for, length // 2))
        share = 1.0 if rng.random() < 0.5 else rng.random()
        left = length - 1 - room - self.count("\n".join(facts))
        filler = self.filler(rng, int(max(0, left) * CHARS_PER_TOKEN * share))
        ids = self.encode(insert(filler, facts, depths) + "\n")
        while len(ids) + 1 + room > length and filler:
            filler = filler[: int(len(filler) * 0.9) - 1]
            ids = self.encode(insert(filler, facts, depths) + "\n")
        tokens = [self.tokenizer.bos_token_id, *ids]
        weights = [0.0] * len(tokens)
        while True:
            added = False
            for question in questions:
                asked, answer = written(question, rng.random() < 0.4, stated)
                before, after = self.encode("\n" + asked), self.encode(answer)
                if len(tokens) + len(before) + len(after) + 1 > length:
                    continue
                tokens += [*before, *after, self.tokenizer.eos_token_id]
                weights += [0.0] * len(before) + [1.0] * (len(after) + 1)
                added = True
            rng.shuffle(questions)
            if not added or rng.random() < 0.5:
                break
        if len(tokens) > length:  # the facts alone were too many
            return self.row(rng, length, stated)
        rest, scores = phrase_bank(
            np.random.default_rng(rng.getrandbits(62)), length - len(tokens), self.words
        )
        return np.concatenate([np.array(tokens), rest]), np.concatenate(
            [np.array(weights, np.float32), REST * scores]
        )

    def filler(self, rng: random.Random, chars: int) -> str:
        """About so many characters: mostly prose, else words in disorder, made-up words or RULER's noise."""
        kind = rng.random()
        if kind < 0.04:
            return (NOISE * (chars // len(NOISE) + 1))[:chars]
        if kind < 0.12:
            made = [words.made_up(rng) for _ in range(60)]
            return self.sentences(rng, made, chars)
        pieces: list[str] = []
        size = 0
        while size < chars:
            text = rng.choice(self.prose)
            at = rng.randrange(len(text))
            piece = text[at : at + min(chars - size, rng.choice([300, 2000, 10000]))]
            pieces.append(piece)
            size += len(piece) + 2
        joined = rng.choice(["\n\n", " ", "\n"]).join(pieces)
        if kind < 0.3:
            return self.sentences(rng, joined.split() or ["so"], chars)
        return with_decoys(rng, joined) if kind < 0.6 else joined

    def sentences(self, rng: random.Random, vocabulary: list[str], chars: int) -> str:
        """The words in disorder, cut into sentences."""
        out: list[str] = []
        size = 0
        while size < chars:
            chosen = rng.choices(vocabulary, k=rng.randint(3, 30))
            out.append(" ".join(chosen).capitalize() + rng.choice([".", ".", ";", "?", ".\n\n"]))
            size += len(out[-1]) + 1
        return " ".join(out)[:chars]

    def encode(self, text: str) -> list[int]:
        """Token ids without `<|bos|>`."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def count(self, text: str) -> int:
        """How many tokens a text takes."""
        return len(self.encode(text))


def with_decoys(rng: random.Random, text: str) -> str:
    """The text with the names of header fields sprinkled through it, which answer nothing."""
    parts = text.split(" ")
    for _ in range(rng.randint(1, 2 + len(parts) // 60)):
        field = rng.choice(FIELD_NAMES)
        shape = rng.choice(
            [field, field.lower(), field + "s", f"the {field.lower()} of", f"`{field}`", field + ","]
        )
        parts.insert(rng.randint(0, len(parts)), shape)
    return " ".join(parts)


def written(question: Question, with_prefix: bool, stated: bool) -> tuple[str, str]:
    """What the model reads up to the answer, and the answer."""
    if stated and question.statement:
        return f"{question.text}\nAnswer:", f" {question.statement}"
    prefix = question.answer_prefix if with_prefix else ""
    return f"{question.text}\nAnswer:{prefix}", f" {question.response}"
