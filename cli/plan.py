"""`offload-decode plan`: what fits on a machine, before anything starts."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import output
from offload_decode.cli.options import (
    MODEL_CONFIG,
    Json,
    Options,
    Rope,
    Selector,
    byte_count,
    option,
    token_count,
)
from offload_decode.common.errors import ConfigError
from offload_decode.config import AUTO, split_pairs

if TYPE_CHECKING:
    from offload_decode.planning.plan import Machine, Plan
    from offload_decode.planning.workload import Workload


_OPTIONS = ("budget", "error", "dense_layers", "tail", "index", "page_size", "metadata")


def plan(
    model: Annotated[str, option("M", MODEL_CONFIG)],
    tokens: Annotated[str, option("N", "Tokens of the corpus, such as 50000, 128K or 1M.")],
    gpu: Annotated[
        str | None, option("SIZE", "GPU memory, such as 16GiB, or none.  [default: this machine's]")
    ] = None,
    ram: Annotated[str | None, option("SIZE", "Memory.  [default: this machine's]")] = None,
    disk: Annotated[str | None, option("SIZE", "Room for the store.  [default: what is free here]")] = None,
    kv: Annotated[str, option("K", "auto (the model's dtype), int8 or int4-values.")] = "auto",
    weights: Annotated[
        str,
        option(
            "W",
            "auto (the model's dtype), streamed (to the GPU layer by layer in the prefill), fp16, int8 "
            "or int4.",
        ),
    ] = "auto",
    selector: Selector = AUTO,
    option: Options = None,
    rope: Rope = "",
    chunk: Annotated[
        str, option("N", "Tokens in a forward pass of prefill; auto: 512, or as many as fit a GPU.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Show what fits on a machine, before anything starts.

    Lists the GPU memory, memory and disk that a store needs, and the bytes that each generated token moves.
    If it does not fit, the nearest settings that fit are proposed; exit code 1 means that there are none.
    """
    wanted, options = token_count(tokens), split_pairs(option or [])
    without_gpu = gpu is not None and gpu.lower() == "none"
    sizes = [None if size is None else byte_count(size) for size in (None if without_gpu else gpu, ram, disk)]

    if sys.stderr.isatty():
        output.note("Reading the model's config …")

    from offload_decode.models.size_estimate import estimate_size
    from offload_decode.planning.plan import plan as plan_for
    from offload_decode.planning.proposals import most_tokens, nearest

    rows = None if chunk == "auto" else token_count(chunk)
    request = _request(wanted, rows, kv, weights, selector, options)
    planned = plan_for(estimate_size(model, rope), request, _machine(without_gpu, *sizes))
    proposed = planned if planned.fits else nearest(planned)
    most = None if proposed else most_tokens(planned)
    if as_json:
        output.answer_json(_as_json(planned, proposed, most))
    else:
        parts = [_counts(planned), _needs({"ask": planned, "prefill": planned})]
        parts.append(_verdict(planned, proposed, most))
        if proposed is not None and proposed is not planned:
            parts.append(_needs({"ask": proposed}))
        moved = asdict((proposed or planned).traffic).items()
        parts.append(output.facts([(_MOVED[name], f"{output.size(n)} a token") for name, n in moved if n]))
        output.answer("\n\n".join(parts))
    if proposed is None:
        raise typer.Exit(1)


def _request(
    tokens: int, chunk: int | None, kv: str, weights: str, selector: str, options: dict[str, str]
) -> Workload:
    from offload_decode.planning.workload import Workload, weights_given

    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ConfigError(f"plan has no option '{unknown[0]}'; it has: {', '.join(_OPTIONS)}")
    page = options.pop("page_size", "16")
    if not page.isdecimal():
        raise ConfigError(f"page_size must be a whole number, not '{page}'")
    given: Any = {**options, **weights_given(weights)}
    given |= {"chunk_chosen": True} if chunk is None else {"chunk": chunk}
    return Workload(tokens, kv=kv, selector=selector, page_size=int(page), **given)


def _machine(without_gpu: bool, gpu: int | None, ram: int | None, disk: int | None) -> Machine:
    import torch

    from offload_decode.common.memory import resident, total_memory
    from offload_decode.planning.plan import Machine

    if gpu is None and not without_gpu and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory
    return Machine(gpu, ram or total_memory(), disk or shutil.disk_usage(Path.cwd()).free, resident())


_PLACES = {"gpu": "GPU memory", "ram": "memory", "disk": "disk"}


def _counts(planned: Plan) -> str:
    from offload_decode.indexes.registry import usable
    from offload_decode.models.quantization import FORMATS
    from offload_decode.planning import sizes
    from offload_decode.store.format import kv_kinds
    from offload_decode.types import PAGE_METADATA

    estimate, request = planned.estimate, planned.request
    shape, tokens = estimate.shape, request.tokens
    layers, on_gpu = len(shape.full_layers), planned.machine.gpu is not None
    if estimate.packed:
        whole = sizes.weights_bytes(replace(estimate, packed=0), "auto")
        weights = [(FORMATS[estimate.format].name, estimate.packed), (estimate.dtype, whole)]
    else:
        weights = [
            (estimate.dtype if name == "auto" else name, sizes.weights_bytes(estimate, name, on_gpu))
            for name in (("auto", "int8", "int4") if estimate.linear else ("auto",))
        ]
    stores = [(kv, sizes.store_bytes(shape, tokens, kv, estimate.dtype)) for kv in kv_kinds(shape)]
    bounds = [
        (f"{page} tokens in {kind}", sizes.page_bytes(shape, tokens, page, kind, layers))
        for page in (16, 32, 64)
        for kind in PAGE_METADATA
    ]
    positions = estimate.lengths.describe(estimate.lengths.chosen(tokens))
    given = (shape, tokens, request.kv, estimate.dtype)
    costs = {kind: sizes.index_costs(kind, *given) for kind in usable()}
    indexes = [(kind, layers * (cost.memory or cost.file)) for kind, cost in costs.items()]
    each = output.size(planned.kv_bytes / tokens)
    facts = [("model", f"{estimate.model_id}: {estimate.parameters / 1e9:,.3g} billion parameters")]
    facts.append(("corpus", f"{tokens:,} tokens, {each} of keys and values each"))
    facts += [("positions", positions)] if positions else []
    facts += [("note", note)] if (note := estimate.trained.note(tokens)) else []
    listed = {"weights": weights, "store": stores, "page bounds": bounds, "indexes": indexes}
    for name, amounts in listed.items():
        facts.append((name, ", ".join(f"{one} {output.size(amount)}" for one, amount in amounts)))
    return output.facts(facts)


