"""What is installed, by the metadata of the packages: nothing heavy is imported."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

PROJECT = "offload-decode"
LIBRARIES = ("torch", "transformers", "numpy", "numba", "zarr")
OPTIONAL = (
    "hnswlib",
    "triton",
    "matplotlib",
    "pypdf",
    "python-docx",
    "obstore",
    "ray",
    "bitsandbytes",
    "accelerate",
    "compressed-tensors",
    "gguf",
)
# All of these provide the module `faiss`: one may be installed.
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11")
ABSENT = "not installed"

_DRIVER = Path("/proc/driver/nvidia/version")


def version_of(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def faiss_packages() -> list[tuple[str, str]]:
    """Every installed package that provides Faiss, with its version."""
    return [(name, found) for name in FAISS if (found := version_of(name))]


def nvidia_driver() -> str | None:
    """The version of the NVIDIA driver; None where there is none."""
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit()), "of an unknown version")


def versions(optional: bool = True) -> list[tuple[str, str]]:
    """This project, Python and the libraries with their versions; then the `optional` ones and the GPU."""
    found = [
        (PROJECT, version(PROJECT)),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        *((name, version_of(name) or ABSENT) for name in LIBRARIES),
    ]
    if optional:
        driver = nvidia_driver()
        found += faiss_packages() or [("faiss", ABSENT)]
        found += [(name, version_of(name) or ABSENT) for name in OPTIONAL]
        found.append(("gpu", f"NVIDIA driver {driver}" if driver else "no NVIDIA driver"))
        found += [("extension", brought) for brought in extensions()]
    return found


def extensions() -> list[str]:
    """What every other distribution brings, one line each; none of it is imported."""
    from offload_decode.indexes.extensions import GROUPS, found

    brought: dict[str, list[str]] = {}
    for group, what in GROUPS.items():
        for one in found()[0]:
            if one.group == group:
                brought.setdefault(one.by, []).append(f"{what} {one.name}")
    return [f"{by}: {', '.join(names)}" for by, names in sorted(brought.items())]


def unmet() -> list[str]:
    """What the project requires and what is installed do not agree on, one sentence each."""
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, requires(PROJECT) or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{requirement} is needed, and {found or 'none'} is installed")
    return problems
