"""A store from elsewhere: its metadata, the numbers in its chunk files, and what a killed prefill left."""

import hashlib
import json
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from offload_decode.common.errors import StoreError, StoreIncomplete
from offload_decode.store import KVStore, files, verify_store
from tests.fuzz.edits import Edit, Files, plain
from tests.store.jobs import FULL, SLIDING, make_job, read_all

LISTS = (files.SUMS, files.SEAL)
TOKENS = 300


class Sealed(Files):
    """Files of a store; its checksums fit, unless they are what was edited."""

    def __init__(self, path: Path, chosen: Callable[[str], bool]) -> None:
        self.path = path
        names = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
        super().__init__(path, list(filter(chosen, names)))
        self.lists = {name: (path / name).read_bytes() for name in LISTS}
        self.sums = files.read_sums(path)

    def fit(self, case: Sequence[Edit]) -> None:
        edited = {edit.name for edit in case} - {*LISTS}
        sums = dict(self.sums)
        for name in edited:
            file = self.path / name
            if plain(file):
                sums[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        if not any(edit.name == files.SUMS for edit in case):
            (self.path / files.SUMS).write_bytes(files.render(sums))
        if plain(self.path / files.SUMS) and not any(edit.name == files.SEAL for edit in case):
            (self.path / files.SEAL).write_bytes(files.seal_of((self.path / files.SUMS).read_bytes()))

    def restore(self, case: Sequence[Edit]) -> None:
        super().restore(case)
        for name, data in self.lists.items():
            (self.path / name).write_bytes(data)


class Store(Sealed):
    """All that a store gives without a model."""

    def __init__(self, folder: Path, metadata: bool) -> None:
        path = make_job(TOKENS, layers=(FULL, SLIDING, FULL), kv="int8").write(folder / "s")
        super().__init__(path, lambda name: is_list(name) == metadata)

    def use(self) -> None:
        with suppress(StoreError):  # which reads what opening refuses, too
            verify_store(self.path)
        read_all(self.path)


def is_list(name: str) -> bool:
    """Whether a file of a store is read whole, as metadata or checksums."""
    return name.endswith(".json") or name in LISTS


class Staged(Files):
    """What a prefill left that was killed: it is told of, and gone on with until it could be published."""

    def __init__(self, folder: Path) -> None:
        self.job = make_job(TOKENS, layers=(FULL, SLIDING), kv="int8")
        self.path = folder / "s"
        with self.job.open(self.path) as writer:
            self.job.feed(writer, until=100)
        partial = folder / "s.partial"
        names = [str(file.relative_to(partial)) for file in partial.rglob("*") if file.is_file()]
        super().__init__(partial, names)

    def use(self) -> None:
        with suppress(StoreIncomplete):
            KVStore.open(self.path)
        with self.job.open(self.path) as writer:
            self.job.feed(writer)
            writer.seal()

    def restore(self, case: Sequence[Edit]) -> None:
        shutil.rmtree(self.root)
        for name, data in self.files.items():
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_bytes(data)

    def must_refuse(self, case: Sequence[Edit]) -> bool:
        """Of the lock nothing is read."""
        return super().must_refuse(case) and case[0] != Edit("lock", "kind", ("sparse",))

    def fit(self, case: Sequence[Edit]) -> None:
        """`progress.json` ends with a checksum of itself."""
        file = self.root / "progress.json"
        if not plain(file):
            return
        try:
            body = json.loads(file.read_bytes())
            body.pop("crc")
            file.write_text(json.dumps({**body, "crc": zlib.crc32(json.dumps(body).encode())}))
        except (OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
            return  # it is no such file any more


TARGETS = {
    "metadata": lambda folder: Store(folder, metadata=True),
    "chunks": lambda folder: Store(folder, metadata=False),
    "staged": Staged,
}