def _needs(plans: dict[str, Plan]) -> str:
    from offload_decode.planning.plan import Medium

    rows = [("", "where", "takes", "of")]
    for job, shown in plans.items():
        parts = shown.asking if job == "ask" else shown.prefilling
        for place in Medium:
            available = shown.machine.size(place)
            needed = [part for part in parts if part.place is place]
            rows += [(f"{job}: {part.name}", _PLACES[place], output.size(part.bytes), "") for part in needed]
            if need := shown.need(place, parts):
                verdict = "fits" if need <= available else "does not fit"
                rows.append((f"{job}: {verdict}", _PLACES[place], output.size(need), output.size(available)))
    return output.table(rows)


def _settings(before: Plan, after: Plan, given: dict[str, object] | None = None) -> str:
    """The settings in which two plans differ, after those `given`, as options; their tokens are not named."""
    from offload_decode.planning.caps import described
    from offload_decode.planning.proposals import changes

    different = (given or {}) | changes(before.request, after.request)
    different.pop("tokens", None)
    return described(different)


def _verdict(planned: Plan, proposed: Plan | None, most: Plan | None) -> str:
    from offload_decode.planning.proposals import least_machine

    if proposed is planned:
        lines = ["It fits: the store can be kept here and asked."]
    elif proposed is not None:
        lines = [f"It does not fit. This does: {_settings(planned, proposed)}"]
    else:
        needs = least_machine(planned).items()
        machine = ", ".join(f"{output.size(need)} of {_PLACES[place]}" for place, need in needs)
        lines = [f"It does not fit, whatever the settings. The least it takes is {machine}."]
        if most is not None:
            tokens, settings = most.request.tokens, _settings(planned, most)
            lines.append(f"The most that fits here is {tokens:,} tokens, with {settings}.")
    shown = proposed or most
    if shown is not None:
        lines += [_prefill_verdict(shown, "It" if proposed else "So many"), *_paging(shown)]
    return "\n".join(lines)


def _prefill_verdict(planned: Plan, what: str) -> str:
    from offload_decode.planning.proposals import nearest_prefill

    fits = nearest_prefill(planned)
    if fits is None:
        return f"{what} cannot be prefilled here: do that on a larger machine, and bring the store."
    few = fits.request.weights in ("int8", "int4") and not fits.request.streamed
    chosen: dict[str, object] = {"streamed": fits.request.streamed}
    settings = _settings(planned, fits, chosen | ({"weights": fits.request.weights} if few else {}))
    also = ""
    if few:
        if fits.changed(weights="auto").prefill_fits:
            also = ", or with full weights"
        elif fits.can_stream and fits.changed(weights="auto", streamed=True).prefill_fits:
            also = ", or with full weights by --weights streamed"
    return f"{what} can be prefilled here{f' with {settings}' if settings else ''}{also}."


def _paging(planned: Plan) -> list[str]:
    from offload_decode.planning.proposals import nearest

    if not planned.from_disk:
        kept = output.size(planned.kv_bytes)
        return [f"Its keys and values stay in memory: {kept} more, mapped, which the system drops at need."]
    kept, left, read = map(output.size, (planned.kv_bytes, planned.spare_ram, planned.from_disk))
    lines = [
        f"Its {kept} of keys and values do not stay in the {left} of memory that are left: each token reads "
        f"up to {read} from the disk."
    ]
    if smaller := nearest(planned, in_memory=True):
        lines.append(f"They would stay in memory with {_settings(planned, smaller)}")
    return lines


_MOVED = {
    "weights": "weights read",
    "pages": "page bounds read",
    "scanned": "keys scanned",
    "gathered": "rows gathered",
    "attended": "dense layers read",
    "bus": "over the bus",
}


def _as_json(planned: Plan, proposed: Plan | None, most: Plan | None) -> dict[str, object]:
    from offload_decode.planning.proposals import changes, least_machine, prefill_chunk

    def one(shown: Plan | None) -> dict[str, object] | None:
        if shown is None:
            return None
        request, differs = asdict(shown.request), changes(planned.request, shown.request)
        return (
            {"request": request, "fits": shown.fits, "changes": differs}
            | {"ask": list(map(asdict, shown.asking)), "prefill": list(map(asdict, shown.prefilling))}
            | {"prefill_chunk": prefill_chunk(shown), "lacking": shown.lacking()}
            | {"traffic": asdict(shown.traffic), "from_disk": shown.from_disk}
        )

    return {
        "model": planned.estimate.model_id,
        "note": planned.estimate.trained.note(planned.request.tokens) or None,
        "positions": asdict(planned.estimate.lengths.chosen(planned.request.tokens)),
        "machine": asdict(planned.machine),
        "asked": one(planned),
        "proposed": one(proposed),
        "most_tokens": one(most),
        "least_machine": None if proposed else least_machine(planned),
    }
