"""The options that `prefill` and `collect` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from offload_decode.cli.limits import admit_prefill
from offload_decode.cli.options import Device, GpuMemory, Ram, option, prefill_methods, token_count
from offload_decode.config import split_pairs

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.job import Settings


@dataclass(frozen=True)
class StoreOptions:
    """What a store holds of its text: options as they were written."""

    method: str
    options: list[str]
    kv: str
    context: str | None
    query_samples: int

    @property
    def settings(self) -> Settings:
        """The options, checked; raises `ConfigError`."""
        from offload_decode.prefill_jobs.job import Settings

        follow = None if self.context is None else token_count(self.context)
        return Settings(self.method, split_pairs(self.options), self.query_samples, self.kv, follow)


def store_options(
    method: Annotated[
        str,
        option(
            "NAME",
            "dense (exact), quoka, sample, window, or an extension's; see docs/prefill.md.",
            autocompletion=prefill_methods,
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
        ),
    ] = None,
    kv: Annotated[
        str, option("K", "Keys and values as auto (the model's dtype), int8 or int4-values.")
    ] = "auto",
    context: Annotated[
        str | None,
        option(
            "N",
            "Tokens to allow for a conversation after the corpus, for models whose rotation depends on the "
            "total length (longrope, dynamic).  [default: 4K, or the rest of the length that needs no "
            "scaling]",
        ),
    ] = None,
    query_samples: Annotated[
        int, option("N", "Prefill queries to keep for each KV head, to tune indexes with.", min=1)
    ] = 1024,
) -> StoreOptions:
    """The options for what a store holds of its text."""
    return StoreOptions(method, option or [], kv, context, query_samples)


@dataclass(frozen=True)
class RunOptions:
    """Where the model runs, with which dtype and weights, and the memory limits meanwhile."""

    device: str
    dtype: str
    weights: str
    gpu_memory: str | None
    ram: str | None

    def admit(self, model: str, chunk: int | None) -> None:
        """Raises as `admit_prefill` does."""
        admit_prefill(model, chunk, self.device, self.dtype, self.weights, self.gpu_memory, self.ram)


def run_options(
    device: Device = "auto",
    dtype: Annotated[str, option("T", "auto (as the model has it), float16, bfloat16 or float32.")] = "auto",
    weights: Annotated[
        str,
        option(
            "W",
            "Weights of the model: auto (unchanged), streamed (to a small GPU layer by layer, with the same "
            "results), int8 or int4; the store records it.",
        ),
    ] = "auto",
    gpu_memory: GpuMemory = None,
    ram: Ram = None,
) -> RunOptions:
    """The options for how a model runs in a prefill."""
    return RunOptions(device, dtype, weights, gpu_memory, ram)
