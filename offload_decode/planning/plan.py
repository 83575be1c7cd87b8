"""What a request takes on a machine, and whether it fits there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

from offload_decode.common.errors import ConfigError
from offload_decode.common.rows import threads
from offload_decode.config import STREAMED
from offload_decode.kv import placement
from offload_decode.models.layer_streaming import NO_CARD
from offload_decode.models.quantization import FORMATS, GGUF, check_weights_of
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.planning import sizes, workload
from offload_decode.planning.workload import OWN, Workload, in_dtype

CUDA_BYTES = 512 << 20
"""What CUDA itself takes of a GPU's memory, beyond all tensors."""
PROGRAM_BYTES, TOKEN_BYTES = 80 << 20, 350
"""What the program grows by when it first computes: modelling code, compiled loops, and the bytes of a
tokenizer for each entry of its vocabulary. Measured.
"""
_FILE_PAGE = 4096  # what a row that memory does not hold costs at least


class Medium(StrEnum):
    """Where bytes lie."""

    GPU = "gpu"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True)
class Machine:
    """Bytes that a plan may use; `gpu`: None on a CPU; `held`: by this process before it loads a model."""

    gpu: int | None
    ram: int
    disk: int
    held: int

    def size(self, place: Medium) -> int:
        return {Medium.GPU: self.gpu or 0, Medium.RAM: self.ram, Medium.DISK: self.disk}[place]


@dataclass(frozen=True)
class Part:
    """Bytes that something takes."""

    name: str
    place: Medium
    bytes: int


@dataclass(frozen=True)
class Traffic:
    """Bytes for each generated token. `weights`: read on the device. `pages`: bounds read there, or keys of
    the model's own index. `scanned`: what a search of the indexes reads in host memory. `gathered`: rows
    fetched from all over it, the most that the query heads of a group can want. `attended`: rows read one
    after another for dense layers. `bus`: what of these goes to a GPU; 0 without one.
    """

    weights: int
    pages: int
    scanned: int
    gathered: int
    attended: int
    bus: int


def traffic(estimate: SizeEstimate, request: Workload, on_gpu: bool) -> Traffic:
    """For one conversation, one token at a time."""
    shape, n, given = estimate.shape, request.tokens, (request.kv, estimate.dtype)
    pair, (_, value) = sizes.pair_bytes(shape, *given), sizes.row_bytes(shape, *given)
    pages = scanned = gathered = attended = 0
    for k in request.budgets(shape).values():
        if k is None:
            attended += shape.kv_heads * n * pair
        elif request.selector == "quest":
            pages += sizes.page_bytes(shape, n, request.page_size, request.metadata, 1)
            gathered += shape.kv_heads * min(n, k) * pair
        elif request.selector == OWN:
            pages += sizes.index_key_bytes(shape, n, estimate.dtype)
            gathered += shape.kv_heads * k * pair
        else:
            # A group shares Quest's pages, and here what is scanned. Scores of what is found are known.
            scanned += sizes.index_costs(request.index, shape, n, *given, k, shape.group).read
            gathered += shape.kv_heads * min(n, shape.group * k) * value
    weights = sizes.active_weights_bytes(estimate, request.weights, on_gpu)
    return Traffic(weights, pages, scanned, gathered, attended, gathered + attended if on_gpu else 0)


