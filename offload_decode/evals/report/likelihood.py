"""The part of a page about a run of `eval perplexity`."""

from __future__ import annotations

from collections.abc import Sequence

from offload_decode.evals.contender import DENSE
from offload_decode.evals.lengths import label
from offload_decode.evals.perplexity_report import Likelihood, curve
from offload_decode.evals.report import plot
from offload_decode.evals.report.html import Markup, Part, join, tag
from offload_decode.evals.report.numbers import count, signed
from offload_decode.evals.report.tables import table, way_name
from offload_decode.evals.resampling import Estimate
from offload_decode.evals.results import Results
from offload_decode.evals.summary import without_budget


def parts(results: Results, found: Sequence[Likelihood]) -> list[tuple[str, Markup]]:
    """Likelihood by way and length, against tokens attended to, and by position where the text was gone
    through.
    """
    sliding = results.header.configuration.get("fashion") == "sliding"
    titled: list[tuple[str, Markup | None]] = [
        ("Likelihood by selector and budget", _table(found, sliding)),
        ("Likelihood against tokens loaded", _against_tokens(found)),
    ]
    if sliding:
        titled.append(("Likelihood by position", _by_position(results)))
    return [(title, part) for title, part in titled if part]


def _table(found: Sequence[Likelihood], sliding: bool) -> Markup:
    behind = "behind up to " if sliding else "behind "
    groups: list[tuple[Part, list[list[Part]]]] = []
    for length in dict.fromkeys(each.length for each in found):
        rows: list[list[Part]] = []
        for each in (each for each in found if each.length == length):
            attended = "–" if each.attended is None else count(each.attended)
            row: list[Part] = [way_name(each.way), attended, f"{each.nll:.4f}", _perplexity(each.perplexity)]
            more = ["", ""] if each.way == DENSE else [signed(each.more.value, 4), _interval(each.more)]
            rows.append([*row, *more, count(each.tokens)])
        groups.append((f"{behind}{label(length)} stored tokens", rows))
    heading: list[Part] = ["way", "tokens attended", "nats a token", "perplexity", "above dense", "95 %"]
    note = (
        "Negative log-likelihood of the text’s own next tokens, and how much more of it there is than with "
        "dense attention on the same tokens; intervals from draws of blocks of neighbours. "
        "“window:512” is the bare model, which sees the 512 tokens before the chunk and nothing else; "
        "“unigram” is no model: how often each token has come so far."
    )
    whole = table(None, [*heading, "tokens predicted"], groups, "Likelihood by way")
    shares = [
        f"{100 * each.tail_share:.1f} % of dense attention {behind}{label(each.length)} stored tokens goes "
        "to the chunk’s own tokens, which every way attends to whole."
        for each in found
        if each.way == DENSE and each.tail_share is not None
    ]
    return join([tag("p", note, class_="note"), whole, [tag("p", share, class_="note") for share in shares]])


def _against_tokens(found: Sequence[Likelihood]) -> Markup | None:
    known = [each for each in found if each.attended is not None and each.way != DENSE]
    families = {name: style for style, name in enumerate(dict.fromkeys(without_budget(e.way) for e in known))}
    figures = []
    for length in dict.fromkeys(each.length for each in known):
        here = [each for each in known if each.length == length]
        lines = []
        for family, style in families.items():
            points = [
                _point(each.attended or 0.0, each.more) for each in here if without_budget(each.way) == family
            ]
            if points:
                lines.append(plot.Line(family, style, tuple(sorted(points, key=lambda point: point.x))))
        drawn = [point for line in lines for point in line.points]
        up = plot.axis("", min(0.0, *(p.low for p in drawn)), max(0.0, *(p.high for p in drawn)))
        across = plot.log_axis("tokens attended", [point.x for point in drawn])
        figures.append(_figure(f"{label(length)} tokens", across, up, lines, [(0.0, "dense attention")]))
    if not figures:
        return None
    note = (
        "Nats a token above dense attention (the dotted line), by stored tokens attended to, with 95 % "
        "intervals."
    )
    return _drawn(note, families, figures, "figures")


def _by_position(results: Results) -> Markup | None:
    found = curve(results)
    ways = {name: style for style, name in enumerate(dict.fromkeys(point.way for point in found))}
    lines = [
        plot.Line(
            way,
            style,
            tuple(plot.Point((p.first + p.last) / 2, p.nll, p.nll, p.nll) for p in found if p.way == way),
        )
        for way, style in ways.items()
    ]
    values = [point.nll for point in found]
    across = plot.axis("position in the text", 0, max(point.last for point in found))
    up = plot.axis("", min(values), max(values))
    figure = _figure("every token of the text", across, up, lines, [], plot.WIDE)
    return _drawn("Nats a token, over stretches of the text.", ways, [figure], None)


def _figure(
    title: str,
    across: plot.Axis,
    up: plot.Axis,
    lines: Sequence[plot.Line],
    rules: Sequence[tuple[float, str]],
    size: tuple[int, int] = plot.SMALL,
) -> Markup:
    told = "; ".join(
        f"{line.name}: from {line.points[0].y:.3g} to {line.points[-1].y:.3g} nats" for line in lines
    )
    picture = plot.lines(title, told, across, up, lines, rules, size)
    return tag("figure", tag("figcaption", tag("strong", title)), picture)


def _drawn(note: str, styles: dict[str, int], figures: Sequence[Markup], class_: str | None) -> Markup:
    legend = tag("ul", [plot.key(style, name) for name, style in styles.items()], class_="legend")
    return join([tag("p", note, class_="note"), legend, tag("div", figures, class_=class_)])


def _perplexity(value: float) -> str:
    return f"{value:,.2f}" if value < 1e6 else f"{value:.3g}"


def _point(x: float, value: Estimate) -> plot.Point:
    low = value.value if value.low is None else value.low
    high = value.value if value.high is None else value.high
    return plot.Point(max(1.0, x), value.value, low, high)


def _interval(value: Estimate) -> str:
    if value.low is None or value.high is None:
        return "–"
    return f"{signed(value.low, 4)} to {signed(value.high, 4)}"
