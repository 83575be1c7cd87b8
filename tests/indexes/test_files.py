"""An index is written beside its place and renamed; its bytes are stated, and cells are mapped."""

import mmap
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload_decode.common.errors import IndexDamaged, IndexNotWritten
from offload_decode.common.rows import encodings
from offload_decode.indexes import files
from offload_decode.indexes.clusters.index import ClusteredIndex


def test_two_writers_of_one_index_leave_a_pair_of_one_of_them(tmp_path: Path) -> None:
    path, inside = tmp_path / "index", []

    def write(name: str, content: str) -> None:
        inside.append(content)
        Path(name).write_text(content)
        time.sleep(0.002)
        assert Path(name).read_text() == content
        assert inside.pop() == content, "one writer at a time"

    def save(content: str) -> None:
        for _ in range(20):
            files.save(path, {"of": content}, ".native", lambda name: write(name, content))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(save, content) for content in ("a", "bb", "ccc")]:
            done.result()
    body, native = files.load(path, {}, ".native")
    assert native is not None
    assert native.read_text() == body["of"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "index.native"]


def test_what_a_killed_writer_left_goes_with_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "index.native.tmp").write_text("half")
    (tmp_path / "other.json.0123.tmp").write_text("{")
    files.save(tmp_path / "index", {}, ".native", lambda name: Path(name).touch())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["index.json", "index.native"]


def test_metadata_is_read_as_it_was_written_to_the_letter(tmp_path: Path) -> None:
    files.save(tmp_path / "index", {"recall": 1e-05})
    file = tmp_path / "index.json"
    for old, new in (("1e-05", "1E-05"), ("\n ", "\n\t"), ("}\n", "}")):
        changed = file.read_text().replace(old, new, 1)
        assert changed != file.read_text()
        (tmp_path / "other.json").write_text(changed)
        with pytest.raises(IndexDamaged):
            files.load(tmp_path / "other", {})


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_failure_leaves_nothing_but_what_was_there(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "index"
    files.save(path, {"n": 1}, ".native", lambda name: Path(name).touch())
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def fail(name: str) -> None:
        Path(name).write_text("half")
        raise error("no space left")

    with pytest.raises(IndexNotWritten if error is RuntimeError else error, match="no space left"):
        files.save(path, {"n": 2}, ".native", fail)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_kind_is_asked_for_its_bytes_without_its_library() -> None:
    code = (
        "import sys; sys.modules.update(faiss=None, hnswlib=None)\n"
        "import numpy as np\n"
        "from offload_decode.indexes import registry\n"
        "for kind in registry.BUILT_IN: registry.stated(kind).costs(10**6, 128, np.dtype('f2'), 64)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def drawn(n: int, dtype: str) -> Any:
    keys = np.random.default_rng(0).standard_normal((n, 32)).astype(np.float32)
    return encodings.encode(keys, dtype) if dtype == encodings.INT8 else keys.astype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", encodings.INT8])
def test_clusters_that_are_loaded_are_mapped(dtype: str, tmp_path: Path) -> None:
    keys = drawn(4000, dtype)
    ClusteredIndex.build(keys).save(tmp_path / "i")
    assert all(_is_mapped(part) for part in ClusteredIndex.load(tmp_path / "i", keys).cells)


def _is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array.obj if isinstance(array, memoryview) else array, mmap.mmap)
