"""The example package: what docs/extending.md shows of it, and all of it as pip installs it."""

import inspect
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from offload_decode.testing import MethodContract, SelectorContract, plugin
from tests.extensions.installing import EXAMPLE, install_example

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "extending.md"
PLUGIN = plugin.__name__


def test_the_page_is_short_and_shows_what_the_package_holds() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## A package of your own")[2]
    assert len(text.splitlines()) < 100
    shown = re.findall(r"^```(?:python|toml)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    files = [EXAMPLE / "pyproject.toml", *EXAMPLE.rglob("*.py")]
    held = [file.read_text(encoding="utf-8") for file in files]
    assert len(shown) == 3
    for block in shown:
        assert any(block in text for text in held), block


def test_the_plugin_is_opt_in_and_imports_nothing_but_pytest() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "pytest11" not in project["entry-points"]
    code = (
        f"import pytest, sys; before = {{*sys.modules}}; import {PLUGIN}\n"
        "print(*sorted({*sys.modules} - before))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["offload_decode", "offload_decode.testing", PLUGIN]


def python(folder: Path, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of Python in that folder, with that path."""
    command, env = [sys.executable, *arguments], {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def by_an_author(folder: Path, path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of pytest by an author, in an empty folder."""
    folder.mkdir(exist_ok=True)
    return python(folder, path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, *arguments)


def test_the_plugin_collects_the_suites_that_are_asked_for_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Config:
        args: ClassVar = ["here"]

        def getoption(self, option: str) -> list[str]:
            return given.get(option, [])

    given: dict[str, list[str]] = {}
    config: Any = Config()
    plugin.pytest_configure(config)
    assert config.args == ["here"], "whoever asks for nothing is given nothing"
    install_example(tmp_path, monkeypatch)
    given |= {"--offload-decode-selector": ["longest-keys", "topk"], "--offload-decode-method": ["evenly"]}
    monkeypatch.setattr(plugin, "requested", [])
    plugin.pytest_configure(config)
    (file,) = config.args
    collected = [own for own in runpy.run_path(file).values() if inspect.isclass(own)]
    assert [(own.__base__, own.name) for own in collected] == [
        (SelectorContract, "longest-keys"),
        (SelectorContract, "topk"),
        (MethodContract, "evenly"),
    ]
    given["--offload-decode-index"] = ["unsorted-keys"]
    with pytest.raises(pytest.UsageError, match="no index kind 'unsorted-keys'; the kinds are clusters"):
        plugin.pytest_configure(config)


@pytest.mark.slow
def test_the_plugin_runs_the_suite_of_what_is_installed_and_refuses_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_example(tmp_path / "site", monkeypatch)
    path = os.pathsep.join([str(EXAMPLE / "src"), str(tmp_path / "site"), str(ROOT)])
    ran = by_an_author(
        tmp_path / "empty", path, "--offload-decode-selector", "longest-keys", "-k", "says_what"
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "1 passed" in ran.stdout
    ran = by_an_author(tmp_path / "empty", path, "--offload-decode-index", "unsorted-keys")
    assert (ran.returncode, ran.stdout) == (4, "")
    assert "There is no index kind 'unsorted-keys'; the kinds are clusters" in ran.stderr
    (tmp_path / "empty" / "test_mine.py").write_text("def test_mine(): pass\n")
    assert "1 passed" in by_an_author(tmp_path / "empty", path).stdout, (
        "whoever asks for nothing is given nothing"
    )


@pytest.mark.slow
def test_it_is_installed_by_pip_passes_its_tests_and_is_used(tmp_path: Path) -> None:
    source, site = shutil.copytree(EXAMPLE, tmp_path / "source"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True)
    path = os.pathsep.join([str(site), str(ROOT)])
    ran = by_an_author(tmp_path / "empty", path, str(source / "tests"))
    assert ran.returncode == 0, ran.stdout
    names = {"selector": "longest-keys", "index": "sorted-keys", "method": "evenly"}
    suites = [f"--offload-decode-{kind}={name}" for kind, name in names.items()]
    ran = by_an_author(tmp_path / "empty", path, *suites)
    assert ran.returncode == 0, ran.stdout

    def run(*arguments: str) -> str:
        ran = python(tmp_path, path, "-c", "from offload_decode.cli.main import main; main()", *arguments)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    (tmp_path / "text.txt").write_text("The lantern is brisk. " * 40)
    run("prefill", "text.txt", "--model", "demo", "--out", "text.kv", "--method", "evenly", "-o", "chunk=64")
    run("index", "text.kv", "--kind", "sorted-keys")
    ask = ("ask", "text.kv", "Which lantern?", "--max-new-tokens", "4")
    assert run(*ask, "-s", "longest-keys", "-o", "budget=50").strip()
    assert run(*ask, "-o", "index=sorted-keys", "-o", "budget=50") == run(*ask, "-o", "budget=50")
    assert "key-lengths 0.1.0: selector longest-keys, index kind sorted-keys" in run("--version")
