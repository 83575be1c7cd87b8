"""Distributions that are installed for a test: a folder of modules and a dist-info on the path."""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parent / "example"


def install(
    folder: Path,
    patch: pytest.MonkeyPatch,
    name: str,
    groups: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    version: str = "0.1",
) -> None:
    """A distribution with entry points `{group: {name: value}}`, without the `offload_decode.` of the groups,
    and modules with these sources. `folder` is on the path until the patch is undone.
    """
    lines = [
        line
        for group, points in groups.items()
        for line in (f"[offload_decode.{group}]", *(f"{point} = {value}" for point, value in points.items()))
    ]
    write(folder, name, "\n".join(lines), version)
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(source)
        patch.delitem(sys.modules, module, raising=False)
    patch.syspath_prepend(folder)


def write(folder: Path, name: str, entry_points: str, version: str = "0.1") -> None:
    """The metadata of a distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def install_example(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The example as pip would install it, without pip."""
    import tomllib

    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    groups = {group.removeprefix("offload_decode."): own for group, own in project["entry-points"].items()}
    install(folder, patch, project["name"], groups, version=project["version"])
    patch.syspath_prepend(EXAMPLE / "src")
