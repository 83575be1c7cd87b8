"""The page of a run: whole in itself, whatever was written into the run, and readable by everybody."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup
from playwright.sync_api import Browser

from offload_decode.common.errors import ConfigError
from offload_decode.evals.plots import Line, Point, lines_svg
from offload_decode.evals.report.blocks import cut
from offload_decode.evals.report.page import page
from offload_decode.evals.runs import read as read_run
from offload_decode.evals.sparsity import entropy_by_head
from offload_decode.evals.stats import Share
from tests.evals.made_up import MADE_WITH, WAYS, budget, write_likelihoods, write_run, write_sparsity
from tests.server.http.test_page import browser

__all__ = ["browser"]

EVIL = "<script>alert('it ran')</script>\"'&\u202e\ud800\x1b]0;"


def right(task: str, length: int, way: str) -> float:
    share = budget(way, length) / (budget(way, length) + 60)
    return {"niah_single_1": 1.0, "vt": 0.97, "cwe": 0.5}.get(task, 0.9) * share


def drawn_in(source: str) -> ElementTree.Element:
    """The picture in a data URI."""
    kind, _, data = source.partition(",")
    assert kind == "data:image/svg+xml;base64"
    return ElementTree.fromstring(base64.b64decode(data))


def texts(drawn: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in drawn.iter("{http://www.w3.org/2000/svg}text")]


def parsed(text: str) -> BeautifulSoup:
    return BeautifulSoup(text, "html.parser")


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = page([write_run(tmp_path / "run.jsonl", right)])
    read = parsed(text)
    assert not read.find_all("script")
    assert not read.find_all("link")
    pictures = [drawn_in(image["src"]) for image in read.find_all("img")]
    for each in (each for picture in pictures for each in picture.iter()):
        assert each.tag.rpartition("}")[2] not in ("script", "image", "foreignObject", "a")
        assert all(
            value.startswith("#") for name, value in each.attrib.items() if name.rpartition("}")[2] == "href"
        )
    assert {link["href"][0] for link in read.find_all("a")} == {"#"}
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert "url(" not in text
    assert "@import" not in text
    digest = base64.b64encode(hashlib.sha256(read.style.string.encode()).digest()).decode()
    assert read.select_one("meta[http-equiv]")["content"] == (
        f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert not read.select("[style]")
    assert {link["href"][1:] for link in read.find_all("a")} <= {each["id"] for each in read.select("[id]")}


def test_a_grid_by_depth_names_its_tasks(tmp_path: Path) -> None:
    """Others than needles stand at one place of a text too: a task at 0 % is no effect of depth."""
    run = write_run(tmp_path / "run.jsonl", right, tasks=("niah_single_1", "qa_1"), questions=4)
    placed = {line["task"] for line in map(json.loads, run.read_text().splitlines()) if line.get("depth")}
    assert f"95 % intervals: {', '.join(sorted(placed))}." in parsed(page([run])).text


def test_whatever_a_run_says_is_text(tmp_path: Path) -> None:
    made_with = {**MADE_WITH, "model": EVIL, "versions": {EVIL: EVIL}}
    ways = ("dense", f"topk:budget=8,x={EVIL}")
    run = write_run(
        tmp_path / "run.jsonl",
        0.5,
        tasks=[EVIL],
        ways=ways,
        said=EVIL,
        evaluation=EVIL,
        made_with=made_with,
        way_budget=lambda way, length: 8,
    )
    text = page([run])
    read = parsed(text)
    assert not read.find_all("script")
    assert not any(name.startswith("on") for each in read.find_all() for name in each.attrs)
    assert "<script>alert('it ran')</script>\"'&\\u202e\\ud800\\u001b]0;" in read.text
    text.encode()
    drawn = [text for image in read.find_all("img") for text in texts(drawn_in(image["src"]))]
    assert any("\\u202e" in text for text in drawn)
    assert cut("a" * 1000, 10) == "a" * 10 + " … (990 more characters)"


def test_a_run_that_is_not_finished_says_so_first(tmp_path: Path) -> None:
    read = parsed(page([write_run(tmp_path / "run.jsonl", 0.9, unfinished=7)])).text
    assert read.index("120 of 127 parts are measured") < read.index("way of answering")
    assert "not finished" not in parsed(page([write_run(tmp_path / "whole.jsonl", 0.9)])).text


def test_the_worst_task_is_the_headline_and_every_number_is_in_a_table(tmp_path: Path) -> None:
    read = parsed(page([write_run(tmp_path / "run.jsonl", right, seeds=(3, 4))]))
    headline = read.text[read.text.index("way of answering") :]
    assert headline.index("cwe") < headline.index("vt")
    assert "Seeds 3, 4 are pooled" in read.text
    shares = "string match ", "control: facts taken out", "guess from the question alone"
    for said in (*shares, "0123456789abcdef"):
        assert said in read.text
    described = [image["alt"] for image in read.select("img.plot")]
    assert len(described) == 6
    assert sum("topk: " in alt and " % at 64" in alt for alt in described) == 6
    assert all(table.get("aria-label") for table in read.select("div.scroll"))


def test_a_ratio_is_not_shown_where_dense_attention_fails(tmp_path: Path) -> None:
    assert "% of dense" not in parsed(page([write_run(tmp_path / "weak.jsonl", 0.6, tasks=["vt"])])).text
    assert "100 % of dense" in parsed(page([write_run(tmp_path / "good.jsonl", 1.0, tasks=["vt"])])).text


def test_a_large_run_makes_a_small_page(tmp_path: Path) -> None:
    selectors = ("topk", "quest", "h2o", "streaming")
    ways = ("dense", *(f"{name}:budget={2**power}" for name in selectors for power in range(6, 11)))
    tasks = [f"task_{number}" for number in range(13)]
    lengths = [2**power for power in range(12, 17)]
    run = write_run(tmp_path / "run.jsonl", right, tasks=tasks, lengths=lengths, ways=ways, questions=1)
    assert len(page([run]).encode()) < 1_500_000


def test_fidelity_is_a_table_and_four_plots(tmp_path: Path) -> None:
    entries = [
        {
            "label": label,
            "budget": str(attended),
            "attended": float(attended),
            "agreement": {"kl_mean": kl, "top1": 0.9},
            "live": {"recall": 0.8, "mass": 0.95, "error": {"p50": 0.1, "p95": 0.2}},
        }
        for label, attended, kl in (
            ("dense", 2048, 0.0),
            (EVIL, 64, 0.01),
            (EVIL, 256, 0.0),
            ("topk", 64, 0.2),
        )
    ]
    found = {"configuration": {"model": "m"}, "entries": entries, "failures": []}
    (tmp_path / "fidelity.json").write_text(json.dumps(found))
    read = parsed(page([tmp_path / "fidelity.json"]))
    assert "Fidelity to exact attention" in read.text
    assert not read.find_all("script")
    told = [image["alt"] for image in read.select("img.plot")]
    assert len(told) == 4
    assert all("topk: " in alt and "dense" not in alt for alt in told)
    assert "0.01 at 64" in told[3]
    assert "0 at 256" not in told[3], "a logarithmic scale has no 0"


def test_likelihood_and_sparsity_are_drawn(tmp_path: Path) -> None:
    runs = [
        write_likelihoods(tmp_path / "perplexity.jsonl"),
        write_likelihoods(tmp_path / "sliding.jsonl", "sliding"),
        write_sparsity(tmp_path / "sparsity.jsonl"),
    ]
    read = parsed(page(runs))
    for said in (
        "Likelihood by position",
        "window:512",
        "above dense",
        "behind up to 8K stored tokens",
        "10.0 % of dense attention behind 2K stored tokens goes to the chunk’s own tokens",
        "Does entropy predict the budget?",
        "mean entropy, over questions",
        "Keys by layer",
        "Entropy of each query head’s attention",
        "layer 4",
    ):
        assert said in read.text
    captions = [image["alt"].partition(":")[0] for image in read.find_all("img")]
    assert captions.count("2K tokens") == 2
    assert captions.count("every token of the text") == captions.count("Keys by layer") == 1
    layers = drawn_in(read.find_all("img")[captions.index("Keys by layer")]["src"])
    assert [text for text in texts(layers) if text in "123456"] == ["2", "4"], "the layers that there are"
    assert "nothing to predict" not in read.text
    entropies = entropy_by_head(read_run(runs[2]))
    assert {layer for _, layer in entropies} == {2, 4}
    for heads in entropies.values():
        assert "".join(f"{nats:.2f}" for nats in heads) in read.text.replace("\n", "")


def test_where_every_question_needs_the_same_nothing_is_predicted(tmp_path: Path) -> None:
    read = parsed(page([write_sparsity(tmp_path / "sparsity.jsonl", steep=0.0)]))
    assert "Every question that tells needs 16 tokens: there is nothing to predict." in read.text


def test_a_large_perplexity_is_written_in_digits(tmp_path: Path) -> None:
    run = write_likelihoods(tmp_path / "perplexity.jsonl")
    run.write_text(re.sub(r'"nll": \[[^]]*\]', f'"nll": {[9.8123] * 64}', run.read_text()))
    text = parsed(page([run])).text
    assert f"{math.exp(9.8123):,.2f}" in text
    assert "e+" not in text


@pytest.mark.parametrize("values", [[64.0], [64.0, 64.0], [3.0, 5.0], [1.0, 1e6], [2048.0, 8192.0]])
def test_plots_of_any_range_have_plain_numbers_at_their_ticks(values: list[float]) -> None:
    points = tuple(Point(value, value, 0.9 * value, value) for value in values)
    for log_x, log_y in ((False, False), (True, False), (True, True)):
        said = texts(drawn_in(lines_svg([Line("one", 0, points)], "tokens", log_x=log_x, log_y=log_y)))
        assert "tokens" in said
        assert len(said) > 2
        assert not any("$" in text for text in said), "no mathtext"


def test_intervals_and_bands_are_where_their_values_are() -> None:
    share, none = Share(0.5, 4, 0.25, 0.75), Share(0.0, 4, 0.0, 0.5)
    one = Line("one", 0, (Point(64.0, 0.5, 0.25, 0.75),))
    pictures = [lines_svg([one], "tokens", percent=True, band=band, rule=0.1) for band in (None, share, none)]
    assert len(set(pictures)) == 3
    assert pictures[1] == lines_svg([one], "tokens", percent=True, band=share, rule=0.1), "the same each time"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "there are no results"),
        ("[]", "does not say what was measured"),
        ("{", "is no file of an evaluation"),
        ('{"configuration": {}}', "is no fidelity.json of this release"),
        ('{"configuration": {}, "cells": [{"dense": {"score": 7}}]}', "asked anew with `eval needle`"),
        ('{"configuration": {}, "entries": [3]}', "is no fidelity.json of this release"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "file.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=why):
        page([path])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    few: dict[str, Any] = {"tasks": ("niah_single_1", "vt"), "questions": 8, "said": EVIL}
    runs = [
        write_run(folder / "run.jsonl", right, ways=WAYS[:4], **few),
        write_run(folder / "lost.jsonl", 0.0, ways=WAYS[:2], lengths=[2048], **few),
    ]
    (folder / "report.html").write_text(page(runs))
    return (folder / "report.html").as_uri()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(browser: Browser, shown: str, scheme: Any) -> None:
    context = browser.new_context(color_scheme=scheme)
    faults: list[str] = []
    opened = context.new_page()
    opened.on("console", lambda said: faults.append(said.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.goto(shown)
    opened.locator("summary").first.click()
    # The policy lets no script in, so that it is checked without it.
    found = Axe().run(_without_policy(browser, shown, scheme))
    assert found.violations_count == 0, found.generate_report()
    assert not faults
    context.close()


def _without_policy(browser: Browser, shown: str, scheme: Any) -> Any:
    opened = browser.new_context(color_scheme=scheme, bypass_csp=True).new_page()
    opened.goto(shown)
    opened.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")
    return opened


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out_of_a_screen(browser: Browser, shown: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    opened = context.new_page()
    opened.goto(shown)
    assert opened.evaluate("document.documentElement.scrollWidth") <= width
    context.close()


def test_nothing_is_cut_off_on_paper_and_it_is_light(browser: Browser, shown: str) -> None:
    context = browser.new_context(viewport={"width": 700, "height": 990}, color_scheme="dark")
    opened = context.new_page()
    opened.emulate_media(media="print", color_scheme="dark")
    opened.goto(shown)
    wide = "() => [...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
    assert max(opened.evaluate(wide)) <= 1
    assert opened.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert opened.locator("blockquote").first.evaluate("e => e.getBoundingClientRect().height") > 20
    context.close()
