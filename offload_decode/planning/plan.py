"""What fits on a machine, what it would cost there, and the nearest thing that fits where this does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cached_property
from itertools import product
from typing import Any

from indexes.rows import pool
from offload_decode.config import STREAMED
from offload_decode.errors import ConfigError
from offload_decode.kv import card
from offload_decode.models.formats import FORMATS, GGUF, check_weights_of
from offload_decode.models.outline import Outline
from offload_decode.models.streamed import NO_CARD
from offload_decode.planning import sizes
from offload_decode.planning.request import KV, WEIGHTS, Workload, in_dtype
from offload_decode.planning.traffic import Traffic, traffic
from offload_decode.store.format import kv_kinds
from offload_decode.types import PAGE_METADATA

CUDA_BYTES = 512 << 20
"""What CUDA itself takes of a GPU's memory, beyond all tensors."""
PROGRAM_BYTES = 48 << 20
"""What the program grows by when it first computes: modelling code, tokenizer, compiled kernels. Measured."""
LEAST_CHUNK = 16
"""The smallest chunk of a prefill that is proposed."""
_PAGE_SIZES = (16, 32, 64, 128)
_FILE_PAGE = 4096  # what a row that memory does not hold costs at least


class Medium(StrEnum):
    """Where bytes lie."""

    GPU = "gpu"
    RAM = "ram"
    DISK = "disk"


@dataclass(frozen=True)
class Machine:
    """Bytes that a plan may use; `gpu` is None where all is computed on the CPU. `held`: what this process
    holds before it loads a model.
    """

    gpu: int | None
    ram: int
    disk: int
    held: int

    def size(self, place: Medium) -> int:
        """Bytes there."""
        return {Medium.GPU: self.gpu or 0, Medium.RAM: self.ram, Medium.DISK: self.disk}[place]


@dataclass(frozen=True)
class Part:
    """Bytes that something takes."""

    name: str
    place: Medium
    bytes: int


