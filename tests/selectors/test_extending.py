"""The selector that docs/extending.md shows is one: its code and its test are run as they stand there."""

import re
import sys
from pathlib import Path

import pytest

from offload_decode import selectors
from offload_decode.selectors import registry
from offload_decode.selectors.registry import declared
from offload_decode.testing.selector_contract import SelectorContract

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
HERE = PAGE.read_text(encoding="utf-8").partition("## A package of your own")[0]
FILE, TEST = re.findall(r"^```python\n(.*?)^```", HERE, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def shown(tmp_path, monkeypatch):
    """The page's file, as a module of the package."""
    (tmp_path / "longest.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(selectors, "__path__", [*selectors.__path__, str(tmp_path)])
    yield
    sys.modules.pop("offload_decode.selectors.longest", None)
    vars(selectors).pop("longest", None)


def _test_class():
    written: dict = {"__name__": "shown"}
    exec(compile(TEST, str(PAGE), "exec"), written)
    return written["TestLongest"]


class TestShown(_test_class()):
    """The page's own test, with all that it inherits."""


def test_it_is_found_and_described_without_being_registered():
    assert "longest" in registry.names()
    assert issubclass(TestShown, SelectorContract)
    assert declared("longest").options["skip"] == 0
    assert registry.get("longest").name == "longest"


def test_its_option_is_checked(store):
    with pytest.raises(Exception, match="0 or more"):
        TestShown().make(store, skip="-1")
    one, two = (
        TestShown().make(store, budget="1", skip=skip).select(1, TestShown().queries(store)).ids
        for skip in ("0", "1")
    )
    assert store.manifest.n_tokens == 1 or (one != two).all()
