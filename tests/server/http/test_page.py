"""The page, in Chromium where it is installed: people ask by mouse, by keyboard and by screen reader."""

import re
import shutil
from collections.abc import Callable
from importlib.resources import files
from urllib.parse import urlsplit

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect, sync_playwright

from offload_decode.server.requests import Loading, TimedOut, WrongField
from tests.server.fakes import STORED

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
ASKED = "Who wrote it? Say so. "
PHONE = {"width": 360, "height": 740}

expect.set_options(timeout=20_000)


def test_the_page_needs_nothing_from_elsewhere(url):
    page = httpx.get(f"{url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "unsafe" not in page.headers["content-security-policy"]
    named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', page.text))
    assert named == {"app.js", "style.css", "icon.svg"}
    for file in files("offload_decode.server.http.page").iterdir():
        if file.name.endswith((".html", ".css", ".js", ".svg")):
            text = file.read_text()
            assert httpx.get(f"{url}/page/{file.name}").text == text
            assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|insertAdjacentHTML", text)
    for name in ("__init__.py", "..%2Fapp.py", "none.js"):
        assert httpx.get(f"{url}/page/{name}").status_code == 404


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser):
    """Opens an address in a profile of its own; what goes wrong in the page fails the test."""
    context = browser.new_context()
    faults: list[str] = []
    hosts: set[str] = set()

    def open_page(address: str, first: Callable[[Page], object] = lambda page: None) -> Page:
        page = context.new_page()
        first(page)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "console", lambda said: faults.append(said.text) if "Failed to load" not in said.text else None
        )
        page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        page.goto(address)
        return page

    yield open_page
    context.close()
    # A browser's own note of a status that is an error is none of the page's.
    assert not [fault for fault in faults if not fault.startswith("Failed to load resource")]
    assert len(hosts) <= 1


@pytest.fixture
def page(opened, url):
    page = opened(url)
    expect(page.get_by_label("Corpus")).to_have_value("book")
    return page


def _ask(page: Page, question: str) -> Locator:
    """Ask, and wait until it is answered: the turn."""
    page.get_by_role("textbox", name="Question").fill(question)
    page.keyboard.press("Enter")
    turn = page.get_by_role("listitem").filter(has=page.get_by_role("heading", name=question.strip())).last
    expect(page.get_by_role("button", name="Ask")).to_be_visible()
    expect(turn.locator(".figures")).to_be_visible()
    return turn


def test_an_answer_says_what_it_attended_to_and_what_it_cost(page, service):
    expect(page.locator("#about")).to_have_text("1 document · 100 tokens · answered by tiny")
    service.pace_s = 0.005
    turn = _ask(page, ASKED)
    expect(turn.locator(".text")).to_have_text(ASKED.strip())
    expect(turn.locator(".documents summary")).to_have_text(re.compile(r"minutes\.txt\s*75%"))
    expect(turn.get_by_role("mark")).to_have_text("Ada wrote it.")
    figures = turn.locator(".figures")
    for figure in ("tokens a second", "to the first token", "1.00 kB"):
        expect(figures).to_contain_text(figure)
    expect(figures).to_contain_text(f"{STORED} of {STORED}")
    assert service.tickets[0].asked.cite


def test_what_to_know_of_an_answer_of_several_documents_is_shown(page, service):
    expect(_ask(page, ASKED).locator(".warnings")).to_be_hidden()
    service.notes = ("Joined by mixture from 2 documents.", "b.txt would say otherwise: “Eve…” (50%).")
    expect(_ask(page, ASKED).locator(".warnings li")).to_have_text(list(service.notes))


def test_an_answer_is_checked_where_that_is_asked_for(page, service):
    page.get_by_text("Settings").click()
    page.get_by_label("Check").check()
    expect(_ask(page, ASKED).locator(".figures")).to_contain_text("2 of 3")
    assert service.tickets[0].asked.check


def test_an_address_opens_the_corpus_that_it_names(opened, url):
    page = opened(f"{url}/#tiny")
    expect(page.get_by_label("Corpus")).to_have_value("tiny")
    page.evaluate("location.hash = '#book'")
    expect(page.get_by_label("Corpus")).to_have_value("book")
    for unknown in ("none", "%ff"):
        expect(opened(f"{url}/#{unknown}").get_by_label("Corpus")).to_have_value("book")


def test_an_answer_that_was_cut_by_its_length_is_marked(page):
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("3")
    turn = _ask(page, ASKED)
    expect(turn).to_have_class(re.compile(r"\bcut\b"))
    expect(turn.locator(".state")).to_contain_text("cut off at its most tokens")
    mark = turn.locator(".text").evaluate("text => getComputedStyle(text, '::after').content")
    assert "■" in mark


def test_a_conversation_goes_on_until_a_new_one_begins(page, service):
    _ask(page, "one")
    _ask(page, "two")
    told = [(each["role"], each["content"]) for each in service.tickets[1].asked.messages]
    assert told == [("user", "one"), ("assistant", "one"), ("user", "two")]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    _ask(page, "three")
    assert len(service.tickets[2].asked.messages) == 1


