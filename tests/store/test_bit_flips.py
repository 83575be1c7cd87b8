"""A thousand bit flips over a store and its indexes, and other harm: `verify` finds each and names it."""

import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import typer

from offload_decode.cli.verify import verify
from offload_decode.prefill_jobs.indexing import build_indexes
from tests.fuzz.edits import Edit, apply, put_back
from tests.store.jobs import FULL, SLIDING, flipped, make_job

FLIPS = 1_000
KINDS = ("clusters", "flat", "faiss-ivf", "faiss-hnsw")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `store.kv` and its indexes: for reading only."""
    folder = tmp_path_factory.mktemp("whole")
    store = make_job(300, layers=(FULL, SLIDING)).write(folder / "store.kv")
    for kind in KINDS:
        build_indexes(store, kind, k=10)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to harm."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def verified(folder: Path) -> list[str]:
    """What `offload-decode verify` finds wrong, a sentence each."""
    out, code = io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        try:
            verify(folder / "store.kv", as_json=True, quiet=True)
        except typer.Exit as ended:
            code = ended.exit_code
    answer = json.loads(out.getvalue())
    assert code == int(not answer["ok"]) == int(bool(answer["problems"]))
    return list(answer["problems"])


def names(file: Path, folder: Path) -> set[str]:
    """How a sentence may name a file: by its path, or by its path in the store."""
    return {str(file), str(file.relative_to(folder / file.relative_to(folder).parts[0]))}


def is_named(file: Path, folder: Path, problems: list[str]) -> bool:
    return any(name in problem for problem in problems for name in names(file, folder))


def is_found(file: Path, folder: Path) -> bool:
    return is_named(file, folder, verified(folder))


def together(flips: list[tuple[Path, int]], folder: Path) -> Iterator[list[tuple[Path, int]]]:
    """Flips in groups that hide nothing of each other: one of the store, or one in each index at most.

    Indexes are looked at where the store is whole, and each without regard to the others.
    """
    groups: list[dict[Path, tuple[Path, int]]] = []
    for file, bit in flips:
        if file.is_relative_to(folder / "store.kv"):
            yield [(file, bit)]
            continue
        index = file.with_suffix("")
        free = next((group for group in groups if index not in group), None)
        if free is None:
            groups.append(free := {})
        free[index] = (file, bit)
    yield from (list(group.values()) for group in groups)


def test_a_thousand_bit_flips(folder: Path) -> None:
    """Each file at least twice; half of the flips over files, and half over bytes."""
    assert verified(folder) == []
    files = files_of(folder)
    rng = random.Random(0)
    sizes = [file.stat().st_size for file in files]
    chosen = files * 2 + rng.choices(files, k=FLIPS // 2 - 2 * len(files))
    chosen += rng.choices(files, weights=sizes, k=FLIPS // 2)
    assert len(chosen) == FLIPS
    flips = [(file, rng.randrange(8 * file.stat().st_size)) for file in chosen]
    unseen = []
    for group in together(flips, folder):
        with ExitStack() as harmed:
            for each in group:
                harmed.enter_context(flipped(*each))
            problems = verified(folder)
        unseen += [each for each in group if not is_named(each[0], folder, problems)]
    assert not unseen
    assert verified(folder) == []


@pytest.mark.parametrize("where", ["a store without its checksums", "a store", "indexes"])
def test_a_thousand_bit_flips_at_once(folder: Path, where: str) -> None:
    """However many files are damaged, the checksums among them or not: every one is named."""
    rng = random.Random(1)
    files = files_of(folder / ("store.kv.indexes" if where == "indexes" else "store.kv"))
    if where == "a store without its checksums":
        files = [file for file in files if not file.name.startswith("SHA256SUMS")]
    flips = {(file, rng.randrange(8 * file.stat().st_size)) for file in rng.choices(files, k=FLIPS)}
    assert len({file for file, _ in flips}) == len(files)
    with ExitStack() as harmed:
        for each in flips:
            harmed.enter_context(flipped(*each))
        told = " ".join(verified(folder))
    if where == "indexes":  # of an index whose metadata has changed the other file is not looked at
        files = [file.with_suffix("") for file in files]
    assert not [file for file in files if not any(name in told for name in names(file, folder))]


@pytest.mark.parametrize(
    "harm", ["truncated", "emptied", "extended", "missing", "folder", "link", "dangling"]
)
def test_files_that_are_not_what_they_were(folder: Path, harm: str) -> None:
    # An index is read through a link as well as without: links count in the store alone.
    for file in files_of(folder / ("store.kv" if harm == "link" else ".")):
        name, data = str(file.relative_to(folder)), file.read_bytes()
        lengths = {"truncated": len(data) - 1, "emptied": 0, "extended": len(data) + 1}
        edit = Edit(name, "length", (lengths[harm],)) if harm in lengths else Edit(name, "kind", (harm,))
        apply(folder, [edit])
        assert is_found(file, folder), file
        put_back(folder, {name: data}, [name])
    assert verified(folder) == []


def test_files_that_changed_places(folder: Path) -> None:
    rng = random.Random(2)
    for one, other in [rng.sample(files_of(folder), 2) for _ in range(60)]:
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
        # Files of the same bytes, such as empty ones, may change places: that is no damage.
        assert first == second or is_found(one, folder) or is_found(other, folder), (one, other)
        one.write_bytes(first)
        other.write_bytes(second)


AS_NOBODY = """
import os, sys
from contextlib import redirect_stdout, suppress
from offload_decode.cli.main import main
store, file = sys.argv[1:]
sys.argv = ["offload-decode", "verify", store]
with suppress(SystemExit), redirect_stdout(sys.stderr):
    main()  # imports what it needs, which a user without rights might not be allowed to read
os.chmod(file, 0)
if os.getuid() == 0:
    os.setuid(65534)
main()
"""


@pytest.mark.parametrize(
    "name",
    [
        "store.kv/layers/000/keys/c.0.0.0",
        "store.kv/layers/000/keys/zarr.json",
        "store.kv/SHA256SUMS",
        "store.kv.indexes/faiss-ivf/layer-000-head-001.faiss",
        "store.kv.indexes/flat/layer-000-head-000.json",
    ],
)
def test_files_that_may_not_be_read(whole: Path, name: str) -> None:
    with TemporaryDirectory() as public:  # pytest's folders are for the user alone
        folder = Path(shutil.copytree(whole, f"{public}/copy"))
        for path in (public, folder):
            os.chmod(path, 0o755)
        command = [sys.executable, "-c", AS_NOBODY, str(folder / "store.kv"), str(folder / name)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (1, ""), ran
    whole_then, error = ran.stderr.splitlines()
    assert "is whole" in whole_then
    assert error.startswith("error: ")
    assert "Permission denied" in error
    assert name.rpartition("/")[2] in error
