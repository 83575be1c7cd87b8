"""Training rows: facts hidden in filler, followed by questions and answers until the window is full."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from training import chains, counting, documents, facts, needles, suite
from training.fillers import Fillers
from training.items import (
    ALTERNATIVES,
    HINTS,
    Item,
    Linked,
    Listed,
    Said,
    alternatives,
    hinted,
    inside,
    listed,
    spoken,
    turning,
)
from training.marks import NOTHING, asked_for, belonging, held, listed_words
from training.names import Names
from training.synthetic import phrase_bank

SETTLED = 0.25  # weight of an answer's token that the two before it tell; of the others, 1
REST = 0.2  # weight of the phrase bank behind the last question
COUNTING = ("common", "coded")
ALONE = (*COUNTING, "suite")  # nothing beside them: they write their whole text


@dataclass(frozen=True)
class Row:
    """tokens int64[T]; weights float32[T] of predicting each; others int64[T, ALTERNATIVES]: what would be as
    right there, or -1; guided bool[T]: where an answer is copied from what it is found by; hints
    int64[T, HINTS]: the tokens behind which it is told, or -1 where it is copied from wherever it stands;
    ends int64[T]: which word of a list to count ends there, or 0; origins int64[T]: the token that is copied
    from there; so_far int64[T]: which beginning of such a word has been read by then, or 0; belongs
    int64[R, 3]: tokens of values, with the first and the last one of the name that they belong to; background
    bool[T]: filler without answers; facts bool[T]: what is hidden there; far: whether tokens of other texts
    may be simulated behind it; branches int64[T]: 0 for what all see, and a number for each question that
    sees that and itself alone; lists: the answers whose parts may come in any order."""

    tokens: np.ndarray
    weights: np.ndarray
    others: np.ndarray
    guided: np.ndarray
    hints: np.ndarray
    ends: np.ndarray
    origins: np.ndarray
    so_far: np.ndarray
    belongs: np.ndarray
    background: np.ndarray
    facts: np.ndarray
    far: bool
    branches: np.ndarray
    kind: str
    lists: tuple[Said, ...] = ()

    def reordered(self, number: int, order: Sequence[int]) -> Row:
        """The same with the parts of one of its lists in another order."""
        old = self.lists[number]
        answer = slice(old.start, old.start + old.size)
        moved = old.moved(order)
        tokens, weights, others = self.tokens.copy(), self.weights.copy(), self.others.copy()
        guided, origins = self.guided.copy(), self.origins.copy()
        for of_token in (tokens, weights, guided, origins):
            of_token[answer] = of_token[answer][moved]
        new = listed(old.start, tokens[answer], [old.parts[i] for i in order])
        others[answer] = alternatives(new)
        lists = (*self.lists[:number], new, *self.lists[number + 1 :])
        once = replace(self, tokens=tokens, weights=weights, others=others, guided=guided)
        return replace(once, origins=origins, lists=lists)


class Rows:
    """Makes rows with a tokenizer and fillers."""

    def __init__(self, tokenizer: Any, fillers: Fillers) -> None:
        self.tokenizer, self.fast = tokenizer, tokenizer.backend_tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.fillers = fillers
        self.names = Names(fillers.known)
        self.words = np.arange(len(tokenizer.all_special_ids), len(tokenizer))

    def row(self, rng: random.Random, length: int, kind: str) -> Row:
        """`<|bos|>text\\n\\nquestion\\nAnswer: answer<|eos|>\\nquestion...`; weight 1 on the answers."""
        items = self.items(rng, length, kind)
        while True:
            made = self.fitted(rng, items, length, kind)
            if made:
                return made
            items = self.items(rng, length, kind)

    def items(self, rng: random.Random, length: int, kind: str) -> list[Item]:
        """Facts of the kind, and often of others beside them; counted lists stand alone."""
        found = [self.item(rng, length, kind)]
        if kind in ALONE or rng.random() < 0.3:
            return found
        budget = length * 1.2 * rng.random()
        while True:
            size = sum(len(fact) for item in found for fact in item.facts)
            if size > budget or len(found) > 8:
                return found
            other = rng.choice(["needles", "values", "plain", "records", "pairs", "tracking", "documents"])
            found.append(self.item(rng, length // 2, other))

    def item(self, rng: random.Random, length: int, kind: str) -> Item:
        """One thing to learn, of a size that goes with the length."""
        names = self.names
        many = max(2, length // 50)
        few = max(2, min(6, length // 110))
        if kind == "needles":
            dense = rng.random() < 0.25
            count = many // 2 if dense else rng.choice((1, rng.randint(1, few), rng.randint(4, 4 + few)))
            return needles.needles(rng, names, count)
        if kind == "pairs":
            return facts.pairs(rng, names, rng.randint(3, length // 26))
        if kind == "identifiers":
            return needles.needles(rng, names, max(2, length // rng.choice([90, 110, 150])), identifiers=True)
        if kind == "values":
            return needles.many_values(rng, names)
        if kind == "plain":
            return facts.plain(rng, names, rng.randint(1, few))
        if kind == "records":
            return facts.records(rng, names, rng.randint(2, few + 2))
        if kind == "tracking":
            return chains.tracking(rng, names, rng.choice([2, 3, 4, 5, 5]))
        if kind == "documents":
            return documents.documents(rng, names, length)
        if kind == "common":
            return counting.common_words(rng, names, int(length * rng.uniform(0.4, 0.8)))
        if kind == "coded":
            return counting.coded_words(rng, names, int(length * rng.uniform(0.4, 0.8)))
        if kind == "suite":
            return suite.drawn(rng, self.tokenizer, self.fillers, length)
        raise ValueError(kind)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, without `<|bos|>`."""
        return [ids_of(encoding) for encoding in self.encodings(texts)]

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The same, with the letters of each token."""
        found: list[Any] = self.fast.encode_batch(list(texts), add_special_tokens=False)
        return found

    def fitted(self, rng: random.Random, items: list[Item], length: int, kind: str) -> Row | None:
        """The row, or None where facts and one question do not fit, or where there is none."""
        before, after = items[0].before, items[0].after
        pieces = [fact for item in items for fact in item.facts]
        found = [ask for item in items for ask in item.asks]
        if not found:
            return None
        rng.shuffle(found)
        # Questions about one list stand side by side, each right behind it.
        beside = kind in COUNTING
        asks = [(after if i == 0 or beside else "\n") + ask for i, (ask, _) in enumerate(found)]
        said = [spoken(rng, answer) for _, answer in found]
        (head,) = self.encode([before])
        answers = self.encode([answer for answer, _ in said])
        encoded = [self.encodings(texts) for texts in (pieces, [" " + piece for piece in pieces], asks)]
        bare, spaced, asked = ([ids_of(encoding) for encoding in group] for group in encoded)
        taken = 1 + len(head) + sum(map(len, spaced)) + len(asked[0]) + len(answers[0]) + 1
        if taken > length:
            return None
        # A share of what is left goes to filler, the rest to further questions.
        more = sum(len(a) + len(b) + 1 for a, b in zip(asked[1:], answers[1:], strict=True))
        wanted = min(more, length // 2)
        left = max(0, length - taken - wanted)
        room = int(left * (1.0 if rng.random() < 0.5 else rng.random()))
        filler = (
            np.zeros(0, np.int64)
            if kind in ALONE
            else self.fillers.cut(rng, room, items[0].noise).astype(np.int64)
        )
        text, background, starts = self.hidden(rng, filler, bare, spaced, items)
        tokens = [np.array([self.bos]), head, text]
        behind = 1 + len(head)
        weights: list[np.ndarray] = [np.zeros(behind + len(text), np.float32)]
        size = behind + len(text)
        lists: list[Said] = []
        turns = np.zeros(length, bool)
        others, guided = np.full((length, ALTERNATIVES), -1, np.int64), np.zeros(length, bool)
        hints = np.full((length, HINTS), -1, np.int64)
        named = [named for item in items for named in item.named]
        belongs: list[np.ndarray] = []
        branches = np.zeros(length, np.int64)
        for i in range(len(asks)):
            question = asked[i]
            start = size + len(question)
            end = start + len(answers[i])
            if end + 1 > length:
                continue
            tokens += [question, answers[i], np.array([self.eos])]
            weights += [np.zeros(len(question), np.float32), np.ones(len(answers[i]) + 1, np.float32)]
            parts = self.encode([f" {part}" for part in said[i][1]])
            answer = found[i][1]
            if isinstance(answer, Listed):
                lists.append(listed(start, answers[i], parts))
                others[start:end] = alternatives(lists[-1])
                turns[start:end] = turning(lists[-1])
                weights[-1][:-1][~(inside(lists[-1]) | turns[start:end])] *= SETTLED
            elif isinstance(answer, Linked):
                first_tokens = start + np.array(listed(start, answers[i], parts).starts)
                lines = self.encode([f" {fact}" for fact in answer.told])
                if not answer.told:
                    turns[first_tokens[1:] - 1] = turns[end - 1] = True
                at = hinted(answer, parts, lines, np.concatenate(tokens[2:-3]), question)
                hints[first_tokens] = np.where(at < 0, -1, behind + at)
            name = asked_for(encoded[2][i], asks[i], named)
            if name:  # what is said belongs to the name in the question as the value does to its document's
                belongs.append(belonging(start - 1, end, (size + name[0], size + name[1])))
            guided[start:end] = kind not in ALONE
            if kind in COUNTING:  # led to what comes often, but not from one place in the list to the next
                guided[start:end] = inside(lists[-1])
            if beside:
                branches[size : end + 1] = i + 1
            size = end + 1
        if length > size:
            branches[size:] = len(asks) + 1 if beside else 0
            bank, scores = phrase_bank(np.random.default_rng(rng.getrandbits(62)), length - size, self.words)
            tokens.append(bank)
            weights.append(np.float32(REST) * scores)
        marked, told = np.zeros(length, bool), np.zeros(length, bool)
        marked[behind : behind + len(text)] = background
        told[behind : behind + len(text)] = ~background
        far = all(item.far for item in items)
        whole, counted = np.concatenate(tokens), np.concatenate(weights)
        # Many tokens of an answer are copied in passing; what must be found or decided is to count.
        plain = settled(whole, branches) & (others < 0).all(1) & ~turns & (counted > REST)
        counted = np.where(plain, np.minimum(counted, SETTLED), counted)
        ends, so_far, origins = *np.zeros((2, length), np.int64), whole.copy()
        if kind in COUNTING:
            inside_list = slice(behind, behind + len(text))
            in_list = listed_words(encoded[0][0], pieces[0])
            ends[inside_list], origins[inside_list], so_far[inside_list] = in_list
        belongs += [behind + found for found in held(items, encoded[1], starts)]
        led = (guided, hints, ends, origins, so_far, np.concatenate([NOTHING, *belongs]))
        return Row(whole, counted, others, *led, marked, told & far, far, branches, kind, tuple(lists))

    def hidden(
        self,
        rng: random.Random,
        filler: np.ndarray,
        bare: list[np.ndarray],
        spaced: list[np.ndarray],
        items: list[Item],
    ) -> tuple[np.ndarray, np.ndarray, dict[int, int]]:
        """The filler with the facts at the ends of sentences, which tokens are filler, and where each fact
        begins that has a blank in front."""
        if not len(filler):
            pieces = [bare[0], *spaced[1:]]
            whole = np.concatenate(pieces)
            before = np.cumsum([len(piece) for piece in pieces[:-1]]).tolist()
            return whole, np.zeros(len(whole), bool), dict(enumerate(before, 1))
        places = self.fillers.places(filler)
        at: list[tuple[int, float, int]] = []
        index = 0
        for item in items:
            drawn = [int(places[rng.randrange(len(places))]) for _ in item.facts]
            if item.ordered:
                drawn.sort()
            # Ties keep the order of the facts, and a fact asked for may be anywhere.
            at += [(place, index + j, index + j) for j, place in enumerate(drawn)]
            index += len(item.facts)
        at.sort()
        parts: list[np.ndarray] = []
        marks: list[np.ndarray] = []
        starts: dict[int, int] = {}
        last = size = 0
        for place, _, fact in at:
            before = filler[last:place]
            new = bare[fact] if place == 0 and not parts else spaced[fact]
            if new is spaced[fact]:
                starts[fact] = size + len(before)
            size += len(before) + len(new)
            parts += [before, new]
            marks += [np.ones(len(before), bool), np.zeros(len(new), bool)]
            last = place
        parts.append(filler[last:])
        marks.append(np.ones(len(filler) - last, bool))
        return np.concatenate(parts), np.concatenate(marks), starts


def ids_of(encoding: Any) -> np.ndarray:
    """int64[T]."""
    return np.array(encoding.ids, np.int64)


def settled(tokens: np.ndarray, branches: np.ndarray) -> np.ndarray:
    """Which of tokens int64[T] alone have come behind the same two before them, as far as their branch sees:
    bool[T].
    """
    found = np.zeros(len(tokens), bool)
    shared: dict[tuple[int, int], set[int]] = {}
    behind = shared
    listed = tokens.tolist()
    for i, both in enumerate(pairwise(listed[:-1]), 2):
        if branches[i] != branches[i - 1]:
            behind = {pair: set(those) for pair, those in shared.items()}
        known = behind.setdefault(both, set())
        found[i] = known == {listed[i]}
        known.add(listed[i])
    return found
