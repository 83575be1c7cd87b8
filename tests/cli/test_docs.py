"""What the documentation says is so: real help, commands that are understood, links that lead somewhere."""

import re
import tomllib
from pathlib import Path

import pytest

from offload_decode.cli.eval import app as measures
from offload_decode.cli.main import app
from offload_decode.cli.reference import BEGIN, END, PAGE, reference, with_reference
from offload_decode.selectors import registry
from tests.documented import shell_lines, understood

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def test_the_reference_holds_every_commands_help():
    shown = reference()
    for command in app.registered_commands:
        assert (
            f"$ offload-decode {command.name} --help\nUsage: offload-decode {command.name} [OPTIONS]" in shown
        )


def test_the_block_is_replaced_and_nothing_else():
    renewed = with_reference(f"above\n{BEGIN}\nold\n{END}\nbelow")
    assert renewed == f"above\n{BEGIN}\n{reference()}\n{END}\nbelow"


def test_the_reference_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    for command in measures.registered_commands:
        called = f"offload-decode eval {command.name}"
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
                assert selector in [*registry.built_in(), "longest", "longest-keys"]


def test_a_command_that_is_not_there_would_be_found():
    assert len(commands(README)) >= 5
    with pytest.raises(Exception, match="No such option"):
        understood(["ask", "docs.kv", "Why?", "--no-such-option"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_existing_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name}: {target}"
        if heading:
            assert heading in headings(linked), f"{page.name}: {target}"


def test_every_extra_is_explained():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    for extra in extras["optional-dependencies"]:
        assert re.search(rf"^\|.*`{extra}`.*\|.*\|", page, flags=re.MULTILINE), extra


def headings(page: Path) -> set[str]:
    """The anchors of a Markdown page, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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
