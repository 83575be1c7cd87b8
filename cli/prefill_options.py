"""How stores are made: the options that `prefill` and `collect` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli import options as completion
from offload_decode.cli.limits import admit_prefill
from offload_decode.cli.options import Device, GpuMemory, Ram, token_count
from offload_decode.config import split_pairs

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.job import Settings


@dataclass(frozen=True)
class Making:
    """A prefill's options as they were written."""

    method: str
    options: list[str]
    kv: str
    context: str | None
    query_samples: int

    @property
    def settings(self) -> Settings:
        """What they say; raises `ConfigError`."""
        from offload_decode.prefill_jobs.job import Settings

        follow = None if self.context is None else token_count(self.context)
        return Settings(self.method, split_pairs(self.options), self.query_samples, self.kv, follow)


def making(
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="dense (exact), quoka, sample, window, or an extension's; see docs/prefill.md.",
            autocompletion=completion.prefill_methods,
        ),
    ] = "dense",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o",
            "--option",
            metavar="KEY=VALUE",
            help="Option of the method, such as chunk=512 (tokens in one forward pass) or budget=25%; "
            "repeatable.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        str,
        typer.Option(metavar="K", help="Keys and values as auto (the model's dtype), int8 or int4-values."),
    ] = "auto",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="The most tokens that will follow the corpus in a conversation, for models whose rotation "
            "depends on the length of the whole (longrope, dynamic).  [default: 4K, or what is left of the "
            "length that needs no scaling]",
            show_default=False,
        ),
    ] = None,
    query_samples: Annotated[
        int,
        typer.Option(
            metavar="N", help="Prefill queries to keep for each KV head, to tune indexes with.", min=1
        ),
    ] = 1024,
) -> Making:
    """The options that say what a store holds of its text."""
    return Making(method, option or [], kv, context, query_samples)


@dataclass(frozen=True)
class Running:
    """Where and in which numbers the model prefills, and the caps that hold while it does."""

    device: str
    dtype: str
    weights: str
    gpu_memory: str | None
    ram: str | None

    def admit(self, model: str, chunk: int | None) -> None:
        """As `admit_prefill`."""
        admit_prefill(model, chunk, self.device, self.dtype, self.weights, self.gpu_memory, self.ram)


def running(
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(metavar="T", help="auto (as the model has it), float16, bfloat16 or float32.")
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            metavar="W",
            help="Weights of the model: auto (as it has them); for a small card, streamed (there layer by "
            "layer: the same numbers), or fewer bits, int8 or int4; the store says so.",
        ),
    ] = "auto",
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
) -> Running:
    """The options that say how a model is run for a prefill."""
    return Running(device, dtype, weights, gpu_memory, ram)
