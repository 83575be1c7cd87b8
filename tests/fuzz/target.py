"""What is fuzzed: files that are whole, changes of them, and everything that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hypothesis import strategies as st

from tests.fuzz.edits import Edit, apply, edits, put_back

Case = Any


class Target(Protocol):
    """Made with an empty folder."""

    cases: st.SearchStrategy[Case]

    def attempt(self, case: Case) -> None:
        """Make the changes and read all; `OffloadDecodeError` is a refusal, another error a bug."""

    def restore(self, case: Case) -> None:
        """Undo the changes."""

    def must_refuse(self, case: Case) -> bool:
        """Whether whoever answers has not looked."""


class Files:
    """A target of files under `root`: those whose names `chosen` takes are edited."""

    def __init__(self, root: Path, chosen: Sequence[str], often: Sequence[str] = ()) -> None:
        self.root = root
        self.files = {name: (root / name).read_bytes() for name in chosen}
        self.cases = edits(self.files, often)

    def attempt(self, case: Sequence[Edit]) -> None:
        apply(self.root, case)
        self.fit(case)
        self.use()

    def restore(self, case: Sequence[Edit]) -> None:
        put_back(self.root, self.files, case)

    def fit(self, case: Sequence[Edit]) -> None:
        """Make the checksums fit what was edited."""

    def use(self) -> None:
        """Everything that reads the files."""

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        """A file that is none is never read."""
        return len(case) == 1 and case[0].action == "kind"
