"""The pytest plugin: `pytest -p offload_decode.testing.plugin --offload-decode-selector NAME` runs its suite.

It is loaded by `-p` alone. It imports nothing but pytest, adds three options, and does nothing until one of
them is given.
"""

from pathlib import Path

import pytest

SUITES = {
    "selector": ("SelectorContract", "name", "offload_decode.selectors.registry"),
    "index": ("IndexContract", "kind", "offload_decode.indexes.registry"),
    "method": ("MethodContract", "name", "offload_decode.prefill_jobs.methods.registry"),
}
"""What may be asked for: its suite, the attribute that says what the suite is of, and who knows the names."""

requested: list[tuple[str, str]] = []
"""What was asked for: of SUITES, and by which name."""

pytest.register_assert_rewrite(*(f"offload_decode.testing.{kind}_contract" for kind in SUITES))


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option a suite."""
    group = parser.getgroup("offload-decode", "offload-decode: the contracts of extensions")
    for kind in SUITES:
        text = f"run the suite of the {kind} that is installed under this name, and no other tests"
        group.addoption(f"--offload-decode-{kind}", action="append", default=[], metavar="NAME", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Collect the file of the suites that are asked for, in place of what would be collected."""
    requested[:] = [(kind, name) for kind in SUITES for name in config.getoption(f"--offload-decode-{kind}")]
    if not requested:
        return
    from importlib import import_module

    from offload_decode.common.errors import OffloadDecodeError

    for kind, name in requested:
        try:
            import_module(SUITES[kind][2]).get(name)
        except OffloadDecodeError as error:
            raise pytest.UsageError(str(error)) from None
    config.args[:] = [str(Path(__file__).with_name("named.py"))]
