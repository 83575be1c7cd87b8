"""The part of a page about a `fidelity.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload_decode.errors import ConfigError
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import count, percent
from offload_decode.evals.report.tables import table

TITLE = "fidelity to exact attention"


def parts(found: Mapping[str, Any]) -> list[tuple[str, Markup]] | None:
    """A table of selectors by budget; None where the file is none. Raises `ConfigError` for other entries."""
    if "entries" not in found:
        return None
    try:
        rows = [_row(entry) for entry in found["entries"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"this is no fidelity.json of this release: its entries are not whole ({error!r:.80})"
        ) from error
    heading: list[Part] = [
        "selector",
        "budget",
        "tokens attended",
        "recall",
        "mass",
        "error, median",
        "error, 95th",
        "KL, nats",
        "same token",
    ]
    note = (
        "In %: the share of the exact top-k that was found (recall), the share of the attention that the "
        "selection holds (mass), the error of the attention to stored tokens, relative to dense attention, "
        "and how often the likeliest next token is that of dense attention."
    )
    whole = table(None, heading, [(None, rows)], "Fidelity by selector and budget")
    return [("Selectors against exact attention", join([tag("p", note, class_="note"), whole]))]


def _row(entry: Mapping[str, Any]) -> list[Part]:
    live, agreement = entry["live"], entry["agreement"]
    shares = [live["recall"], live["mass"], live["error"]["p50"], live["error"]["p95"]]
    return [
        str(entry["label"]),
        str(entry["budget"]),
        count(float(entry["attended"])),
        *(percent(float(share)) for share in shares),
        f"{float(agreement['kl_mean']):.2g}",
        percent(float(agreement["top1"])),
    ]
