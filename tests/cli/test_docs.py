"""What the documentation says is so: real help, and commands that are understood."""

import re
import tomllib
from pathlib import Path

import pytest

from offload_decode.cli.eval import app as measures
from offload_decode.cli.main import app
from offload_decode.cli.reference import BEGIN, END, PAGE, reference, with_reference
from offload_decode.config import AUTO
from offload_decode.selectors import registry
from tests.documented import shell_lines, understood

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def test_the_block_is_replaced_and_nothing_else():
    renewed = with_reference(f"above\n{BEGIN}\nold\n{END}\nbelow")
    assert renewed == f"above\n{BEGIN}\n{reference()}\n{END}\nbelow"


def test_the_reference_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    for group, prefix in ((app, "offload-decode"), (measures, "offload-decode eval")):
        for command in group.registered_commands:
            called = f"{prefix} {command.name}"
            assert f"$ {called} --help\nUsage: {called} [OPTIONS]" in text
    assert with_reference(text) == text, "run `python -m offload_decode.cli.reference`"


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 130


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `offload-decode` in the shell blocks of a page."""
    lines = shell_lines(page.read_text(encoding="utf-8"))
    return [words[1:] for words in lines if words[0] == "offload-decode"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_the_documentation_are_understood(page):
    for arguments in commands(page):
        if "--install-completion" not in arguments:
            params = understood(arguments)
            named = params.get("selector") or []
            for selector in [named] if isinstance(named, str) else named:
                # docs/extending.md adds one and installs another
                assert selector in [AUTO, *registry.built_in(), "longest", "longest-keys"]


def test_an_unknown_option_in_the_documentation_is_found():
    assert len(commands(README)) >= 5
    with pytest.raises(Exception, match="No such option"):
        understood(["ask", "docs.kv", "Why?", "--no-such-option"])


def test_every_extra_is_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in extras["optional-dependencies"]:
        assert re.search(rf"^\|.*`{extra}`.*\|.*\|", page, flags=re.MULTILINE), extra


def test_cited_sections_exist():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    there = set(re.findall(r"^## (\d+)\.", text, flags=re.MULTILINE))
    rooms = ("indexes", "offload_decode", "prefill_jobs", "cli", "benchmarks")
    code = "".join(f.read_text(encoding="utf-8") for room in rooms for f in (ROOT / room).rglob("*.py"))
    cited = set(re.findall(r"docs/methods\.md\s+§(\d+)", code))
    assert cited
    assert cited <= there


def test_every_selector_is_explained():
    rules = (ROOT / "docs" / "selectors.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in rules for name in registry.built_in())
