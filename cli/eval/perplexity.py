"""`offload-decode eval perplexity`: how well a text's continuation is predicted from its stored beginning."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

from offload_decode import demo_models
from offload_decode.cli import output
from offload_decode.cli.eval import run as shared
from offload_decode.cli.eval.run import Contenders, Out, PrefillMethod, text_option, token_counts
from offload_decode.cli.options import Device, Json, ModelToLoad, Quiet, Rope, option, with_groups
from offload_decode.cli.output import Progress

if TYPE_CHECKING:
    from offload_decode.evals.runs import Results

_DEMO = "a demo model finds facts and knows no language: its perplexity says nothing of another model's"
_POINTS = 16  # lines of the table by position


@with_groups
def perplexity(
    *,
    model: ModelToLoad = "demo",
    text: Annotated[str | None, text_option("The text")] = None,
    lengths: Annotated[
        str,
        option("N,…", "Stored tokens before what is predicted; with --sliding the one length of the text."),
    ] = "8K",
    places: Annotated[int, option("N", "Places of the text, evenly spread.", min=1)] = 4,
    chunk: Annotated[
        int,
        option(
            "N",
            "Tokens that are predicted behind a store. They attend to each other whole: keep them few.",
            min=2,
        ),
    ] = 256,
    contenders: Contenders,
    windows: Annotated[
        str,
        option(
            "N,…",
            "Baselines: the bare model, which reads so many tokens before those that are predicted and "
            "knows of nothing else.",
        ),
    ] = "512",
    sliding: Annotated[
        bool,
        option(
            None,
            "Predict the whole text, chunk by chunk, each behind a store of what stands before it.",
            "--sliding",
        ),
    ] = False,
    prefill: PrefillMethod = "dense",
    rope: Rope = "",
    adapter: shared.Adapter = "",
    out: Out = None,
    device: Device = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity by selector and budget.

    The beginning of a text is stored. The tokens that follow are run behind it, and each is predicted from
    all before it: with dense attention to the store, and with every selector at every budget.

    The table shows the negative log-likelihood (NLL) of a token in nats and the perplexity, and how much more
    NLL that is than with dense attention, with a 95 % interval over blocks of 32 tokens.
    """
    from offload_decode.cli.compiling import announce_compiling
    from offload_decode.common.errors import ConfigError
    from offload_decode.evals.extra import STATISTICS, require
    from offload_decode.evals.perplexity import Perplexity, PerplexityPlan
    from offload_decode.evals.runs import run
    from offload_decode.models.loading import load
    from offload_decode.prefill_jobs.append import GrowingStore

    counts = token_counts(lengths)
    if sliding and len(counts) > 1:
        raise ConfigError("with --sliding, --lengths is one number, the length of the whole text")
    require(*STATISTICS)
    announce_compiling()
    settings = shared.prefill_settings(prefill)
    haystack = shared.read_haystack(text)
    file = shared.results_file(out, "perplexity")
    kinds = shared.index_kinds(contenders)
    stored = shared.how_stored(settings, kinds)
    bare = token_counts(windows)
    plan = PerplexityPlan(haystack, counts, contenders, places, chunk, bare, sliding, stored)
    loaded = load(model, device, rope=rope, adapter=adapter)
    with TemporaryDirectory(prefix="offload-decode-eval-") as folder, Progress(quiet) as progress:
        grown = GrowingStore(loaded, Path(folder), plan.longest, settings, kinds)
        evaluation = Perplexity(loaded, plan, grown)
        shared.rehearse(contenders, loaded, haystack, settings)
        shared.announce(evaluation, "chunk", quiet)
        results = run(evaluation, loaded, file, lambda done, total: progress("eval", done, total))
    shared.show(results, as_json, quiet, _text)
    if model in demo_models.NAMES:
        output.note(_DEMO, quiet)


def _text(results: Results) -> str:
    """The table of all ways, what share is the chunk's own, and in the sliding fashion NLL by position."""
    from offload_decode.evals.contender import DENSE
    from offload_decode.evals.perplexity import likelihoods

    rows = [["way", "stored", "NLL", "perplexity", "more than dense", "interval", "attended", "tokens"]]
    notes = []
    sliding = results.header.configuration.get("fashion") == "sliding"
    found = likelihoods(results)
    for line in found:
        stored = f"up to {line.length:,}" if sliding else f"{line.length:,}"
        more, interval = f"{line.more.value:+.4f}", "-"
        if line.way == DENSE:
            more = interval = ""
        elif line.more.low is not None:
            interval = f"{line.more.low:+.4f} to {line.more.high:+.4f}"
        attended = "-" if line.attended is None else f"{line.attended:,.0f}"
        likelihood = [f"{line.nll:.4f}", f"{line.perplexity:,.2f}"]
        rows.append([line.way, stored, *likelihood, more, interval, attended, f"{line.tokens:,}"])
        if line.way == DENSE and line.tail_share is not None:
            notes.append(
                f"behind {stored} tokens, {line.tail_share:.1%} of dense attention goes to the chunk itself, "
                "which all selectors attend to whole"
            )
    parts = [output.table(rows), *notes]
    return "\n".join([*parts, "", output.table(_curve(results))] if sliding else parts)


def _curve(results: Results) -> list[list[str]]:
    from offload_decode.evals.perplexity import curve

    points = curve(results, _POINTS)
    ways = list(dict.fromkeys(point.way for point in points))
    lines: dict[tuple[int, int], list[str]] = {}
    for point in points:
        lines.setdefault((point.first, point.last), []).append(f"{point.nll:.4f}")
    return [
        ["NLL of tokens", *ways],
        *([f"{first:,} to {last:,}", *cells] for (first, last), cells in lines.items()),
    ]
