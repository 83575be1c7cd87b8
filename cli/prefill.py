"""`offload-decode prefill`: corpora to stores; its options are those of `collect` and `append` too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import index, output
from offload_decode.cli import options as opts
from offload_decode.cli.errors import FAILURE, sentence
from offload_decode.cli.limits import caps_of, cluster_of
from offload_decode.cli.models import checked
from offload_decode.cli.options import Folders, a_path, option, token_count, with_groups, workers_option
from offload_decode.cli.output import Progress
from offload_decode.cli.push_pull import summary
from offload_decode.common import files
from offload_decode.config import split_pairs

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.corpus import Note
    from offload_decode.prefill_jobs.folders import Skipped
    from offload_decode.prefill_jobs.job import Maker, PrefillReport, Settings
    from offload_decode.prefill_jobs.many import Results
    from offload_decode.store.reader import KVStore

_SHOWN = 5


@dataclass(frozen=True)
class StoreOptions:
    """What a store holds of its text: options as they were written."""

    method: Annotated[
        str,
        option(
            "NAME",
            "dense (exact), quoka, sample, window, or an extension's; see docs/prefill.md.",
            autocompletion=opts.prefill_methods,
        ),
    ] = "dense"
    options: Annotated[
        list[str] | None,
        opts.key_values("Option of the method, such as chunk=512 (tokens in one forward pass) or budget=25%"),
    ] = None
    kv: Annotated[str, option("K", "Keys and values as auto (the model's dtype), int8 or int4-values.")] = (
        "auto"
    )
    context: Annotated[
        str | None,
        option(
            "N",
            "Tokens to allow for a conversation after the corpus, for models whose rotation depends on the "
            "total length (longrope, dynamic).  [default: the rest of the length that needs no scaling, or "
            "512]",
        ),
    ] = None
    rope: opts.Rope = ""
    system: Annotated[
        str | None,
        option(
            "TEXT",
            "System message before the corpus, '' for an empty one.  [default: the chat template's own]",
        ),
    ] = None
    query_samples: Annotated[
        int, option("N", "Prefill queries to keep for each KV head, to tune indexes with.", min=1)
    ] = 1024

    @property
    def settings(self) -> Settings:
        """The options, checked; raises `ConfigError`."""
        from offload_decode.prefill_jobs.job import Settings

        follow = None if self.context is None else token_count(self.context)
        options = split_pairs(self.options or [])
        return Settings(self.method, options, self.query_samples, self.kv, follow, self.rope, self.system)


@dataclass(frozen=True)
class RunOptions:
    """Where the model runs, with which dtype and weights, and the memory limits meanwhile."""

    device: opts.Device = "auto"
    dtype: Annotated[str, option("T", "auto (as the model has it), float16, bfloat16 or float32.")] = "auto"
    weights: Annotated[
        str,
        option(
            "W",
            "Weights of the model: auto (unchanged), streamed (to a small GPU layer by layer, with the same "
            "results), int8 or int4; the store records it.",
        ),
    ] = "auto"
    gpu_memory: opts.GpuMemory = None
    ram: opts.Ram = None
    adapter: Annotated[
        str,
        option("FOLDER", "A LoRA on the model, in PEFT's layout; the store is of both, and records it."),
    ] = ""

    def admit(self, model: str, chunk: int | None) -> None:
        """Apply the limits, and refuse a model that cannot prefill within them: `DoesNotFit`, `ConfigError`
        or `ModelError`. `chunk`: tokens of a forward pass; None takes those that fit.
        """
        caps = caps_of(self.gpu_memory, self.ram)

        from offload_decode.cli.compiling import announce_compiling
        from offload_decode.common.memory import own_memory
        from offload_decode.models.size_estimate import estimate_size
        from offload_decode.planning.caps import apply_caps, check_prefill

        announce_compiling()
        given = estimate_size(model), chunk, self.dtype, self.device, caps, own_memory(), self.weights
        for told in check_prefill(*given):
            output.note(told)
        apply_caps(caps, self.device)

    def admit_further(self, store: KVStore, model: str | None) -> None:
        """`admit` for further tokens of a store, in the dtype and chunks that it was made with, by its own
        model or the `model` named in its place.
        """
        from offload_decode.prefill_jobs.continuing import method_of

        own = store.manifest
        weights = own.weights if self.weights == "auto" else self.weights
        run_with = replace(self, dtype=own.dtype, weights=weights)
        run_with.admit(model or own.model_id, method_of(store).options.chunk)

    def maker(self, model: str, settings: Settings) -> Maker:
        from offload_decode.prefill_jobs.job import Maker

        return Maker(model, settings, self.device, self.dtype, self.weights, self.adapter)


@with_groups
def prefill(
    corpora: Annotated[
        list[str],
        opts.argument(
            "CORPUS", "A text file, a folder of them, or - for standard input; each becomes a store."
        ),
    ],
    model: opts.ModelToLoad,
    out: Annotated[
        str,
        option(
            "STORE",
            "Where to write the store: a path, or a URL (s3://, gs://, file://). With several corpora, or a "
            "/ at its end: a folder for one store per corpus, named after it.",
        ),
    ],
    made: StoreOptions,
    run_with: RunOptions,
    folders: Folders,
    on: Annotated[
        Path | None,
        option(
            "STORE",
            "A store that the new ones begin as: the corpus is prefilled behind its documents, in the same "
            "way, and its bytes and indexes are shared.",
            parser=a_path,
            callback=lambda store: store and opts.on_this_machine(store),
            autocompletion=opts.stores,
        ),
    ] = None,
    staging: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Where a store for a URL is written before it is pushed.  [default: the user's cache]",
            parser=a_path,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        workers_option(
            "spread the corpora over a Ray cluster. --out is then a URL, or a path that all machines share."
        ),
    ] = None,
    worker_count: opts.WorkerCount = None,
    no_sync: opts.NoSync = False,
    as_json: opts.Json = False,
    quiet: opts.Quiet = False,
) -> None:
    """Run a corpus through a model, once.

    Its keys and values are kept on disk. Text, Markdown, source code, HTML, notebooks, messages, EPUB, Word,
    PowerPoint and OpenDocument files are read; PDF and Excel too, with the extra 'documents'. What is left
    out of a document is told. In a folder, .gitignore files are honoured, and skipped files are named.

    The same command resumes an interrupted prefill, and keeps an existing store of the same tokens, model and
    settings. If one of several corpora fails, or a document of which the tokenizer makes nothing, the others
    continue and it is named at the end.

    What begins as another store (--on) is exact and whole: the other one may change or go, and a copy on
    another file system has all bytes itself. MODEL has to be the one that made it.
    """
    from offload_decode.prefill_jobs.folders import check_corpus

    rules = folders.rules(corpora)
    if len(corpora) == 1:  # one of several that cannot be read does not stop the others
        check_corpus(corpora[0])

    from offload_decode.prefill_jobs.job import prefill as run
    from offload_decode.prefill_jobs.many import Job, is_folder, jobs_of, prefill_many

    settings, chunk = replace(made.settings, base=on and on.absolute()), made.settings.chunk
    if on:
        from offload_decode.prefill_jobs.continuing import method_of, opened

        chunk = method_of(opened(on)).options.chunk
    cluster = cluster_of(workers, worker_count, run_with.gpu_memory, run_with.ram, no_sync=no_sync)
    several = is_folder(corpora, out)
    jobs = jobs_of(corpora, out) if several else [Job(corpora[0], out)]
    given: dict[str, Any] = {"model": model, "settings": settings, "staging": staging, "rules": rules}
    given |= {"device": run_with.device, "dtype": run_with.dtype, "weights": run_with.weights}
    given |= {"adapter": run_with.adapter}
    if cluster is None:
        run_with.admit(model, chunk)
    with Progress(quiet) as progress, files.synced(not no_sync):
        if cluster is not None:
            from offload_decode.prefill_jobs.on_ray.jobs import prefill_on_ray

            maker = run_with.maker(model, settings)
            results = prefill_on_ray(jobs, cluster, maker, staging=staging, rules=rules, progress=progress)
        elif several:
            results = prefill_many(jobs, **given, progress=progress)
        else:
            report = run(corpora[0], out=out, **given, progress=progress)
    if several or cluster is not None:
        _report_all(results, as_json, quiet)
        return
    if as_json:
        output.answer_json(asdict(report))
    loading = output.duration(report.loading)
    before = [f"before that, the model took {loading} to load"] if report.loading else []
    output.note("\n".join([_made(report), *before, checked(model), _next(report)]), quiet)
    exit_on_failures(report.failed)


def _report_all(results: Results, as_json: bool, quiet: bool) -> None:
    """Report what was made, kept and failed; raises `typer.Exit` if anything failed."""
    from offload_decode.prefill_jobs.job import PrefillReport

    reports = {job: found for job, found in results.items() if isinstance(found, PrefillReport)}
    failures = {job: sentence(found) for job, found in results.items() if isinstance(found, Exception)}
    if as_json:
        stores = [{"corpus": job.corpus, **asdict(report)} for job, report in reports.items()]
        failed = [{"corpus": job.corpus, "store": job.store, "error": failures[job]} for job in failures]
        output.answer_json({"stores": stores, "failures": failed})
    for report in reports.values():
        output.note(_made(report), quiet)
    for job, error in failures.items():
        output.note(f"error: {output.one_line(job.corpus)}: {error}")
    kept = sum(report.kept for report in reports.values())
    counts = {"made": len(reports) - kept, "kept": kept, "failed": len(failures)}
    output.note(", ".join(f"{number:,} {what}" for what, number in counts.items() if number), quiet)
    named = [(job, one) for job, report in reports.items() for one in report.failed]
    exit_on_failures([one._replace(name=f"{job.corpus}: {one.name}") for job, one in named])
    if failures:
        raise typer.Exit(FAILURE)
    output.note(_next(next(iter(reports.values()))), quiet)


def exit_on_failures(failed: Sequence[Skipped]) -> None:
    """Name documents that failed while others did not; raises `typer.Exit` where there are some."""
    for one in failed[:_SHOWN]:
        output.note(f"error: {output.one_line(one.name)}: {output.one_line(one.reason)}")
    if (unshown := len(failed) - _SHOWN) > 0:
        output.note(f"error: and {output.count(unshown, 'document')} more (--json lists them)")
    if failed:
        raise typer.Exit(FAILURE)


def _made(report: PrefillReport) -> str:
    contents = f"{report.n_tokens:,} tokens"
    if report.resumed_from and not report.kept:
        contents += f", resumed after {report.resumed_from:,}"
    contents += f", {output.count(report.documents, 'document')}, {output.size(report.bytes)}"
    lines = of_reading(report.skipped, report.notes)
    if report.kept:
        contents = f"kept, it is there already: {contents}"
    elif report.seconds:  # else all that was left was to push it
        contents += (
            f", in {output.duration(report.seconds)} ({report.tokens_per_second:,.0f} tokens/s, "
            f"peak memory {output.size(report.peak_memory)})"
        )
    lines.append(f"{report.store}: {contents}")
    if report.shared or report.copied:
        shared = output.size(report.shared) if report.shared else "nothing (few bytes, or no hard links)"
        lines.append(
            f"shared with the store that it begins as: {shared}; copied: {output.size(report.copied)}"
        )
    lines += [index.summary(kind) for kind in report.indexes]
    lines += report.left
    if report.pushed:
        lines.append(f"{report.store}: {summary(report.pushed, 'sent')}")
    return "\n".join(lines)


def _next(report: PrefillReport) -> str:
    if "://" in str(report.store):
        return f"fetch it: offload-decode pull {report.store} STORE"
    return f'ask it something: offload-decode ask {report.store} "…"'


def of_reading(skipped: Sequence[Skipped], notes: Sequence[Note]) -> list[str]:
    """Lines on a corpus that was read: the first few skipped files, and the first few notes on documents."""
    from offload_decode.prefill_jobs.corpus import first_notes

    shown = map(output.one_line, first_notes(notes, _SHOWN, " (--json lists them)"))
    return [*([_skipped_files(skipped)] if skipped else []), *shown]


def _skipped_files(skipped: Sequence[Skipped]) -> str:
    """The first few skipped files; those that the user excluded come last."""
    from offload_decode.prefill_jobs.folders import LEFT_OUT, LINK

    ordered = sorted(skipped, key=lambda one: one.reason in LEFT_OUT)
    named = "; ".join(f"{output.one_line(one.name)} ({one.reason})" for one in ordered[:_SHOWN])
    more = f"; and {len(ordered) - _SHOWN:,} more (--json lists them)" if len(ordered) > _SHOWN else ""
    links = any(one.reason.startswith(LINK) for one in ordered)
    hint = "; --follow-links follows symbolic links" if links else ""
    return f"skipped {output.count(len(ordered), 'file')}: {named}{more}{hint}"