@dataclass(frozen=True)
class Plan:
    """A request on a machine. `asking` and `prefilling` list what each of the two takes. `source` is the
    model as its checkpoint has it, `outline` as the request runs it.
    """

    source: Outline
    outline: Outline
    request: Workload
    machine: Machine
    asking: tuple[Part, ...]
    prefilling: tuple[Part, ...]

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
        return traffic(self.outline, self.request, self.machine.gpu is not None)

    @property
    def spare_ram(self) -> int:
        """Memory that is left for the store's pages."""
        return max(0, self.machine.ram - self.need(Medium.RAM))

    @property
    def kv_bytes(self) -> int:
        """Keys and values of the store."""
        shape, dtype = self.outline.shape, self.outline.dtype
        return self.request.tokens * sizes.kv_token_bytes(shape, self.request.kv, dtype)

    @property
    def from_disk(self) -> int:
        """Bytes of a token that come from the disk, at worst, because memory does not hold the store. What
        is read from end to end stays if all of it fits; otherwise each pass pushes out what the next wants.
        """
        if self.spare_ram >= self.kv_bytes:
            return 0
        moved = self.traffic
        row = max(sizes.row_bytes(self.outline.shape, self.request.kv, self.outline.dtype))
        gathered = moved.gathered * max(1, _FILE_PAGE // row)
        in_order = moved.scanned + moved.attended
        return gathered if self.spare_ram >= in_order else gathered + in_order


def plan(outline: Outline, request: Workload, machine: Machine) -> Plan:
    """Count what the request takes on that machine. Raises `ConfigError` for weights that the model's
    checkpoint cannot be quantised to, and for such as are streamed where there is no GPU, or are in few bits.
    """
    check_weights_of(outline.format, STREAMED if request.streamed else request.weights)
    if request.streamed and machine.gpu is None:
        raise ConfigError(NO_CARD)
    if request.chunk_chosen:
        request = replace(request, chunk=chosen_chunk(outline, request, machine))
    run = in_dtype(outline, request.weights)
    asking, prefilling = (parts(run, request, machine) for parts in (_asking, _prefilling))
    return Plan(outline, run, request, machine, asking, prefilling)


def nearest(asked: Plan, kinds: Sequence[str] = KV, in_memory: bool = False) -> Plan | None:
    """The plan that fits and differs least from the one that was asked for: itself, or another with fewer
    bits, another selector or larger pages; None where nothing of that kind fits. `kinds`: ways of storing
    keys and values that can still be chosen. `in_memory`: nothing of the store is to come from the disk.
    """
    source, machine = asked.source, asked.machine
    there = kinds is not KV  # and a store that is there is asked in its own dtype
    requests = (
        one
        for one in _alternatives(asked.request, source)
        if one.kv in kinds and not (there and one.weights == "fp16")
    )
    plans = (plan(source, request, machine) for request in requests)
    return next((one for one in plans if one.fits and not (in_memory and one.from_disk)), None)


def most_tokens(asked: Plan) -> Plan | None:
    """Where no settings fit: the plan for the most tokens that do, in the fewest bits; None where not even
    the weights do.
    """
    thrifty = _thriftiest(asked)

    def at(tokens: int) -> Plan:
        return plan(asked.source, replace(thrifty.request, tokens=tokens), asked.machine)

    fits, beyond = 0, asked.request.tokens
    while beyond - fits > max(1, fits // 1000):
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if at(middle).fits else (fits, middle)
    return at(fits) if fits else None


def least_machine(asked: Plan) -> dict[Medium, int]:
    """The bytes of each place with which so many tokens would do, in the fewest bits."""
    thrifty = _thriftiest(asked)
    return {place: thrifty.need(place) for place in Medium if place is not Medium.GPU or asked.machine.gpu}


def card_room(outline: Outline, request: Workload, gpu: int) -> int:
    """Bytes of a card that a prefill has beside the weights: CUDA takes some, and some is left free."""
    streamed = request.streamed
    weights = (
        sizes.streamed_bytes(outline) if streamed else sizes.weights_bytes(outline, request.weights, True)
    )
    return gpu - CUDA_BYTES - weights - gpu // card.RESERVE


def chosen_chunk(source: Outline, request: Workload, machine: Machine) -> int:
    """Tokens of a forward pass of the prefill where nobody says how many."""
    if machine.gpu is None:
        return sizes.CPU_CHUNK
    run = in_dtype(source, request.weights)
    room = card_room(run, request, machine.gpu)
    return sizes.largest_chunk(run, room, request.tokens, request.kv)


def prefill_chunk(asked: Plan) -> int | None:
    """The largest chunk, up to the one asked for, with which the prefill fits here; None if none does."""
    chunk = asked.request.chunk
    while chunk >= LEAST_CHUNK:
        if plan(asked.source, _in_chunks(asked.request, chunk), asked.machine).prefill_fits:
            return chunk
        chunk //= 2
    return None


def nearest_prefill(asked: Plan) -> Plan | None:
    """The prefill that fits and differs least from the one asked for, in smaller chunks, or else with weights
    that are streamed, or are in fewer bits; None where nothing fits.
    """
    request, source, machine = asked.request, asked.source, asked.machine
    rungs, ways = _rungs(request.weights, source), [request]
    if can_stream(source, machine) and request.weights == "auto" and not request.streamed:
        # Before chunks that are smaller than any that is chosen, before which weights would come as often.
        first = request.chunk_chosen and not asked.prefill_fits
        ways.insert(0 if first else 1, replace(request, streamed=True))
    ways += [replace(request, weights=one, streamed=False) for one in rungs[1:] if one != "fp16"]
    for way in ways:
        own = plan(source, way, machine)
        if chunk := prefill_chunk(own):
            same = chunk == own.request.chunk
            return own if same else plan(source, _in_chunks(own.request, chunk), machine)
    return None


def can_stream(outline: Outline, machine: Machine) -> bool:
    """Whether a prefill there may have this model's weights streamed."""
    return machine.gpu is not None and outline.format in ("", GGUF) and outline.layered > 0


def changes(before: Workload, after: Workload) -> dict[str, object]:
    """The settings in which two requests differ; nobody states a chunk that is chosen."""
    own = {"chunk", "chunk_chosen"} if after.chunk_chosen else {"chunk_chosen"}
    names = [field.name for field in fields(Workload) if field.name not in own]
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}


def _asking(outline: Outline, request: Workload, machine: Machine) -> tuple[Part, ...]:
    shape, device = outline.shape, Medium.RAM if machine.gpu is None else Medium.GPU
    on_gpu = device is Medium.GPU
    searched = [k for k in request.budgets(shape).values() if k is not None]
    parts = [
        *_program(device, machine),
        _weights(outline, request.weights, device),
        Part("question and answer", device, sizes.ask_bytes(outline, request, on_gpu)),
        Part("search", Medium.RAM, sizes.search_bytes(outline, request, pool.THREADS)),
        Part("store", Medium.DISK, _store_bytes(outline, request)),
    ]
    if shape.state_layers:
        parts.append(Part("recurrent states", device, sizes.states_bytes(shape, request.batch)))
    if on_gpu:
        parts.append(Part("device cache", Medium.GPU, request.device_cache))
        parts.append(Part("rows on their way to the GPU", Medium.RAM, sizes.staged_bytes(outline, request)))
    if request.selector == "quest":
        pages = sizes.page_bytes(shape, request.tokens, request.page_size, request.metadata, len(searched))
        parts.append(Part("page bounds", device, pages))
    if request.selector == "topk":
        layer = sizes.index_costs(request.index, shape, request.tokens, request.kv, outline.dtype)
        for place, size in ((Medium.RAM, layer.memory), (Medium.DISK, layer.file)):
            parts.append(Part(f"indexes ({request.index})", place, len(shape.full_layers) * size))
    return tuple(part for part in parts if part.bytes)


def _prefilling(outline: Outline, request: Workload, machine: Machine) -> tuple[Part, ...]:
    device = Medium.RAM if machine.gpu is None else Medium.GPU
    given = request.chunk, request.tokens, device is Medium.GPU, request.kv
    chunk = sizes.prefill_bytes(outline, *given)
    weights = [_weights(outline, request.weights, device)]
    if request.streamed:
        weights = [
            Part(f"weights ({outline.dtype}, streamed)", device, sizes.streamed_bytes(outline)),
            Part(f"weights ({outline.dtype}, pinned)", Medium.RAM, sizes.waiting_bytes(outline)),
        ]
    return (
        *_program(device, machine),
        *weights,
        Part("tokenizing", Medium.RAM, request.tokens * sizes.CHARACTERS * sizes.TOKENIZING_BYTES),
        Part("a chunk and what it attends to", device, chunk + sizes.states_bytes(outline.shape, 1)),
        Part("a chunk on its way to the disk", Medium.RAM, sizes.staging_bytes(outline, *given)),
        Part("store", Medium.DISK, _store_bytes(outline, request)),
    )


def _program(device: Medium, machine: Machine) -> list[Part]:
    program = Part("program", Medium.RAM, machine.held + PROGRAM_BYTES)
    return [Part("CUDA", Medium.GPU, CUDA_BYTES), program] if device is Medium.GPU else [program]


def _weights(outline: Outline, weights: str, device: Medium) -> Part:
    on_gpu = device is Medium.GPU
    named = f"weights ({_weights_named(outline, weights, on_gpu)})"
    return Part(named, device, sizes.weights_bytes(outline, weights, on_gpu))


def _weights_named(outline: Outline, weights: str, on_gpu: bool) -> str:
    if weights != "auto":
        return weights
    return FORMATS[outline.format].said if outline.runs_packed(on_gpu) else outline.dtype


def _store_bytes(outline: Outline, request: Workload) -> int:
    return sizes.store_bytes(outline.shape, request.tokens, request.kv, outline.dtype, chunk=request.chunk)


def _alternatives(asked: Workload, outline: Outline) -> Iterator[Workload]:
    """Requests for as many tokens, from the one asked for on: fewest changes first, then smallest."""
    ladders: dict[str, list[Any]] = {
        "device_cache": list(dict.fromkeys([asked.device_cache, 0])),
        "weights": _rungs(asked.weights, outline),
        "kv": _from(asked.kv, kv_kinds(outline.shape)),
        "index": _from(asked.index, [asked.index, sizes.least_index()]),
        "metadata": _from(asked.metadata, list(PAGE_METADATA))
        if asked.selector == "quest"
        else [asked.metadata],
        "page_size": (
            [asked.page_size, *(size for size in _PAGE_SIZES if size > asked.page_size)]
            if asked.selector == "quest"
            else [asked.page_size]
        ),
        "selector": _from(asked.selector, [asked.selector, "topk"]),
    }
    steps = product(*(range(len(ladder)) for ladder in ladders.values()))
    for taken in sorted(steps, key=lambda taken: (sum(step > 0 for step in taken), sum(taken), taken[::-1])):
        chosen = {name: ladder[step] for (name, ladder), step in zip(ladders.items(), taken, strict=True)}
        yield replace(asked, **chosen)


def _in_chunks(request: Workload, chunk: int) -> Workload:
    return replace(request, chunk=chunk, chunk_chosen=False)


def _rungs(weights: str, outline: Outline) -> list[str]:
    """These weights, and those in fewer bits where the model's can be quantised."""
    if outline.format not in ("", GGUF):
        return [weights]
    return _from(weights, [w for w in WEIGHTS if w != "fp16" or outline.dtype == "float32"])


def _from(asked: str, ladder: list[str]) -> list[str]:
    """The rungs from the one asked for on, without repetition."""
    return list(dict.fromkeys(ladder[ladder.index(asked) :] if asked in ladder else [asked, *ladder]))


def _thriftiest(asked: Plan) -> Plan:
    """So many tokens in the fewest bits."""
    *_, last = _alternatives(asked.request, asked.source)
    return plan(asked.source, last, asked.machine)
