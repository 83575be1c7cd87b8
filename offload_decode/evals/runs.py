"""The one runner under all evaluations, and the file that it writes, unit by unit, and goes on with.

JSON lines, first what is measured with what, then records, unit by unit; docs/evaluation.md lists fields.

    {"record": "run", "format": 1, "evaluation": ..., "configuration": {...}, "made_with": {...}, "units": n}
    {"record": ..., "unit": key, ...}          what was measured; the evaluation says which kinds there are
    {"record": "unit", "unit": key, ...}       all of this unit stands above

A unit's lines are written in one go, and lines behind the last finished unit are those of a process that was
killed: they are read by nobody, and cut off before more is written.
"""

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import Field, Strict, TypeAdapter, ValidationError

from offload_decode.common.errors import ConfigError
from offload_decode.common.files import NotPlain, lock, open_plain, parse
from offload_decode.models.loading import LoadedModel
from offload_decode.models.made_with import made_with
from offload_decode.store.reader import KVStore

FORMAT = 1
MOST_LINE, MOST_FILE = 64 << 20, 8 << 30  # bytes
RUN, UNIT = "run", "unit"
QUESTION, ANSWER = "question", "answer"
GUESSES = 20  # a question's `guess` is the mean of so many
MOST = 2**63  # no number of a record is larger
_SHARED = 64  # characters of a string that is worth looking for
_FIRST = b'{"record": "run"'

Record = dict[str, Any]
Text = Annotated[str, Strict()]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
Number = Annotated[float, Strict()]
Amount = Annotated[Number, Field(ge=0, le=MOST)]
Part = Annotated[Number, Field(ge=0, le=1)]
RecordT = TypeVar("RecordT")
ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Header:
    """What is measured (`evaluation`, such as `ruler`, and its configuration, the same for every start of one
    run), with what (`made_with`: model, weights, versions, machine), in how many units, and since when.
    """

    evaluation: Text
    configuration: Mapping[str, Any]
    made_with: Mapping[str, Any]
    units: Annotated[int, Strict()]
    started: Text


@dataclass(frozen=True)
class Results:
    """What is in a file: all records of the units that are finished, and these units."""

    path: Path
    header: Header
    records: tuple[Record, ...]
    finished: frozenset[str]
    size: int

    def of(self, kind: str) -> list[Record]:
        """The records of a kind, in their order."""
        return [record for record in self.records if record["record"] == kind]

    def typed(self, kind: str, as_kind: type[RecordT]) -> Iterator[RecordT]:
        """The same, each checked. Raises `ConfigError` for a field that is missing or of another type."""
        reader = TypeAdapter(as_kind)
        for record in self.of(kind):
            try:
                yield reader.validate_python(record)
            except ValidationError as error:
                raise ConfigError(
                    f"a record '{kind}' of unit '{record['unit']}' of {self.path} has no proper "
                    f"'{error.errors()[0]['loc'][0]}': the file was changed or is of another release"
                ) from error


def read(path: Path) -> Results:
    """The results in a file. Raises `ConfigError` where there is none, or something else."""
    try:
        with open(open_plain(path, follow=True), "rb") as file:
            if os.fstat(file.fileno()).st_size > MOST_FILE:
                raise _foreign(path, "it is too large")
            return _read(path, file)
    except FileNotFoundError as error:
        text = f"there are no results at {path}: run `offload-decode eval` with --out first"
        raise ConfigError(text) from error
    except (NotPlain, OSError) as error:
        raise _foreign(path, getattr(error, "strerror", None) or str(error)) from error


