"""`offload-decode plan`: what fits, before anything starts."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offload_decode.cli import output, plan_report
from offload_decode.cli.counts import byte_count, token_count
from offload_decode.cli.options import Json, Options, Selector
from offload_decode.config import split_pairs
from offload_decode.demo_models import QUOTED
from offload_decode.errors import ConfigError

if TYPE_CHECKING:
    from offload_decode.planning.plan import Plan
    from offload_decode.planning.prefill_time import PrefillTime
    from offload_decode.planning.request import Workload
    from offload_decode.planning.traffic import Speed

_OPTIONS = ("budget", "dense_layers", "index", "page_size", "metadata")


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="M",
            help=f"{QUOTED} (shipped), a transformers id, a folder or a .gguf file; only its config is read.",
        ),
    ],
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens of the corpus, such as 50000, 128K or 1M.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="GPU memory, such as 16GiB, or none.  [default: this machine's]",
            show_default=False,
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory.  [default: this machine's]", show_default=False),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Room for the store.  [default: what is free here]", show_default=False
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option(metavar="K", help="auto (the model's dtype), int8 or int4-values.")
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            metavar="W",
            help="auto (the model's dtype), streamed (to the GPU layer by layer in the prefill), fp16, int8 "
            "or int4.",
        ),
    ] = "auto",
    selector: Selector = "topk",
    option: Options = None,
    chunk: Annotated[
        str,
        typer.Option(
            metavar="N", help="Tokens in a forward pass of prefill; auto: 512, or as many as fit a GPU."
        ),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Say what fits on a machine, before anything starts.

    Lists the GPU memory, memory and disk that a store would take, what each generated token moves, and the
    tokens/s to expect at bandwidths that are measured here and now. If it does not fit, the nearest settings
    that do are proposed. Exit code 1: nothing near it fits.
    """
    wanted, options = token_count(tokens), split_pairs(option or [])
    without_gpu = gpu is not None and gpu.lower() == "none"
    sizes = [None if size is None else byte_count(size) for size in (None if without_gpu else gpu, ram, disk)]

    if sys.stderr.isatty():
        output.note("Reading the model's config and measuring this machine …")

    with _uncollected():
        from offload_decode.models.outline import outline
        from offload_decode.planning.nearest import most_tokens, nearest
        from offload_decode.planning.plan import plan as plan_for

        rows = None if chunk == "auto" else token_count(chunk)
        request = _request(wanted, rows, kv, weights, selector, options)
        planned = plan_for(outline(model), request, _machine(sizes, without_gpu))
        proposed = planned if planned.fits else nearest(planned)
        most = None if proposed else most_tokens(planned)
        speed = _speed(proposed or planned)
        prefill = _prefill_time(proposed or planned)
    if as_json:
        output.answer_json(plan_report.as_json(planned, proposed, most, speed, prefill))
    else:
        plan_report.show(planned, proposed, most, speed, prefill)
    if proposed is None:
        raise typer.Exit(1)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Imports make no garbage, and to look for some takes a fifth of their time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _request(
    tokens: int, chunk: int | None, kv: str, weights: str, selector: str, options: dict[str, str]
) -> Workload:
    from offload_decode.planning.request import Workload, weights_given

    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ConfigError(f"plan has no option '{unknown[0]}'; it has: {', '.join(_OPTIONS)}")
    page = options.pop("page_size", "16")
    if not page.isdecimal():
        raise ConfigError(f"page_size must be a whole number, not '{page}'")
    given: Any = {**options, **weights_given(weights)}
    given |= {"chunk_chosen": True} if chunk is None else {"chunk": chunk}
    return Workload(tokens, kv=kv, selector=selector, page_size=int(page), **given)


def _machine(sizes: list[int | None], without_gpu: bool) -> Any:
    import torch

    from offload_decode.memory import own_memory, total_memory
    from offload_decode.planning.caps import free_space
    from offload_decode.planning.plan import Machine

    gpu, ram, disk = sizes
    if gpu is None and not without_gpu and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0).total_memory
    return Machine(gpu, ram or total_memory(), disk or free_space(Path.cwd()), own_memory())


def _speed(planned: Plan) -> Speed:
    """Expected with the bandwidths of this machine; of a GPU that is not here only the host's part."""
    import torch

    from offload_decode.cli.compiling import tell_of_compiling
    from offload_decode.planning.bandwidth import measure, measure_disk
    from offload_decode.planning.traffic import speed

    tell_of_compiling()
    outline = planned.outline
    device = "cuda" if planned.machine.gpu and torch.cuda.is_available() else "cpu"
    weights = planned.traffic.weights
    measured = measure(outline.shape, outline.dtype, planned.request, device, weights)
    disk = measure_disk(Path.cwd()) if planned.from_disk else None
    return speed(planned.traffic, measured, planned.from_disk, disk)


def _prefill_time(planned: Plan) -> PrefillTime | None:
    """Expected of a dense prefill as it fits here; None where none does, and for a GPU that is not here."""
    import torch

    from offload_decode.planning.nearest import nearest_prefill
    from offload_decode.planning.prefill_rates import measure_prefill
    from offload_decode.planning.prefill_time import expected_prefill

    fits = nearest_prefill(planned)
    if fits is None or (fits.machine.gpu and not torch.cuda.is_available()):
        return None
    device = "cuda" if fits.machine.gpu else "cpu"
    return expected_prefill(fits, measure_prefill(fits.outline, fits.request, device, Path.cwd()))
