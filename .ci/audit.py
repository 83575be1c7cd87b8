"""Known vulnerabilities of the installed packages: `make audit`.

pip-audit asks PyPI's advisories. Where it cannot be reached, a file is read that was fetched elsewhere: the
archive that OSV publishes of all advisories for PyPI (all.zip, a JSON file each; ossf.github.io/osv-schema).

Exits with 1 where something is found, with 2 where nothing could be asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

FOUND, NOT_ASKED = 1, 2


def main(arguments: list[str]) -> int:
    return by_file(Path(arguments[0])) if arguments else by_pip_audit()


def by_pip_audit() -> int:
    """PyPI's advisories. What PyPI could not be asked about, or does not know, counts as not audited."""
    options = ["--local", "--skip-editable", "--format=json", "--progress-spinner=off"]
    ran = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True)
    packages = json.loads(ran.stdout)["dependencies"] if ran.stdout.startswith("{") else []
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        last = (ran.stderr.strip().splitlines() or ["?"])[-1]
        reason = "PyPI knows none of the packages" if packages else last
        print(f"nothing was audited ({reason}): fetch OSV's advisories, and make audit ADVISORIES=all.zip")
        return NOT_ASKED
    found = [
        f"{package['name']} {package['version']}: {known['id']}, "
        f"fixed in {', '.join(known['fix_versions']) or 'none'}"
        for package in audited
        for known in package["vulns"]
    ]
    skipped = len(packages) - len(audited)
    print("\n".join(found) or f"nothing known of {len(audited)} packages ({skipped} not audited)")
    return FOUND if found else 0


def by_file(archive: Path) -> int:
    """The advisories of an archive against what is installed."""
    # The first of a name is imported: setuptools may bring a copy of its own, further back.
    installed = {canonicalize_name(one.name): one.version for one in [*distributions()][::-1] if one.name}
    try:
        read, found = 0, []
        for advisory in advisories(archive):
            read += 1
            found += [
                f"{name} {installed[name]}: {advisory['id']} {advisory.get('summary', '')}".rstrip()
                for name in {canonicalize_name(own["package"]["name"]) for own in affected(advisory)}
                if name in installed and concerns(advisory, name, installed[name])
            ]
    except (OSError, zipfile.BadZipFile, ValueError, KeyError) as error:
        print(f"nothing was audited: {archive} is no archive of OSV advisories ({error})")
        return NOT_ASKED
    if not read:
        print(f"nothing was audited: {archive} holds no advisories")
        return NOT_ASKED
    print("\n".join(sorted(found)) or f"nothing known of {len(installed)} packages in {read:,} advisories")
    return FOUND if found else 0


def advisories(archive: Path) -> Iterator[dict[str, Any]]:
    """Those that were not withdrawn."""
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if name.endswith(".json"):
                advisory = json.loads(files.read(name))
                if not advisory.get("withdrawn"):
                    yield advisory


def affected(advisory: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in advisory.get("affected", ()) if one["package"]["ecosystem"] == "PyPI"]


def concerns(advisory: dict[str, Any], name: str, version: str) -> bool:
    """Whether a version is listed as affected, or lies in a range: OSV's own rule."""
    return any(
        version in one.get("versions", ())
        or any(
            _within(version, span["events"]) for span in one.get("ranges", ()) if span["type"] == "ECOSYSTEM"
        )
        for one in affected(advisory)
        if canonicalize_name(one["package"]["name"]) == name
    )


def _within(version: str, events: list[dict[str, str]]) -> bool:
    number, inside = _number(version), False
    for event in sorted(events, key=lambda event: _number(next(iter(event.values())))):
        ((kind, at),) = event.items()
        if kind == "introduced":
            inside = inside or number >= _number(at)
        elif (kind == "fixed" and number >= _number(at)) or (
            kind == "last_affected" and number > _number(at)
        ):
            inside = inside and not _is_number(at)  # what cannot be compared is for a person to decide
    return inside


def _is_number(version: str) -> bool:
    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def _number(version: str) -> Version:
    try:
        return Version(version)
    except InvalidVersion:
        return Version("0")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
