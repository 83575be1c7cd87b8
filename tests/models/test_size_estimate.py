"""An estimate is counted once, and remembered for as long as the config and the libraries are the same."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from offload_decode.common.errors import ModelError
from offload_decode.hf import user_cache
from offload_decode.models import size_estimate
from offload_decode.models.size_estimate import estimate_size
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(user_cache, "_known", {})
    tiny_model("gemma2").config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def counted(monkeypatch):
    """How often parameters were counted."""
    calls, count = [], size_estimate._counted
    monkeypatch.setattr(size_estimate, "_counted", lambda *asked: calls.append(asked) or count(*asked))
    return calls


def test_a_remembered_outline_is_the_counted_one(folder, counted):
    first = estimate_size(str(folder))
    user_cache._known.clear()
    assert estimate_size(str(folder)) == first
    assert len(counted) == 1
    folder.rename(folder.with_name("renamed"))
    renamed = str(folder.with_name("renamed"))
    assert estimate_size(renamed) == replace(first, model_id=renamed)
    assert len(counted) == 1


def test_another_scaling_of_rope_is_counted_anew(folder, counted):
    plain, scaled = estimate_size(str(folder)), estimate_size(str(folder), "dynamic:2")
    assert (plain.lengths.grows, scaled.lengths.grows) == (None, 4096)
    assert estimate_size(str(folder)) == plain
    assert len(counted) == 2


def test_another_config_is_counted_anew(folder, counted):
    first = estimate_size(str(folder))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 1000}))
    assert estimate_size(str(folder)).vocabulary == 1000 != first.vocabulary
    assert len(counted) == 2


@pytest.mark.parametrize(
    "kept", ["", "{}", "null", "[1]", '[[["full"], 4, 2, 16, null], "float32", 1.5]', "\u00e9", "[" * 5000]
)
def test_what_is_no_outline_is_counted_anew(folder, counted, tmp_path, kept):
    first = estimate_size(str(folder))
    for file in (path for path in (tmp_path / "cache").rglob("*") if path.is_file()):
        file.write_text(kept)
    user_cache._known.clear()
    assert estimate_size(str(folder)) == first
    assert len(counted) == 2


def test_a_broken_config_is_refused_however_often_it_is_read(folder):
    (folder / "config.json").write_text("{")
    for _ in range(2):
        with pytest.raises(ModelError):
            estimate_size(str(folder))


def test_a_plan_of_a_remembered_model_imports_no_transformers(tmp_path):
    code = (
        "import sys; from offload_decode.cli.main import app\n"
        "app(['plan', '--model', 'demo', '--tokens', '20K', '-o', 'index=flat'], standalone_mode=False)\n"
        "print(sorted({'transformers', 'torch._dynamo', 'zarr', 'faiss'} & sys.modules.keys()))"
    )
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    outlines_of = (
        "from offload_decode.common.fast_import import skip_slow_imports; skip_slow_imports()\n"
        "from offload_decode.models.size_estimate import estimate_size; estimate_size('demo')"
    )
    for command in (outlines_of, code):
        printed = subprocess.check_output([sys.executable, "-c", command], text=True, env=environment)
    assert printed.splitlines()[-1] == "[]"