def test_a_model_without_a_corpus_cites_nothing(page, service):
    page.get_by_label("Corpus").select_option("tiny")
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("3")
    page.get_by_label("Budget").fill("2%")
    page.get_by_label("Temperature").fill("0.5")
    turn = _ask(page, "four")
    expect(turn.locator(".text")).to_have_text("fou")
    expect(turn).to_contain_text("cut off")
    expect(turn.locator(".evidence")).to_be_hidden()
    page.get_by_label("Corpus").select_option("book")
    _ask(page, "five")
    bare, stored = (ticket.asked for ticket in service.tickets)
    assert (bare.model, bare.options, bare.generation.temperature) == ("tiny", {}, 0.5)
    assert (stored.model, stored.options) == ("book", {"budget": "2%"})


@pytest.mark.parametrize("by", ["button", "key"])
def test_an_answer_is_stopped(page, service, by):
    service.pace_s = 0.1
    page.get_by_role("textbox", name="Question").fill("on and on " * 40)
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_contain_text("on")
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(page.locator(".state")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Ask")).to_be_visible()
    assert service.tickets[0].cancelled.wait(10)


def test_the_keyboard_is_enough(page):
    question = page.get_by_role("textbox", name="Question")
    expect(question).to_be_focused()
    page.keyboard.type("a line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and one more")
    page.keyboard.press("Enter")
    expect(page.locator(".text")).to_have_text("a line and one more")
    expect(question).to_be_focused()
    passage = page.get_by_role("mark")
    expect(passage).to_be_visible()
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".documents summary")).to_be_focused()
    page.keyboard.press("Enter")
    expect(passage).to_be_hidden()
    for name in ("New conversation", "Corpus", "Skip to the question"):
        page.keyboard.press("Shift+Tab")
        expect(page.locator(":focus")).to_have_accessible_name(name)
    page.keyboard.press("Enter")
    expect(question).to_be_focused()


def test_a_screen_reader_is_told_sentence_by_sentence(page):
    _ask(page, ASKED)
    said = page.get_by_role("log").get_by_role("paragraph")
    expect(said).to_have_text(
        [
            "The question is asked.",
            "Who wrote it?",
            "Say so.",
            "The answer is complete. It attended most to minutes.txt.",
        ]
    )


def test_what_people_and_models_write_is_text(page):
    written = "<img src=x onerror=alert(1)> <b>bold</b>"
    turn = _ask(page, written)
    expect(turn.locator(".text")).to_have_text(written)
    expect(page.locator("main img, main b")).to_have_count(0)


def test_errors_are_sentences_and_the_question_is_not_lost(page, service):
    service.fault = WrongField("the budget is no number", "options")
    question = page.get_by_role("textbox", name="Question")
    question.fill("one")
    page.keyboard.press("Enter")
    expect(page.locator(".state")).to_have_text("The budget is no number.")
    expect(question).to_have_value("one")
    service.fault, service.late = None, TimedOut("the deadline has passed")
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last).to_contain_text("The deadline has passed.")


def test_a_server_that_is_loading_is_asked_again(page, service):
    service.fault = Loading("tiny is being loaded", retry_s=1)
    page.get_by_role("textbox", name="Question").fill("one")
    page.keyboard.press("Enter")
    expect(page.locator(".state")).to_have_text("Tiny is being loaded. Asking again in 1 s …")
    service.fault = None
    expect(page.locator(".text")).to_have_text("one")


def test_stores_that_are_being_made_are_shown(opened, url):
    job = {"id": "a", "kind": "prefill", "store": "minutes", "status": "running", "error": None}
    job["progress"] = {"stage": "prefill", "done": 30, "total": 120, "seconds_left": 200}

    def begun(page: Page) -> None:
        page.route("**/v1/jobs", lambda route: route.fulfill(json={"data": [job]}))

    page = opened(url, begun)
    expect(page.locator("#jobs")).to_have_text("Making minutes · prefill 25% · 3 min left")
    expect(page.get_by_role("progressbar")).to_have_attribute("value", "30")
    job.update(status="failed", error={"message": "There is no room on the disk."})
    expect(page.get_by_role("alert")).to_have_text("There is no room on the disk.")
    expect(page.locator("#jobs")).to_be_hidden()


def test_a_key_is_asked_for(opened, serve):
    page = opened(serve(keys=("secret",)))
    dialog = page.get_by_role("dialog", name="This server asks for a key")
    dialog.get_by_label("Key").fill("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Give the server's key")
    dialog.get_by_label("Key").fill("secret")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.get_by_label("Corpus")).to_have_value("book")
    expect(_ask(page, "one").locator(".text")).to_have_text("one")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(page, scheme):
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    _ask(page, "one")
    _ask(page, "two")
    page.get_by_text("Settings").click()
    for size in ({"width": 1280, "height": 800}, PHONE):
        page.set_viewport_size(size)
        found = Axe().run(page)
        assert not found.violations_count, found.generate_report()
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]
