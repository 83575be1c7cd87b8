"""`offload-decode doctor`: check this installation, by the metadata of packages and a small test run."""

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NamedTuple

import typer

from offload_decode.cli import output
from offload_decode.cli.errors import FAILURE, sentence
from offload_decode.cli.options import Json
from offload_decode.common.errors import ConfigError
from offload_decode.common.memory import total_memory

PROJECT = "offload-decode"
LIBRARIES = ("torch", "transformers", "numpy", "numba", "zarr", "accelerate", "gguf")
OPTIONAL = (
    *("hnswlib", "triton", "matplotlib", "pypdfium2", "openpyxl", "obstore", "ray"),
    *("bitsandbytes", "compressed-tensors"),
)
# All of these provide the module `faiss`: at most one may be installed.
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cuvs", "faiss-gpu-cu12", "faiss-gpu-cu11")
ABSENT = "not installed"

_DRIVER = Path("/proc/driver/nvidia/version")


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def faiss_packages() -> list[tuple[str, str]]:
    return [(name, found) for name in FAISS if (found := version_of(name))]


def nvidia_driver() -> str | None:
    try:
        words = _DRIVER.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit()), "of an unknown version")


def versions(optional: bool = True) -> list[tuple[str, str]]:
    """Versions of this project, Python and the libraries; then `optional` libraries, GPU and extensions."""
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
        found += [("extension", brought) for brought in installed_extensions()]
    return found


def installed_extensions() -> list[str]:
    """The extensions of each other distribution, one line each; nothing is imported."""
    from offload_decode.common.plugins import GROUPS, found

    brought: dict[str, list[str]] = {}
    for group, what in GROUPS.items():
        for one in (one for one in found()[0] if one.group == group):
            brought.setdefault(one.by, []).append(f"{what} {one.name}")
    return [f"{by}: {', '.join(names)}" for by, names in sorted(brought.items())]


def unmet() -> list[str]:
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, requires(PROJECT) or []):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            problems.append(f"{requirement} is needed, and {found or 'none'} is installed")
    return problems


_MARKS = {"ok": "✓", "absent": "–", "broken": "✗"}
_FACT, _CODE = "The secret code for the brisk lantern is: 52718.", "52718"
_QUESTION = "What is the secret code for the brisk lantern?"


class Check(NamedTuple):
    """A check's name, state (`ok`, `absent` or `broken`) and finding, and whether it is needed."""

    name: str
    state: str
    found: str
    needed: bool


class Absent(ConfigError):
    """Something optional is not installed."""


def doctor(as_json: Json = False) -> None:
    """Check this machine and this installation.

    Checks versions, Faiss and hnswlib, the processor, memory, disk and GPU, and the caches, then prefills and
    asks a small store. Exit code 1 means that something necessary does not work.
    """
    began = time.monotonic()
    checks = []
    width = max(len(name) for name, _, _ in _CHECKS)
    for name, needed, look in _CHECKS:
        checks.append(check := _checked(name, needed, look))
        if not as_json:
            output.answer(f"{_MARKS[check.state]} {check.name:<{width}}  {check.found}")
    broken = [check.name for check in checks if check.needed and check.state != "ok"]
    seconds = time.monotonic() - began
    if as_json:
        output.answer_json({"ok": not broken, "seconds": seconds, "checks": checks})
    if broken:
        output.note(f"error: {', '.join(broken)}: fix this first, then run doctor again")
        raise typer.Exit(FAILURE)
    if not as_json:
        output.answer(f"\nEverything necessary works ({output.duration(seconds)}).")