@dataclass(frozen=True)
class Plan:
    """A request on a machine. `asking` and `prefilling` list what each of the two takes. `source` is the
    model as its checkpoint has it, `estimate` as the request runs it.
    """

    source: SizeEstimate
    estimate: SizeEstimate
    request: Workload
    machine: Machine
    asking: tuple[Part, ...]
    prefilling: tuple[Part, ...]

    def changed(self, **settings: Any) -> Plan:
        """The plan of a request with other settings."""
        return plan(self.source, replace(self.request, **settings), self.machine)

    @property
    def can_stream(self) -> bool:
        """Whether a prefill here may have this model's weights streamed."""
        return self.machine.gpu is not None and self.source.format in ("", GGUF) and self.source.layered > 0

    @property
    def fits(self) -> bool:
        """Whether a store of that kind can be kept here and asked."""
        return not self.lacking()

    @property
    def prefill_fits(self) -> bool:
        """Whether it can be made here too."""
        return not self.lacking(self.prefilling)

    def need(self, place: Medium, parts: tuple[Part, ...] | None = None) -> int:
        """Bytes that are needed there, for asking unless other parts are given."""
        return sum(part.bytes for part in (self.asking if parts is None else parts) if part.place is place)

    def lacking(self, parts: tuple[Part, ...] | None = None) -> dict[Medium, int]:
        """Bytes that are missing, by place."""
        missing = {place: self.need(place, parts) - self.machine.size(place) for place in Medium}
        return {place: size for place, size in missing.items() if size > 0}

    @cached_property
    def traffic(self) -> Traffic:
        """Bytes that one generated token moves."""
        return traffic(self.estimate, self.request, self.machine.gpu is not None)

    @property
    def spare_ram(self) -> int:
        """Memory that is left for the store's pages."""
        return max(0, self.machine.ram - self.need(Medium.RAM))

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the store."""
        shape, dtype = self.estimate.shape, self.estimate.dtype
        return self.request.tokens * sizes.kv_token_bytes(shape, self.request.kv, dtype)

    @property
    def from_disk(self) -> int:
        """Bytes of a token that come from the disk, at worst, because memory does not hold the store. What
        is read from end to end stays if all of it fits; otherwise each pass pushes out what the next wants.
        """
        if self.spare_ram >= self.kv_bytes:
            return 0
        moved = self.traffic
        row = max(sizes.row_bytes(self.estimate.shape, self.request.kv, self.estimate.dtype))
        gathered = moved.gathered * max(1, _FILE_PAGE // row)
        in_order = moved.scanned + moved.attended
        return gathered if self.spare_ram >= in_order else gathered + in_order


def plan(estimate: SizeEstimate, request: Workload, machine: Machine) -> Plan:
    """Count what the request takes on that machine. Raises `ConfigError` for weights that the model's
    checkpoint cannot be quantized to, and for such as are streamed where there is no GPU, or are in few bits;
    and for a selector that the model does not have.
    """
    request = request.resolved(estimate.shape)
    check_weights_of(estimate.format, STREAMED if request.streamed else request.weights)
    if request.streamed and machine.gpu is None:
        raise ConfigError(NO_CARD)
    if request.chunk_chosen:
        request = replace(request, chunk=chosen_chunk(estimate, request, machine))
    run = in_dtype(estimate, request.weights)
    asking, prefilling = (parts(run, request, machine) for parts in (_asking, _prefilling))
    return Plan(estimate, run, request, machine, asking, prefilling)


def card_room(estimate: SizeEstimate, request: Workload, gpu: int) -> int:
    """Bytes of a card that a prefill has beside the weights: CUDA takes some, and some is left free."""
    weights = sizes.weights_bytes(estimate, request.weights, True)
    if request.streamed:
        weights = sizes.streamed_bytes(estimate)
    return gpu - CUDA_BYTES - weights - gpu // placement.RESERVE


def chosen_chunk(source: SizeEstimate, request: Workload, machine: Machine) -> int:
    """Tokens of a forward pass of the prefill where nobody says how many."""
    if machine.gpu is None:
        return sizes.CPU_CHUNK
    run = in_dtype(source, request.weights)
    return sizes.largest_chunk(run, card_room(run, request, machine.gpu), request.tokens, request.kv)


def _asking(estimate: SizeEstimate, request: Workload, machine: Machine) -> tuple[Part, ...]:
    shape, device = estimate.shape, Medium.RAM if machine.gpu is None else Medium.GPU
    on_gpu = device is Medium.GPU
    searched = [k for k in request.budgets(shape).values() if k is not None]
    parts = [
        *_program(device, machine, estimate),
        _weights(estimate, request.weights, device),
        Part("question and answer", device, workload.ask_bytes(estimate, request, on_gpu)),
        Part("search", Medium.RAM, workload.search_bytes(estimate, request, threads.THREADS)),
        Part("unselected tokens", Medium.RAM, workload.unselected_bytes(estimate, request)),
        Part("store", Medium.DISK, _store_bytes(estimate, request)),
    ]
    if shape.state_layers:
        parts.append(Part("recurrent states", device, sizes.states_bytes(shape, request.batch)))
    if on_gpu:
        parts.append(Part("device cache", Medium.GPU, request.device_cache))
        staged = workload.staged_bytes(estimate, request)
        parts.append(Part("rows on their way to the GPU", Medium.RAM, staged))
    if request.selector == "quest":
        pages = sizes.page_bytes(shape, request.tokens, request.page_size, request.metadata, len(searched))
        parts.append(Part("page bounds", device, pages))
    if request.selector == OWN:
        held = len(searched) * sizes.index_key_bytes(shape, request.tokens, estimate.dtype)
        parts.append(Part("the model's index keys", device, held))
    if request.selector == "topk":
        layer = sizes.index_costs(request.index, shape, request.tokens, request.kv, estimate.dtype)
        for place, size in ((Medium.RAM, layer.memory), (Medium.DISK, layer.file)):
            parts.append(Part(f"indexes ({request.index})", place, len(shape.full_layers) * size))
    return tuple(part for part in parts if part.bytes)


def _prefilling(estimate: SizeEstimate, request: Workload, machine: Machine) -> tuple[Part, ...]:
    device = Medium.RAM if machine.gpu is None else Medium.GPU
    given = request.chunk, request.tokens, device is Medium.GPU, request.kv
    chunk = sizes.prefill_bytes(estimate, *given)
    weights = [_weights(estimate, request.weights, device)]
    if request.streamed:
        weights = [
            Part(f"weights ({estimate.dtype}, streamed)", device, sizes.streamed_bytes(estimate)),
            Part(f"weights ({estimate.dtype}, pinned)", Medium.RAM, sizes.waiting_bytes(estimate)),
        ]
    return (
        *_program(device, machine, estimate),
        *weights,
        Part("tokenizing", Medium.RAM, request.tokens * sizes.CHARACTERS * sizes.TOKENIZING_BYTES),
        Part("a chunk and what it attends to", device, chunk + sizes.states_bytes(estimate.shape, 1)),
        Part("a chunk on its way to the disk", Medium.RAM, sizes.staging_bytes(estimate, *given)),
        Part("store", Medium.DISK, _store_bytes(estimate, request)),
    )


def _program(device: Medium, machine: Machine, estimate: SizeEstimate) -> list[Part]:
    grown = PROGRAM_BYTES + TOKEN_BYTES * estimate.vocabulary
    program = Part("program", Medium.RAM, machine.held + grown)
    return [Part("CUDA", Medium.GPU, CUDA_BYTES), program] if device is Medium.GPU else [program]


def _weights(estimate: SizeEstimate, weights: str, device: Medium) -> Part:
    on_gpu = device is Medium.GPU
    own = FORMATS[estimate.format].name if estimate.runs_packed(on_gpu) else estimate.dtype
    named = own if weights == "auto" else weights
    return Part(f"weights ({named})", device, sizes.held_weights_bytes(estimate, weights, on_gpu))


def _store_bytes(estimate: SizeEstimate, request: Workload) -> int:
    return sizes.store_bytes(estimate.shape, request.tokens, request.kv, estimate.dtype, request.chunk)