def _read(path: Path, file: Any) -> Results:
    header: Header | None = None
    records: list[Record] = []
    waiting: list[Record] = []
    finished: dict[str, None] = {}
    size = at = 0
    while line := file.readline(MOST_LINE):
        at += len(line)
        if not line.endswith(b"\n"):
            if len(line) == MOST_LINE:
                raise _foreign(path, "a line of it is too long")
            break  # the process that wrote it was killed here
        try:
            record = parse(line)
        except ValueError as error:
            raise _foreign(path, f"a line of it is not JSON ({error})") from error
        if not isinstance(record, dict) or not isinstance(kind := record.get("record"), str):
            raise _foreign(path, "a line of it is no record")
        if header is None:
            header = _header(path, record)
            size = at
        elif not isinstance(unit := record.get("unit"), str):
            raise _foreign(path, "a record of it names no unit")
        elif kind == UNIT:
            records += map(_shared, waiting)
            waiting = []
            finished[unit] = None
            size = at
        else:
            waiting.append(record)
    if header is None:
        raise _foreign(path, "its first line is not whole" if at else "it is empty")
    return Results(path, header, tuple(records), frozenset(finished), size)


def _shared(record: Record) -> Record:
    """The record with strings that others have too: names of fields, tasks and ways. A million answers would
    each hold their own.
    """
    return {
        sys.intern(name): sys.intern(value) if isinstance(value, str) and len(value) <= _SHARED else value
        for name, value in record.items()
    }


def _header(path: Path, record: Record) -> Header:
    try:
        found = TypeAdapter(Header).validate_python(record)
        if record["record"] != RUN:
            raise ValueError(f"it is a record '{record['record']}'")
    except ValueError as error:
        raise _foreign(path, "its first line does not say what was measured") from error
    if record.get("format") != FORMAT:
        raise _foreign(path, f"its format is {record.get('format')!r}, and this release reads {FORMAT}")
    return found


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"{path} cannot be read as results of an evaluation: {why}")


Write = Callable[[Sequence[Record]], None]
"""Appends records to a file, all or (after a kill) some of them; they are on the disk when it returns."""


def unit_records(key: str, records: Sequence[Record], seconds: float) -> list[Record]:
    """What a unit measured, and behind it that it is finished."""
    end = {"record": UNIT, "unit": key, "seconds": round(seconds, 3), "finished": now()}
    return [*({"record": "", "unit": key} | record for record in records), end]


@contextmanager
def opened(path: Path, header: Header) -> Iterator[tuple[Write, Results]]:
    """What writes to a file, made or gone on with, and what is in it. One process writes it at a time.

    A file of another run in which nothing was finished is begun anew. Raises `ConfigError` where there are
    results of another run, where another process writes them, and where nothing can be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): choose another --out") from error
    try:
        if not lock(descriptor):
            raise ConfigError(f"another process writes {path}: wait for it, or choose another --out")

        def write(records: Sequence[Record]) -> None:
            lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
            # Names of files may hold half characters, which UTF-8 has no form for: JSON spells them out.
            left = memoryview("".join(lines).encode(errors="backslashreplace"))
            while left:
                left = left[os.write(descriptor, left) :]
            os.fsync(descriptor)

        # Empty, or left within its first line.
        begun = os.pread(descriptor, 1 << 16, 0)
        torn = b"\n" not in begun and begun.startswith(_FIRST[: len(begun)])
        results = None if torn else read(path)
        if results is None or not results.finished:
            os.ftruncate(descriptor, 0)
            write([{"record": RUN, "format": FORMAT} | _plain(header)])
            results = read(path)
        _check_same(results.header, header, path)
        os.ftruncate(descriptor, results.size)
        yield write, results
    finally:
        os.close(descriptor)


def _plain(header: Header) -> Record:
    return dict(json.loads(json.dumps(vars(header))))


def _check_same(there: Header, asked: Header, path: Path) -> None:
    """Results of one run have one configuration, and were made with the same model and versions."""
    wanted = _plain(asked)
    for name in ("evaluation", "configuration", "made_with"):
        before, after = getattr(there, name), wanted[name]
        if before != after:
            what = name
            if not isinstance(before, str):
                what = ", ".join(key for key in {**before, **after} if before.get(key) != after.get(key))
            raise ConfigError(
                f"{path} holds results of another run, which differs in {what}: choose another --out, "
                "or remove it first"
            )


def now() -> str:
    """The time, as results tell it."""
    return datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True)
class QuestionRecord:
    """A question: its unit and number in it, where what it asks for stands, and what chance comes to."""

    unit: Text
    question: Count
    task: Text
    length: Count
    seed: Annotated[int, Strict(), Field(ge=-MOST, le=MOST)]
    depth: Part | None
    asked: Text
    expected: list[Text]
    guess: Part
    stored_tokens: Count


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """An answer: which way, to the text or to its control, its scores and costs.

    `ruler_score` is RULER's string match; `exact_match` and `f1` are SQuAD's, None without a short answer. An
    answer that was `cut` by its length was scored without the line, word or record that it was cut in.
    """

    unit: Text
    question: Count
    way: Text
    control: Annotated[bool, Strict()]
    said: Text
    score: Part
    ruler_score: Part
    attended: Amount
    bytes_moved: Amount
    seconds: Amount
    exact_match: Part | None = None
    f1: Part | None = None
    cut: Annotated[bool, Strict()] = False


def record(of: QuestionRecord | AnswerRecord) -> Record:
    """As it is written."""
    return {"record": QUESTION if isinstance(of, QuestionRecord) else ANSWER, **asdict(of)}


def grouped(each: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    """The items by what `key` says of them, in the order in which they come."""
    found: dict[KeyT, list[ItemT]] = defaultdict(list)
    for item in each:
        found[key(item)].append(item)
    return dict(found)


def flat(
    values: Mapping[str, Any], within: Callable[[Any], bool] = lambda value: True, *names: str
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Values by the names on the way to them, through each object that `within` says yes to."""
    for name, value in values.items():
        if isinstance(value, Mapping) and within(value):
            yield from flat(value, within, *names, name)
        else:
            yield (*names, name), value


