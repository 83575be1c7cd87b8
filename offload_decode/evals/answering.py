"""Questions about texts, answered densely and with selectors side by side, and scored."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.engine.engine import Engine
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Haystack, Material
from offload_decode.evals.runs import GUESSES, AnswerRecord, QuestionRecord, Record, Stores, Unit, record
from offload_decode.evals.side_by_side import reply
from offload_decode.evals.tasks.base import Context, Question, Task
from offload_decode.models.loading import LoadedModel
from offload_decode.store.reader import KVStore

CONTROL_EVERY = 4  # contexts: a control costs a prefill of its own
Asking = tuple[int, Question, int]
"""A question with its number in the text, and how many tokens an answer may take."""


@dataclass(frozen=True)
class AnswerPlan:
    """What is asked: `limit` questions for each task, length (in tokens) and seed, which every contender
    answers as dense attention does; `begins`: answers begin as the task says. `prefill` says how stores
    are made. Each text of so many (`control_every`) is asked as a control too; 0: none.
    """

    suite: str
    lengths: tuple[int, ...]
    contenders: tuple[Contender, ...]
    limit: int
    seeds: tuple[int, ...] = (0,)
    begins: bool = True
    prefill: Mapping[str, Any] = field(default_factory=dict)
    control_every: int = CONTROL_EVERY


@dataclass(frozen=True)
class AnswerPlace:
    """One context: the how-manieth of its task, length and seed, how many questions of it are asked, and
    whether its control is.
    """

    task: Task
    length: int
    seed: int
    index: int
    asked: int
    controlled: bool

    @property
    def key(self) -> str:
        return f"{self.task.name}/{self.length}/{self.seed}/{self.index}"


class Answering:
    """An `Evaluation` (`runs`): each unit is one text with its questions; see docs/evaluation.md."""

    def __init__(
        self, plan: AnswerPlan, tasks: Sequence[Task], loaded: LoadedModel, haystack: Haystack, stores: Stores
    ) -> None:
        """Raises `ConfigError` for contenders that cannot be told apart."""
        self.plan, self.tasks = plan, tuple(tasks)
        self.loaded, self.haystack, self.stores = loaded, haystack, stores
        self.name = plan.suite
        self.ways = (Contender(DENSE), *(way for way in plan.contenders if way.label != DENSE))
        labels = [way.label for way in self.ways]
        if repeated := [label for label in labels if labels.count(label) > 1]:
            raise ConfigError(f"'{repeated[0]}' is given twice")
        each = [
            AnswerPlace(task, length, seed, index, min(task.per_context, plan.limit - first), controlled)
            for length, task, seed in product(plan.lengths, self.tasks, plan.seeds)
            for index, first in enumerate(range(0, plan.limit, task.per_context))
            for controlled in [plan.control_every > 0 and index % plan.control_every == 0]
        ]
        self._places = {place.key: place for place in each}

    def configuration(self) -> Mapping[str, Any]:
        """All that decides the questions and the ways of answering them."""
        return {
            **asdict(self.plan),
            "contenders": [way.label for way in self.ways],
            "tasks": {task.name: task.parameters() for task in self.tasks},
            "text": self.haystack.name,
            "text_sha256": self.haystack.sha256,
        }

    def units(self) -> Sequence[Unit]:
        """The shortest texts first, all tasks of a length before the next."""
        return [
            Unit(key, place.length * (2 if place.controlled else 1)) for key, place in self._places.items()
        ]

    def unfit(self, report: Callable[[int, int], None]) -> Mapping[str, ConfigError]:
        """The tasks that cannot be asked at one of the lengths, by name, and why: a text of every task and
        length is drawn, so that this shows before anything long.

        `report` is told how many are drawn, of how many.
        """
        first = {(place.task.name, place.length): place for place in reversed(self._places.values())}
        found: dict[str, ConfigError] = {}
        for done, place in enumerate(first.values(), 1):
            try:
                self._drawn(place)
            except ConfigError as error:
                found.setdefault(place.task.name, error)
            report(done, len(first))
        return found

    def measure(self, unit: Unit, report: Callable[[int], None]) -> Sequence[Record]:
        """Every question of one text, by every way; every so often also to the control, densely."""
        place = self._places[unit.key]
        drawn, material, rng = self._drawn(place)
        task, asking = place.task, list[Asking]()
        records: list[Record] = []
        with self.stores(drawn.text, report) as store:
            for number, question in enumerate(drawn.questions[: place.asked]):
                asking.append((number, question, task.most_tokens(question, material)))
                asked = QuestionRecord(
                    unit=place.key,
                    question=number,
                    task=task.name,
                    length=place.length,
                    seed=place.seed,
                    depth=drawn.depths[number],
                    asked=question.text,
                    expected=list(question.answers),
                    guess=fmean(task.score(question, task.guess(rng, question)) for _ in range(GUESSES)),
                    stored_tokens=store.manifest.n_tokens,
                )
                records.append(record(asked))
            for way in self.ways:
                records += self.answers(place, store, way, asking, control=False)
        if place.controlled:
            with self.stores(drawn.control, lambda done: report(place.length + done)) as store:
                records += self.answers(place, store, self.ways[0], asking, control=True)
        return records

    def _drawn(self, place: AnswerPlace) -> tuple[Context, Material, random.Random]:
        """The text and its questions, what it is made of, and the generator that goes on from there."""
        rng = random.Random(f"{place.seed} {place.task.name} {place.length} {place.index}")
        material = Material(self.haystack, self.loaded.tokenizer, place.length, rng.random())
        return place.task.context(rng, material), material, rng

    def answers(
        self, place: AnswerPlace, store: KVStore, way: Contender, asking: Sequence[Asking], control: bool
    ) -> Iterator[Record]:
        """The records of all answers of one way to a text's questions."""
        engine = Engine.open(store, self.loaded, selector=way.selector, options=way.options)
        task = place.task
        for number, question, most in asking:
            begun = question.answer_prefix if self.plan.begins else ""
            answer = reply(engine, way.label, question.text, most, begun)
            scored = task.complete(answer.text) if answer.cut else answer.text
            exact, f1 = task.squad_scores(question, scored) or (None, None)
            said = AnswerRecord(
                unit=place.key,
                question=number,
                way=way.label,
                control=control,
                said=answer.text,
                score=task.score(question, scored),
                ruler_score=task.ruler_score(question, scored),
                attended=answer.attended,
                bytes_moved=answer.bytes_moved,
                seconds=answer.seconds,
                exact_match=exact,
                f1=f1,
                cut=answer.cut,
            )
            yield record(said)
