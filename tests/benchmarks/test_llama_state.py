"""llama.cpp's state files: what is written is read, byte for byte what llama.cpp would have saved."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import llama_state
from benchmarks.llama_state import Form

LAYERS, CELLS, CHANNELS = 2, 5, 8
FORM = Form(0x67677371, 3, LAYERS, CHANNELS, False, 1, 1)


def drawn() -> dict[str, list[llama_state.Rows]]:
    rng = np.random.default_rng(0)
    return {
        kind: list(rng.standard_normal((LAYERS, CELLS, CHANNELS)).astype(np.float16).view(np.uint16))
        for kind in ("keys", "values")
    }


def saved(rows: dict[str, list[llama_state.Rows]], transposed: bool) -> bytes:
    """As `llama_kv_cache::state_write` in llama.cpp's sources puts it, number by number."""
    parts = [struct.pack("<3I", 0x67677371, 3, 0), struct.pack("<2I", 1, CELLS)]
    parts += [struct.pack("<iIi", place, 1, 0) for place in range(CELLS)]
    parts += [struct.pack("<2I", transposed, LAYERS)]
    for own in rows["keys"]:
        parts += [struct.pack("<iQ", 1, 2 * CHANNELS), own.tobytes()]
    for own in rows["values"]:
        if transposed:
            parts += [struct.pack("<i2I", 1, 2, CHANNELS)]
            parts += [own[:, channel].tobytes() for channel in range(CHANNELS)]
        else:
            parts += [struct.pack("<iQ", 1, 2 * CHANNELS), own.tobytes()]
    return b"".join(parts)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_state_is_written_and_read_as_llama_saves_it(tmp_path: Path, transposed: bool) -> None:
    path, rows = tmp_path / "state", drawn()
    form = replace(FORM, transposed=transposed)
    llama_state.write(path, form, CELLS, lambda kind, layer: rows[kind][layer])
    assert path.read_bytes() == saved(rows, transposed)
    found = llama_state.read(path)
    assert found.form == form
    assert found.positions.tolist() == list(range(CELLS))
    np.testing.assert_array_equal(found.keys, rows["keys"])
    np.testing.assert_array_equal(found.values, rows["values"])


def test_token_ids_in_front_are_passed_over(tmp_path: Path) -> None:
    path, whole = tmp_path / "state", saved(drawn(), False)
    path.write_bytes(whole[:8] + struct.pack("<3I", 2, 7, 8) + whole[12:])
    np.testing.assert_array_equal(llama_state.read(path).keys, drawn()["keys"])


@pytest.mark.parametrize(
    ("place", "number", "what"),
    [
        (12, 2, "one sequence in one stream"),
        (24, 2, "one sequence in one stream"),
        (20 + 12 * CELLS, 7, "whether values are transposed"),
        (28 + 12 * CELLS + 4, 3, "a row has 3 bytes"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, place: int, number: int, what: str) -> None:
    path, whole = tmp_path / "state", saved(drawn(), False)
    path.write_bytes(whole[:place] + struct.pack("<I", number) + whole[place + 4 :])
    with pytest.raises(ValueError, match=what):
        llama_state.read(path)


def test_what_is_too_short_or_too_long_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "state", saved(drawn(), True)
    for wrong, what in ((whole[:-1], "ends too early"), (whole + b"\0", "something follows")):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=what):
            llama_state.read(path)