def _checked(name: str, needed: bool, look: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", look(), needed)
    except Absent as absent:
        return Check(name, "absent", str(absent), needed)
    except Exception as error:  # noqa: BLE001  # any failure is the finding
        return Check(name, "broken", sentence(error), needed)


def _requirements() -> str:
    if problems := unmet():
        raise ConfigError("; ".join(problems))
    return "all met"


def _system() -> str:
    if sys.platform not in ("linux", "darwin"):
        raise ConfigError(f"{platform.system()}: stores can be mapped only on Linux and macOS")
    return platform.platform()


def _command() -> str:
    if found := shutil.which(PROJECT):
        return found
    ways = f"call {sys.argv[0]}, or install it by `uv tool install .` or `pipx install .`"
    raise Absent(f"offload-decode is not on the PATH: {ways}")


def _processor() -> str:
    from offload_decode.common.rows.compiled import converted, half_to_single
    from offload_decode.indexes.clusters.dot4 import forms

    names = {"avx512vnni": "AVX-512 VNNI", "avx2": "AVX2", "vectors": "plain vector operations"}
    halves = "by instruction (F16C)" if half_to_single is converted else "in steps"
    return f"{os.cpu_count()} cores; 4-bit scans by {names[next(iter(forms()))]}, half precision {halves}"


def _writable(folder: Path) -> Path:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise ConfigError(f"{existing} cannot be written")
    return folder


def _cache() -> str:
    from offload_decode.prefill_jobs.destinations import default_staging

    return f"{_writable(default_staging())} can be written"


def _compiler() -> str:
    from offload_decode.common.rows.loops import dot_row

    if not hasattr(dot_row, "stats"):  # it is not compiled
        raise ConfigError("NUMBA_DISABLE_JIT is set, and the search needs compiled loops: unset it")
    return f"compiled loops are kept in {_writable(Path(str(dot_row.stats.cache_path)))}"


def _faiss() -> str:
    from offload_decode.indexes import registry

    packages = faiss_packages()
    if not packages:
        raise Absent(
            "not installed: pip install 'offload-decode[cpu]' for the kinds faiss-ivf and faiss-hnsw"
        )
    if len(packages) > 1:
        both = " and ".join(name for name, _ in packages)
        raise ConfigError(f"{both} are both installed and provide the same module: uninstall one")
    (name, version), library = packages[0], registry.faiss()
    return f"{name} {version}, built for {library.get_compile_options().strip()}"


def _hnswlib() -> str:
    from offload_decode.indexes import registry

    version = version_of("hnswlib")
    if version is None:
        raise Absent("not installed: pip install 'offload-decode[hnsw]' gives the kind hnswlib")
    registry.hnswlib()
    return version


def _extensions() -> str:
    from offload_decode.common import plugins
    from offload_decode.common.errors import ExtensionError
    from offload_decode.indexes import registry as kinds
    from offload_decode.prefill_jobs.methods import registry as methods
    from offload_decode.selectors import registry as selectors

    problems = list(plugins.found()[1])
    for group in (selectors.EXTENSIONS, kinds.EXTENSIONS, methods.EXTENSIONS):
        for name in sorted({one.name for one in group.installed()}):
            try:
                group.get(name)
            except ExtensionError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("; ".join(problems))
    if not (brought := installed_extensions()):
        raise Absent("none")
    return "; ".join(brought)


def _gpu() -> str:
    import torch

    driver = nvidia_driver()
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        return ", ".join(f"{device.name} ({output.size(device.total_memory)})" for device in devices)
    if driver is None:
        raise Absent("none; the CPU does everything")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
    raise ConfigError(f"there is an NVIDIA driver ({driver}), but torch, built for {built}, finds no device")


def _self_test() -> str:
    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.engine.engine import Engine
    from offload_decode.models.loading import load
    from offload_decode.prefill_jobs.corpus import TextDocument
    from offload_decode.prefill_jobs.indexing import build_indexes
    from offload_decode.prefill_jobs.job import prefill_texts

    announce_compiling()
    loaded = load("demo", "cpu")
    began = time.monotonic()
    filler = " ".join(f"Line {n} says nothing of interest." for n in range(40))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        prefill_texts(loaded, [TextDocument("text", f"{filler}\n{_FACT}\n{filler}")], store)
        build_indexes(store, "clusters")
        engine = Engine.open(store, loaded, options={"budget": "64"})
        answer = engine.answer(_QUESTION, 40).text
        length = engine.prefix.length
    if _CODE not in answer:
        raise ConfigError(f"a fact was not found in a store of {length:,} tokens: the answer was {answer!r}")
    return f"a fact was found in a store of {length:,} tokens, in {output.duration(time.monotonic() - began)}"


_CHECKS: list[tuple[str, bool, Callable[[], str]]] = [
    ("versions", True, lambda: ", ".join(f"{name} {version}" for name, version in versions(optional=False))),
    ("requirements", True, _requirements),
    ("system", True, _system),
    ("command", False, _command),
    ("processor", True, _processor),
    ("memory", True, lambda: output.size(total_memory())),
    ("disk", False, lambda: f"{output.size(shutil.disk_usage(Path.cwd()).free)} free in {Path.cwd()}"),
    ("temporary files", True, lambda: f"{_writable(Path(tempfile.gettempdir()))} can be written"),
    ("cache", False, _cache),
    ("compiler", True, _compiler),
    ("faiss", False, _faiss),
    ("hnswlib", False, _hnswlib),
    ("extensions", False, _extensions),
    ("gpu", False, _gpu),
    ("self-test", True, _self_test),
]
"""Each check: its name, whether it is needed, and a function that returns its finding, or raises."""
