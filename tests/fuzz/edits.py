"""What is fuzzed: files that are whole, and changes that a stranger makes to them: numbers, names, lengths,
kinds of file. Whoever applies them makes the checksums fit, as the stranger would.
"""

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from tempfile import gettempdir
from typing import Any, NamedTuple

from hypothesis import strategies as st

from offload_decode.common.files import remove

DEEP: Any = []
for _ in range(40):
    DEEP = [DEEP]

TEXTS = ["", "x", "\x1b[31m", "../../..", "/dev/zero", "a\0b", "\ud800", "x" * 5000]
TEXTS += ["NaN", "blosc", "..", "."]
POWERS = [2**31 - 1, *(2**n for n in (31, 32, 62, 63, 64))]
NUMBERS = [0, 1, -1, 2, 2.5, 255, 256, 10**9, *POWERS, 10**40, 1e308, 5e-324]
LISTS = [[], [None], ["keys"], DEEP, [10**9, 1, 1], [0, 0, 0], [-1, 1, 1]]
OTHERS = [None, True, False, {}, {"method": 3}, *LISTS]
VALUES: list[Any] = [*TEXTS, *NUMBERS, *OTHERS]

RAW = {
    **{text: text for text in ("NaN", "Infinity", "1e999", "-0", "01", '"\\ud800"', "{}{}", "\0")},
    "digits": "9" * 5000,
    "brackets": "[" * 100_000,
    "nested": "[[]," * 2000,
}
"""What takes the place of a value as text, by name: the file need not be JSON any more."""

ENDS = [2**31 - 1, -(2**31), 2**63 - 1, -(2**63)]
WORDS = [0, 1, -1, 2, 15, 16, 255, 256, 2**15, 2**16, 2**32, 2**40, 2**62, *ENDS]
FLOATS = [float("nan"), float("inf"), -float("inf"), 1e38, -1.0, 0.0]
KINDS = ["pipe", "link", "dangling", "folder", "missing", "sparse", "zero", "itself"]


class Edit(NamedTuple):
    """What is done to the file `name`: one of the functions below, and what it is given."""

    name: str
    action: str
    given: tuple[Any, ...]


def edits(files: dict[str, bytes], often: Sequence[str] = ()) -> st.SearchStrategy[list[Edit]]:
    """One or two edits of some of these files, whose bytes are those before the first edit: three times as
    often of those that are named.
    """
    names = st.sampled_from([*sorted(files), *often, *often])
    each = {name: _edit(name, data) for name, data in files.items()}
    return st.lists(names.flatmap(lambda name: each[name]), min_size=1, max_size=2)


def apply(root: Path, made: Sequence[Edit]) -> None:
    """Make the edits to the files under `root`, one after another."""
    for name, action, given in made:
        _ACTIONS[action](root / name, *given)


def put_back(root: Path, files: dict[str, bytes], names: Iterable[str]) -> None:
    """Undo: the files of these names, and no others, are as they were."""
    for name in {*names}:
        remove(root / name)
        (root / name).write_bytes(files[name])


