"""Runs as one HTML page that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload_decode.errors import ConfigError
from offload_decode.evals.perplexity import NLL
from offload_decode.evals.perplexity_report import at_chance, likelihoods
from offload_decode.evals.records import ANSWER
from offload_decode.evals.report import answered, fidelity, likelihood, needle, sparse
from offload_decode.evals.report.html import Markup, join, tag
from offload_decode.evals.report.measured import measured
from offload_decode.evals.report.reading import read
from offload_decode.evals.results import Results
from offload_decode.evals.sparsity import SPARSITY
from offload_decode.evals.summary import summarize

_TITLES = {"ruler": "RULER", "aggregate": "Tasks that need much of a text", "passkey": "Passkeys"}
_TITLES |= {"ablation": "Options of a selector", "perplexity": "Perplexity", "sparsity": "Sparsity"}


@dataclass(frozen=True)
class _Run:
    """What is shown of a file: its title, what comes first, and titled parts."""

    title: str
    lead: str
    opening: Markup | None
    parts: list[tuple[str, Markup]]
    model: str
    file: str


def page(paths: Sequence[Path]) -> str:
    """The page of one run or several, in their order. Raises `ConfigError` for a file that holds none."""
    runs = [_run(path) for path in paths]
    models = list(dict.fromkeys(run.model for run in runs))
    title = f"Evaluation of {', '.join(models)}"
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    ]
    body = tag(
        "div",
        tag("a", "Skip to the results", href="#results", class_="skip"),
        tag("header", tag("h1", title), _contents(runs)),
        tag("main", [_section(number, run) for number, run in enumerate(runs)], id="results"),
        tag(
            "footer",
            "Made by offload-decode eval report. Intervals hold the true value with 95 % confidence.",
            class_="foot",
        ),
        class_="page",
    )
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _run(path: Path) -> _Run:
    found = read(path)
    if isinstance(found, Results):
        return _of_results(path, found)
    for reader in (needle, fidelity):
        if (parts := reader.parts(found)) is not None:
            opening = answered.warnings(needle.verdict(found), True) if reader is needle else None
            model = str(found["configuration"].get("model", "?"))
            parts.append(("Measured with", measured(found["configuration"], {"file": path.name})))
            return _Run(
                reader.TITLE,
                _lead(found["configuration"], model, path.name),
                opening,
                parts,
                _short(model),
                path.name,
            )
    raise ConfigError(f"{path} is no file of an evaluation: it has neither cells nor entries")


def _of_results(path: Path, found: Results) -> _Run:
    header = found.header
    opening, parts = None, []
    if found.of(ANSWER):
        summary = summarize(found)
        opening = answered.opening(summary)
        parts += answered.sections(found, summary)
    if found.of(SPARSITY):
        parts = sparse.parts(found) + parts
    if found.of(NLL):
        foretold = likelihoods(found)
        opening = opening or answered.warnings(at_chance(foretold), True)
        parts += likelihood.parts(found, foretold)
    if not parts:
        raise ConfigError(f"{path} holds nothing that could be shown yet: let a part of the run finish first")
    model = str(header.made_with.get("model", "?"))
    about = {
        "evaluation": header.evaluation,
        "started": header.started,
        "finished": f"{len(found.finished):,} of {header.units:,} parts",
        "file": path.name,
    }
    parts.append(("Measured with", measured(about, header.made_with, header.configuration)))
    title = _TITLES.get(header.evaluation, header.evaluation)
    return _Run(title, _lead(header.made_with, model, path.name), opening, parts, _short(model), path.name)


def _short(model: str) -> str:
    return Path(model).name or model


def _lead(made_with: Mapping[str, Any], model: str, file: str) -> str:
    known = [str(made_with[name]) for name in ("dtype", "device") if name in made_with]
    return ", ".join([model, *known, file])


def _contents(runs: Sequence[_Run]) -> Markup:
    several = len(runs) > 1
    entries = []
    for number, run in enumerate(runs):
        if several:
            entries.append(tag("li", tag("a", f"{run.title}, {run.file}", href=f"#run-{number}")))
        else:
            for place, (title, _) in enumerate(run.parts):
                entries.append(tag("li", tag("a", title, href=f"#part-{number}-{place}")))
    return tag("nav", tag("ul", entries), aria_label="Contents")


def _section(number: int, run: _Run) -> Markup:
    parts = [
        join([tag("h3", title, id=f"part-{number}-{place}"), part])
        for place, (title, part) in enumerate(run.parts)
    ]
    heading = tag("h2", run.title, id=f"run-{number}")
    name = f"{number + 1}. {run.title}, {run.file}"
    return tag(
        "section",
        heading,
        tag("p", run.lead, class_="lead"),
        run.opening,
        parts,
        class_="run",
        aria_label=name,
    )