def questions_and_answers(results: Results) -> Iterator[tuple[QuestionRecord, list[AnswerRecord]]]:
    """Every question with all answers to it. Raises `ConfigError` for records that do not fit together."""
    answers = grouped(results.typed(ANSWER, AnswerRecord), lambda said: (said.unit, said.question))
    for asked in results.typed(QUESTION, QuestionRecord):
        yield asked, answers.pop((asked.unit, asked.question), [])
    if answers:
        unit, number = next(iter(answers))
        raise ConfigError(f"{results.path} has answers to a question that it does not have: {unit}, {number}")


@dataclass(frozen=True)
class Unit:
    """What is measured in one go, and lost if the process is killed: `key` names it in the results; `tokens`
    is about how many it prefills.
    """

    key: str
    tokens: int


Stores = Callable[[str, Callable[[int], None]], AbstractContextManager[KVStore]]
"""Gives the store of a text and reports the tokens done."""


class Evaluation(Protocol):
    """What is measured, in which units, and how."""

    name: str

    def configuration(self) -> Mapping[str, Any]:
        """Plain JSON values: all that decides what is measured, the model aside."""

    def units(self) -> Sequence[Unit]:
        """All units, in the order in which they are measured."""

    def measure(self, unit: Unit, report: Callable[[int], None]) -> Sequence[Record]:
        """The records of a unit, each with its kind as `record`; `report` is told the tokens prefilled."""


def run(
    evaluation: Evaluation,
    loaded: LoadedModel,
    out: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Results:
    """Measure what is not in `out` yet, and read all of it. `progress` counts tokens that are prefilled.

    Raises `ConfigError` where `out` holds something else, and whatever the evaluation raises: units that
    were finished before then stay.
    """
    units = evaluation.units()
    header = Header(evaluation.name, evaluation.configuration(), made_with(loaded), len(units), now())
    total = sum(unit.tokens for unit in units)
    with opened(out, header) as (write, there):
        done = sum(unit.tokens for unit in units if unit.key in there.finished)
        progress(done, total)
        for unit in units:
            if unit.key in there.finished:
                continue
            began, before, size = time.monotonic(), done, unit.tokens

            def report(tokens: int, before: int = before, size: int = size) -> None:
                progress(before + min(tokens, size), total)

            records = evaluation.measure(unit, report)
            write(unit_records(unit.key, records, time.monotonic() - began))
            done += size
            progress(done, total)
    return read(out)
