"""Inner products of rows with queries, the same at every place among them and for every processor."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from numba.core import config

import offload_decode
from offload_decode.common.rows import compiled, scan
from offload_decode.common.rows.scan import LANES, QUERIES, ROWS, SUMS, padded, products, put
from offload_decode.indexes.clusters import dot4


@njit
def all_of(rows, queries, scores):
    sums = np.empty(SUMS, np.float32)
    for first in range(0, len(queries), QUERIES):
        products(rows, queries, first, sums)
        put(sums, scores, first, 0, len(rows))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("groups", [1, 2, 9])
def test_the_products_of_every_row_and_query(groups):
    rows, queries = normal(ROWS, groups * LANES), normal(3 * QUERIES, groups * LANES, seed=1)
    scores = np.full((len(queries), ROWS), np.nan, np.float32)
    all_of(rows, queries, scores)
    np.testing.assert_allclose(scores, queries @ rows.T, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dim", [1, LANES - 1, LANES, 3 * LANES + 2])
@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 2 * ROWS + 1])
@pytest.mark.parametrize("queries", [1, QUERIES, QUERIES + 1])
def test_scores_are_written_where_there_are_rows_and_queries_and_nowhere_else(queries, rows, dim):
    own, given = normal(rows, dim), normal(queries, dim, seed=1)
    scores = np.full((queries + 1, rows + 1), np.nan, np.float32)
    scan.score_rows(scan.bits(own), scan.FP32, given, scores[:queries])
    np.testing.assert_allclose(scores[:queries, :rows], given @ own.T, atol=1e-4, rtol=1e-5)
    assert np.isnan(scores[queries:]).all()
    assert np.isnan(scores[:, rows:]).all()


def test_a_product_is_the_same_wherever_its_row_and_its_query_lie():
    row, query = normal(1, 100), normal(1, 100, seed=1)
    rows, queries = row.repeat(2 * ROWS + 3, 0), query.repeat(2 * QUERIES + 3, 0)
    scores = np.empty((len(queries), len(rows)), np.float32)
    scan.score_rows(scan.bits(rows), scan.FP32, queries, scores)
    assert (scores == scores[0, 0]).all()


def test_nan_and_infinity_keep_their_meaning():
    rows, query = normal(3, 20), np.ones((1, 20), np.float32)
    rows[0, 3], rows[1, 19] = np.nan, np.inf
    scores = np.empty((1, 3), np.float32)
    scan.score_rows(scan.bits(rows), scan.FP32, query, scores)
    assert np.isnan(scores[0, 0])
    assert scores[0, 1] == np.inf
    assert np.isfinite(scores[0, 2])


def test_padding_is_of_zeros():
    wide = padded(normal(QUERIES + 1, LANES + 1))
    assert wide.shape == (2 * QUERIES, 2 * LANES)
    assert not wide[QUERIES + 1 :].any()
    assert not wide[:, LANES + 1 :].any()


OTHERS = """
import numpy as np
from offload_decode.common.rows import scan
rng = np.random.default_rng(0)
for dim in (1, 7, 64, 130):
    rows, queries = rng.standard_normal((9, dim)).astype("f"), rng.standard_normal((5, dim)).astype("f")
    scores = np.empty((5, 9), "f")
    scan.score_rows(scan.bits(rows), scan.layout(rows), queries, scores)
    np.testing.assert_allclose(scores, queries @ rows.T, atol=1e-4)
print(scan.LANES, scan.ROWS)
"""


def run_compiled(code: str, cache: Path, **settings: str) -> str:
    """What the code prints in a process with these settings of numba and no cache of compiled code."""
    kept = {name: value for name, value in os.environ.items() if name != "NUMBA_CPU_FEATURES"}
    env = {**kept, "NUMBA_CACHE_DIR": str(cache), **settings}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("features", "lanes"), [pytest.param("+avx,+avx2,+f16c,+fma", 8, marks=pytest.mark.slow), ("", 4)]
)
def test_processors_with_shorter_vectors_score_alike(features: str, lanes: int, tmp_path: Path) -> None:
    if not {name[1:] for name in features.split(",") if name} <= compiled.features():
        pytest.skip("this processor has no such vectors")
    name = "haswell" if features else "generic"
    found = run_compiled(OTHERS, tmp_path, NUMBA_CPU_FEATURES=features, NUMBA_CPU_NAME=name)
    assert found.split()[0] == str(lanes)


GENERIC = """
import numpy as np
from numba import njit
from offload_decode.indexes.clusters import dot4
from offload_decode.common.rows.compiled import half_to_single
print(list(dot4.forms()), njit(lambda bits: half_to_single(bits))(np.uint16(0x3C01)))
"""


@pytest.mark.parametrize(
    ("named", "found"),
    [("", set()), ("+avx2,-avx512vnni", {"avx2"}), ("+f16c,+avx512vnni", {"f16c", "avx512vnni"})],
)
def test_numba_settings_decide_the_instructions(
    named: str, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "CPU_FEATURES", named, raising=False)
    assert compiled.features() == found
    assert set(dot4.forms()) == found & {"avx2", "avx512vnni"} | {"vectors"}
    assert compiled.converts() or "f16c" not in found


def test_code_for_any_processor_runs(tmp_path: Path) -> None:
    """LLVM ends the process where it finds no instruction for what is asked of it."""
    assert run_compiled(GENERIC, tmp_path, NUMBA_CPU_NAME="generic") == "['vectors'] 1.0009765625"


def test_where_nothing_can_be_kept_loops_are_compiled_in_a_folder_of_the_process(tmp_path: Path) -> None:
    """Numba itself refuses: beside the sources and in the user's cache stand files, and no folders."""
    home, copy, room = Path(offload_decode.__file__).parent, tmp_path / "offload_decode", tmp_path / "room"
    shutil.copytree(home / "common", copy / "common", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(home / "__init__.py", copy)
    (copy / "common/rows/__pycache__").touch()
    room.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    env |= {"PYTHONPATH": str(tmp_path), "XDG_CACHE_HOME": str(copy / "__init__.py"), "HOME": "/dev/null"}
    code = "from offload_decode.common.rows import TEMPORARY, top_k\nprint(TEMPORARY.name)"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=env | {"TMPDIR": str(room)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.startswith(str(room)), ran.stderr
    assert not list(room.iterdir())
