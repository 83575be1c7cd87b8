"""The documentation site builds without a warning and without a network, and holds every page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")

ROOT = Path(__file__).parents[2]
DOCS = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").glob("*.md"))
FETCHING = {"script": "src", "img": "src", "iframe": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    without_network = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **without_network, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


def fetched(site: Path) -> Iterator[tuple[Path, str]]:
    """What a browser fetches for each page, as the page has it."""
    for page in site.rglob("*.html"):
        for tag in BeautifulSoup(page.read_text(encoding="utf-8"), "html.parser")(list(FETCHING)):
            address = tag.get(FETCHING[tag.name])
            if address and "canonical" not in (tag.get("rel") or []):
                yield page, address


@pytest.mark.parametrize("page", DOCS, ids=str)
def test_every_page_is_there(site, page):
    assert (site / page.with_suffix(".html")).is_file()


def test_no_page_fetches_from_a_network_and_all_that_it_fetches_is_there(site):
    seen = 0
    for page, address in fetched(site):
        parts = urlsplit(address)
        assert not parts.netloc, f"{page.name}: {address}"
        base = site if page.name == "404.html" else page.parent
        target = site / parts.path.lstrip("/") if parts.path.startswith("/") else base / unquote(parts.path)
        assert target.exists(), f"{page.name}: {address}"
        seen += 1
    assert seen > 100
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?https?:", styles)


def test_docstrings_of_what_people_import_are_on_the_page(site):
    text = (site / "docs" / "library.html").read_text(encoding="utf-8")
    named = re.findall(
        r"^::: (\S+)", (ROOT / "docs" / "library.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert named
    assert ":::" not in re.sub(r"<code>:::</code>", "", text)
    for name in named:
        assert f'id="{name}"' in text, name
    assert "Open a store for questions" in text


@pytest.mark.parametrize("page", [Path("README.md"), *DOCS], ids=str)
def test_a_list_stands_after_an_empty_line(page):
    """GitHub needs none; the site would run the list into the paragraph."""
    before, in_list = "", False
    text = re.sub(r"^( *)```.*?^\1```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    for line in text.splitlines():
        item = re.match(r"(?:[-*]|\d+\.) ", line)
        assert in_list or not item or not before or before.startswith("#"), f"{page}: {line}"
        in_list = bool(item) or (in_list and (not line or line.startswith(" ")))
        before = line
