"""`cache` shows what the user's cache keeps, by kind, and removes what it knows."""

from pathlib import Path

import pytest

from tests.cli.conftest import json_of, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "offload-decode"
    (folder / "gguf" / "0a").mkdir(parents=True)
    (folder / "gguf" / "0a" / "config.json").write_bytes(bytes(3_000_000))
    (folder / "served").mkdir()
    (folder / "served" / "running").write_text("now")
    return folder


def test_what_is_kept_is_shown_by_kind(folder: Path) -> None:
    told = json_of("cache")
    assert (told["folder"], told["cleared"]) == (str(folder), False)
    sizes = {one["kind"]: (one["files"], one["bytes"]) for one in told["kinds"]}
    assert sizes == {"gguf": (1, 3_000_000), "fingerprints": (0, 0), "verified": (0, 0), "fetched": (0, 0)}
    assert "1 files, 3.0 MB: configs and tokenizers of GGUF files" in run("cache").out
    assert (folder / "gguf" / "0a" / "config.json").exists()


def test_clearing_leaves_what_running_commands_have_there(folder: Path) -> None:
    assert run("cache", "--clear").out.startswith(f"{folder}: cleared")
    assert [path.name for path in folder.iterdir() if any(path.iterdir())] == ["served"]
    assert (folder / "served" / "running").exists()
    assert [one["files"] for one in json_of("cache")["kinds"]] == [0, 0, 0, 0]


def test_a_kind_on_another_disk_is_cleared_there(folder: Path, tmp_path: Path) -> None:
    (folder / "gguf").rename(tmp_path / "large")
    (folder / "gguf").symlink_to(tmp_path / "large")
    assert run("cache", "--clear").code == 0
    assert (folder / "gguf").is_symlink()
    assert not list((tmp_path / "large").iterdir())
