import gc
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from offload_decode.common.errors import StoreDamaged, StoreError
from offload_decode.store.files import map_files

SIZE = 64 * 1024


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = [tmp_path / str(i) for i in range(5)]
    for path in paths:
        path.write_bytes(rng.bytes(SIZE))
    return paths


def test_files_are_one_array_that_keeps_its_maps(files: list[Path]) -> None:
    view = map_files(files, SIZE).view(np.uint16).reshape(-1, 64)[7:]
    gc.collect()
    expected = b"".join(path.read_bytes() for path in files)
    assert view.tobytes() == expected[7 * 128 :]
    for path in files:
        path.unlink()
    assert view.tobytes() == expected[7 * 128 :]


def test_maps_are_let_go_with_the_array(files: list[Path]) -> None:
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("needs /proc")
    view = map_files(files, SIZE)
    assert str(files[2]) in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert str(files[2].parent) not in Path("/proc/self/maps").read_text()


def test_a_single_file_needs_no_alignment(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"abc")
    assert map_files([tmp_path / "one"], 3).tobytes() == b"abc"


def test_views_are_read_only_and_see_later_writes(files: list[Path]) -> None:
    view = map_files(files, SIZE)
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        view.flags.writeable = True
    with open(files[3], "r+b") as file:
        file.seek(5)
        file.write(b"later")
    assert view[3 * SIZE + 5 : 3 * SIZE + 10].tobytes() == b"later"


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_file_of_another_size_is_refused_before_it_is_touched(files: list[Path], size: int) -> None:
    os.truncate(files[4], size)
    with pytest.raises(StoreDamaged, match=f"4 has {size:,} bytes and should have 65,536"):
        map_files(files, SIZE)


def test_a_missing_file_is_named(files: list[Path]) -> None:
    files[1].unlink()
    with pytest.raises(StoreDamaged, match="1 is missing"):
        map_files(files, SIZE)


def test_other_systems_get_a_sentence(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(StoreError, match="Linux or macOS"):
        map_files(files, SIZE)
