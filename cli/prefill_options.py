"""The groups of options of `prefill` and `collect`: what a store holds, and where its model runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from offload_decode.cli import output
from offload_decode.cli.limits import caps_of
from offload_decode.cli.options import Device, GpuMemory, Ram, option, prefill_methods, token_count
from offload_decode.config import split_pairs
from offload_decode.demo_models import QUOTED

if TYPE_CHECKING:
    from offload_decode.prefill_jobs.job import Settings


PrefillModel = Annotated[
    str, option("M", f"{QUOTED} (shipped), a transformers id, a model's folder, or a .gguf file.")
]


@dataclass(frozen=True)
class StoreOptions:
    """What a store holds of its text: options as they were written."""

    method: Annotated[
        str,
        option(
            "NAME",
            "dense (exact), quoka, sample, window, or an extension's; see docs/prefill.md.",
            autocompletion=prefill_methods,
        ),
    ] = "dense"
    options: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Option of the method, such as chunk=512 (tokens in one forward pass) or budget=25%; repeatable.",
            "-o",
            "--option",
        ),
    ] = None
    kv: Annotated[str, option("K", "Keys and values as auto (the model's dtype), int8 or int4-values.")] = (
        "auto"
    )
    context: Annotated[
        str | None,
        option(
            "N",
            "Tokens to allow for a conversation after the corpus, for models whose rotation depends on the "
            "total length (longrope, dynamic).  [default: 4K, or the rest of the length that needs no "
            "scaling]",
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
        return Settings(self.method, split_pairs(self.options or []), self.query_samples, self.kv, follow)


@dataclass(frozen=True)
class RunOptions:
    """Where the model runs, with which dtype and weights, and the memory limits meanwhile."""

    device: Device = "auto"
    dtype: Annotated[str, option("T", "auto (as the model has it), float16, bfloat16 or float32.")] = "auto"
    weights: Annotated[
        str,
        option(
            "W",
            "Weights of the model: auto (unchanged), streamed (to a small GPU layer by layer, with the same "
            "results), int8 or int4; the store records it.",
        ),
    ] = "auto"
    gpu_memory: GpuMemory = None
    ram: Ram = None

    def admit(self, model: str, chunk: int | None) -> None:
        """Apply the limits, and refuse a model that cannot prefill within them: `DoesNotFit`, `ConfigError`
        or `ModelError`. `chunk`: tokens of a forward pass; None takes those that fit.
        """
        caps = caps_of(self.gpu_memory, self.ram)

        from offload_decode.cli.compiling import announce_compiling
        from offload_decode.common.memory import own_memory
        from offload_decode.models.size_estimate import outline
        from offload_decode.planning.caps import apply_caps, check_prefill

        announce_compiling()
        given = outline(model), chunk, self.dtype, self.device, caps, own_memory(), self.weights
        for sentence in check_prefill(*given):
            output.note(sentence)
        apply_caps(caps, self.device)
