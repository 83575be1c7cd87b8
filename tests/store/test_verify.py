from __future__ import annotations

import random
from pathlib import Path

import pytest

from offload_decode.common.errors import StoreDamaged, StoreError
from offload_decode.store import KVStore, verify_store
from tests.store.jobs import FULL, SLIDING, make_job, tree


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_job(600, layers=(FULL, SLIDING)).write(tmp_path / "store")


def test_every_single_bit_counts(store: Path) -> None:
    verify_store(store)
    files = sorted(tree(store))
    rng = random.Random(0)
    names = files + rng.choices(files, k=200)
    for name in names:
        data = (store / name).read_bytes()
        bit = rng.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (store / name).write_bytes(changed)
        with pytest.raises(StoreDamaged, match=name.rpartition("/")[0] + ".*" + name.rpartition("/")[2]):
            verify_store(store)
        (store / name).write_bytes(data)
    verify_store(store)


def test_every_bit_of_the_small_files(store: Path) -> None:
    for name in ("SHA256SUMS.sha256", "zarr.json"):
        data = (store / name).read_bytes()
        for bit in range(0, 8 * len(data), 7):  # of every byte one at least, and of each place in a byte
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            (store / name).write_bytes(changed)
            with pytest.raises(StoreError):
                KVStore.open(store)
        (store / name).write_bytes(data)
    KVStore.open(store)


def test_every_damaged_file_is_named(store: Path) -> None:
    keys, values, tokens = "layers/000/keys/c.1.0.0", "layers/000/values/c.0.0.0", "tokens/c.0"
    data = bytearray((store / keys).read_bytes())
    data[-1] ^= 128  # the padding counts too
    (store / keys).write_bytes(data)
    size = (store / values).stat().st_size
    (store / values).write_bytes(b"short")
    (store / tokens).unlink()
    (store / "notes.txt").write_text("mine")
    (store / "layers/000/empty").mkdir()
    (store / "layers/000/link").symlink_to(store)
    with pytest.raises(StoreDamaged) as caught:
        verify_store(store)
    for part in (
        f"{keys} (changed)",
        f"{values} (5 bytes instead of {size:,})",
        f"{tokens} (missing)",
        "notes.txt (not of this store)",
        "layers/000/empty (not of this store)",
        "layers/000/link (not of this store)",
    ):
        assert part in str(caught.value)
    assert str(caught.value).count("(") == 6


def test_a_link_in_place_of_a_file_is_found(store: Path, tmp_path: Path) -> None:
    file = store / "tokens/c.0"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreDamaged, match=r"tokens/c\.0"):
        verify_store(store)


def test_progress_ends_with_every_byte(store: Path) -> None:
    seen: list[tuple[int, int]] = []
    KVStore.open(store).verify(lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    sizes = {name: len(data) for name, data in tree(store).items()}
    expected = sum(size for name, size in sizes.items() if not name.startswith("SHA256SUMS"))
    assert seen[-1] == (expected, expected)