def _edit(name: str, data: bytes) -> st.SearchStrategy[Edit]:
    def made(action: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[Edit]:
        return st.builds(Edit, st.just(name), st.just(action), st.tuples(*given))

    kinds, cuts = made("kind", st.sampled_from(KINDS)), made("length", _length(len(data)))
    words = made("word", *_word(len(data)))
    try:
        document = json.loads(data)
    except ValueError:
        return _weighted({words: 8, cuts: 1, kinds: 1}) if data else kinds
    where = st.integers(0, len(list(places(document))) - 1)
    values, twice = (made(action, where, st.sampled_from(VALUES)) for action in ("value", "twice"))
    near = made("near", where, st.sampled_from([-1, 1, 2, -2, 64, 1 << 16]))
    drops, raw = made("drop", where), made("raw", where, st.sampled_from(sorted(RAW)))
    return _weighted({near: 4, values: 3, raw: 1, drops: 1, twice: 1, words: 1, cuts: 1, kinds: 1})


def _weighted(chances: dict[st.SearchStrategy[Edit], int]) -> st.SearchStrategy[Edit]:
    """One of these, as often as that: `one_of` takes each once."""
    each = [strategy for strategy, chance in chances.items() for _ in range(chance)]
    return st.integers(0, len(each) - 1).flatmap(lambda number: each[number])


def _length(size: int) -> st.SearchStrategy[int]:
    return st.one_of(
        st.sampled_from([0, 1, max(0, size - 1), size + 1, size + 64, size + 4096, 2 * size, 1 << 40]),
        st.integers(0, size),
    )


def _word(size: int) -> tuple[st.SearchStrategy[Any], ...]:
    """Where, how wide and what."""
    ends = st.one_of(
        st.integers(0, min(size, 128)), st.integers(0, size), st.integers(max(0, size - 128), size)
    )
    numbers = st.one_of(st.sampled_from(WORDS), st.integers(0, 4096), st.integers(-(2**63), 2**63 - 1))
    return ends, st.sampled_from([1, 2, 4, 4, 8, 8]), st.one_of(numbers, numbers, st.sampled_from(FLOATS))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value lies in a JSON document, those inside of others too."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield from places(each, (*path, name))


def plain(file: Path) -> bool:
    """Whether it is a plain file still, and not a large one."""
    return file.is_file() and not file.is_symlink() and file.stat().st_size < 1 << 30


def _at(file: Path, place: int) -> tuple[Any, tuple[Any, ...], Any]:
    """The document, a path in it, and what holds the value there; an earlier edit may have left no such."""
    if not plain(file):
        return None, (), None
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None, (), None
    path = list(places(document))[place % sum(1 for _ in places(document))]
    return document, path, _holder(document, path)


def _holder(document: Any, path: tuple[Any, ...]) -> Any:
    """The list or object that the value of a path is in."""
    for step in path[:-1]:
        document = document[step]
    return document


def _value(file: Path, place: int, to: Any) -> None:
    document, path, holder = _at(file, place)
    if path:
        holder[path[-1]] = to
    _replace(file, json.dumps(document if path else to).encode())


def _near(file: Path, place: int, by: int) -> None:
    """Another number not far from the one that is there, or from the next one."""
    document, path, _ = _at(file, place)
    every = list(places(document))
    at = every.index(path)
    for near in every[at:] + every[:at]:
        holder = _holder(document, near)
        if near and type(holder[near[-1]]) in (int, float):
            holder[near[-1]] = holder[near[-1]] * by if abs(by) == 2 else holder[near[-1]] + by
            _replace(file, json.dumps(document).encode())
            return


def _drop(file: Path, place: int) -> None:
    document, path, holder = _at(file, place)
    if path:
        del holder[path[-1]]
        _replace(file, json.dumps(document).encode())


_MARK = "@here@"


def _twice(file: Path, place: int, to: Any) -> None:
    """A name that an object has twice."""
    document, path, holder = _at(file, place)
    if path and isinstance(holder, dict):
        name, value = path[-1], holder[path[-1]]
        holder[name] = _MARK
        both = f"{json.dumps(value)}, {json.dumps(name)}: {json.dumps(to)}"
        _replace(file, json.dumps(document).replace(f'"{_MARK}"', both).encode())


def _raw(file: Path, place: int, name: str) -> None:
    document, path, holder = _at(file, place)
    if path:
        holder[path[-1]] = _MARK
    _replace(file, json.dumps(document if path else _MARK).replace(f'"{_MARK}"', RAW[name]).encode())


def _set_word(file: Path, place: int, size: int, value: float) -> None:
    if not plain(file):
        return
    with open(file, "r+b") as opened:
        length = opened.seek(0, os.SEEK_END)
        if isinstance(value, float):
            word = struct.pack("<d" if size == 8 else "<f", value)[:size]
        else:
            word = (value % 2 ** (8 * size)).to_bytes(size, "little")
        opened.seek(min(place, length) // size * size)
        opened.write(word[: max(0, length - opened.tell())])


def _set_length(file: Path, size: int) -> None:
    if plain(file):
        os.truncate(file, size)


def _set_kind(file: Path, kind: str) -> None:
    """Something else in the place of the file; a link leads to the same bytes, and is all that is odd."""
    data = file.read_bytes() if plain(file) else b""
    remove(file)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        elsewhere = Path(gettempdir(), f"elsewhere-{os.getpid()}")
        elsewhere.write_bytes(data)
        file.symlink_to(elsewhere)
    elif to := {"dangling": "/nowhere/at/all", "itself": file, "zero": "/dev/zero"}.get(kind):
        file.symlink_to(to)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, chdir(file.parent):  # the names of sockets are short
            made.bind(file.name)
    elif kind == "sparse":
        file.write_bytes(data)
        os.truncate(file, 1 << 40)


def _replace(file: Path, data: bytes) -> None:
    remove(file)
    file.write_bytes(data)


_ACTIONS: dict[str, Any] = {"value": _value, "near": _near, "drop": _drop, "twice": _twice, "raw": _raw}
_ACTIONS |= {"word": _set_word, "length": _set_length, "kind": _set_kind}


class Files:
    """A target of files under `root`: those whose names `chosen` takes are edited."""

    def __init__(self, root: Path, chosen: Sequence[str], often: Sequence[str] = ()) -> None:
        self.root = root
        self.files = {name: (root / name).read_bytes() for name in chosen}
        self.cases = edits(self.files, often)

    def attempt(self, case: Sequence[Edit]) -> None:
        """Make the changes and read all; `OffloadDecodeError` is a refusal, another error a bug."""
        apply(self.root, case)
        self.fit(case)
        self.use()

    def restore(self, case: Sequence[Edit]) -> None:
        """Undo the changes."""
        put_back(self.root, self.files, (edit.name for edit in case))

    def fit(self, case: Sequence[Edit]) -> None:
        """Make the checksums fit what was edited."""

    def use(self) -> None:
        """Everything that reads the files."""

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        """Whether whoever answers has not looked: a file that is none is never read."""
        return len(case) == 1 and case[0].action == "kind"


def join(file: Path, lines: Sequence[Path], case: Sequence[Edit]) -> None:
    """Write `file` anew of files that are its lines, or put there one that an edit made longer or no file."""
    remove(file)
    names = {edit.name for edit in case if edit.action in ("kind", "length")}
    odd = [line for line in lines if line.name in names]
    if not odd:
        file.write_bytes(b"".join(line.read_bytes() + b"\n" for line in lines))
    elif os.path.lexists(odd[0]):
        odd[0].rename(file)
