"""Runs as one HTML page that needs nothing from elsewhere: what is shown, for `page.html.jinja` to lay out.

A part of the page is a title with blocks: notes, tables, figures, examples, pairs of names and values. All
text is escaped by the template, and what cannot be seen in it is spelled out: models may have written it.
"""

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.common.files import NotPlain, open_plain, parse
from offload_decode.evals import plots, runs
from offload_decode.evals.extra import REPORT, library, require
from offload_decode.evals.perplexity import NLL, likelihoods
from offload_decode.evals.report import answers, measures
from offload_decode.evals.report.blocks import Block, Part, pairs
from offload_decode.evals.runs import ANSWER, Results, questions_and_answers
from offload_decode.evals.sparsity import SPARSITY
from offload_decode.evals.summary import summarize

MOST = 256 << 20
"""Bytes of a file that is one JSON value."""
_TITLES = {
    "needle": "Needle in a haystack",
    "ruler": "RULER",
    "aggregate": "Tasks that need much of a text",
    "passkey": "Passkeys",
    "perplexity": "Perplexity",
    "sparsity": "Sparsity",
}


def page(paths: Sequence[Path]) -> str:
    """The page of one run or several, in their order. Raises `ConfigError` for a file that holds none, and
    where the extra `eval` is missing.
    """
    require(*REPORT)
    runs = [_run(path) for path in paths]
    jinja, folder = library("jinja2"), files(__package__)
    markup = library("markupsafe").Markup

    def finalize(value: Any) -> Any:
        return plots.visible(value) if isinstance(value, str) and not isinstance(value, markup) else value

    def breakable(way: str) -> Any:
        pieces = plots.visible(way).replace(":", ":\0").replace(",", ",\0").split("\0")
        return markup("<wbr>").join(pieces)

    environment = jinja.Environment(autoescape=True, finalize=finalize, undefined=jinja.StrictUndefined)
    environment.filters["breakable"] = breakable
    template = environment.from_string(folder.joinpath("page.html.jinja").read_text(encoding="utf-8"))
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    models = dict.fromkeys(Path(run["model"]).name or run["model"] for run in runs)
    text: str = template.render(
        title=f"Evaluation of {', '.join(models)}",
        runs=runs,
        style=markup(style),
        digest=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )
    return text


def read(path: Path) -> Results | Mapping[str, Any]:
    """A run, or the object in a `fidelity.json`. Raises `ConfigError` for anything else."""
    try:
        with open(open_plain(path, follow=True), "rb") as file:
            if b'"record"' in file.readline(64) or os.fstat(file.fileno()).st_size > MOST:
                return runs.read(path)
            file.seek(0)
            value = parse(file.read(MOST))
    except FileNotFoundError as error:
        raise ConfigError(f"there are no results at {path}: run `offload-decode eval` first") from error
    except NotPlain as error:
        raise ConfigError(f"there are no results at {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no file of an evaluation: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("configuration"), dict):
        raise ConfigError(f"{path} is no file of an evaluation: it does not say what was measured")
    return value


def _run(path: Path) -> dict[str, Any]:
    """What is shown of a file: the `opening` blocks first, then titled `parts`."""
    found = read(path)
    if isinstance(found, Results):
        made_with, shown = found.header.made_with, _of_results(path, found)
    else:
        made_with, shown = found["configuration"], _of_fidelity(path, found)
    model = str(made_with.get("model", "?"))
    made = [str(made_with[key]) for key in ("dtype", "device") if key in made_with]
    return {"model": model, "lead": ", ".join([model, *made, path.name]), "file": path.name, **shown}


def _of_fidelity(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    try:
        shown = measures.fidelity(found["entries"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        earlier = ": grids of needles are asked anew with `eval needle`" if "cells" in found else ""
        raise ConfigError(
            f"{path} is no fidelity.json of this release{earlier or f' ({error!r:.80})'}"
        ) from error
    shown.append(("Measured with", [pairs(found["configuration"], {"file": path.name})]))
    title = "Fidelity to exact attention"
    return {"title": title, "opening": [], "parts": shown}


def _of_results(path: Path, found: Results) -> dict[str, Any]:
    header = found.header
    opening: list[Block] = []
    shown: list[Part] = []
    if found.of(SPARSITY):
        shown = [
            ("Keys that hold the attention", measures.keys(found)),
            ("Does entropy predict the budget?", measures.entropy(found)),
        ]
    if found.of(ANSWER):
        summary = summarize(found)
        opening = answers.headline(summary)
        shown += answers.answered(list(questions_and_answers(found)), summary)
    if found.of(NLL):
        shown += measures.likelihood(found, likelihoods(found))
    if not shown:
        raise ConfigError(f"{path} holds nothing that could be shown yet: let a part of the run finish first")
    done = f"{len(found.finished):,} of {header.units:,} parts"
    if len(found.finished) < header.units:
        opening.insert(0, f"The run is not finished: {done} are measured.")
    about = {
        "evaluation": header.evaluation,
        "started": header.started,
        "finished": done,
        "file": path.name,
    }
    shown.append(("Measured with", [pairs(about, header.made_with, header.configuration)]))
    title = _TITLES.get(header.evaluation, header.evaluation)
    return {"title": title, "opening": opening, "parts": shown}
