"""Where a request does not fit on a machine: the nearest thing that does."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import product
from typing import Any, TypeVar

from offload_decode.models.quantization import GGUF
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.planning import sizes
from offload_decode.planning.plan import Medium, Plan, plan
from offload_decode.planning.workload import KV, WEIGHTS, Workload
from offload_decode.selectors.unselected import CLUSTERS, OFF
from offload_decode.store.format import kv_kinds
from offload_decode.types import PAGE_METADATA

LEAST_CHUNK = 16
"""The smallest chunk of a prefill that is proposed."""
_PAGE_SIZES = (16, 32, 64, 128)

T = TypeVar("T")


def nearest(asked: Plan, kinds: Sequence[str] = KV, in_memory: bool = False) -> Plan | None:
    """The plan that fits and differs least from the one that was asked for: itself, or another with fewer
    bits, another selector or larger pages; None where nothing of that kind fits. `kinds`: ways of storing
    keys and values that can still be chosen. `in_memory`: nothing of the store is to come from the disk.
    """
    source, machine = asked.source, asked.machine
    there = kinds is not KV  # and a store that is there is asked in its own dtype
    for request in _alternatives(asked.request, source):
        if request.kv in kinds and not (there and request.weights == "fp16"):
            one = plan(source, request, machine)
            if one.fits and not (in_memory and one.from_disk):
                return one
    return None


def most_tokens(asked: Plan) -> Plan | None:
    """The plan for the most tokens that fit, in the fewest bits; None where not even the weights do."""
    thrifty = _thriftiest(asked)
    fits, beyond = 0, asked.request.tokens
    while beyond - fits > max(1, fits // 1000):
        middle = (fits + beyond) // 2
        fits, beyond = (middle, beyond) if thrifty.changed(tokens=middle).fits else (fits, middle)
    return thrifty.changed(tokens=fits) if fits else None


def least_machine(asked: Plan) -> dict[Medium, int]:
    """The bytes of each place with which so many tokens would do, in the fewest bits."""
    thrifty = _thriftiest(asked)
    return {place: thrifty.need(place) for place in Medium if place is not Medium.GPU or asked.machine.gpu}


def prefill_chunk(asked: Plan) -> int | None:
    """The largest chunk, up to the one asked for, with which the prefill fits here; None if none does."""
    plans = (asked.changed(chunk=chunk, chunk_chosen=False) for chunk in halves(asked.request.chunk))
    return next((one.request.chunk for one in plans if one.prefill_fits), None)


def halves(tokens: int) -> Iterator[int]:
    """Tokens of a forward pass, each half of the one before, down to `LEAST_CHUNK`."""
    while tokens >= LEAST_CHUNK:
        yield tokens
        tokens //= 2


def nearest_prefill(asked: Plan) -> Plan | None:
    """The prefill that fits and differs least from the one asked for, in smaller chunks, or else with weights
    that are streamed, or are in fewer bits; None where nothing fits.
    """
    request, ways = asked.request, [asked]
    if asked.can_stream and request.weights == "auto" and not request.streamed:
        # Before chunks that are smaller than any that is chosen, before which weights would come as often.
        first = request.chunk_chosen and not asked.prefill_fits
        ways.insert(0 if first else 1, asked.changed(streamed=True))
    rungs = _rungs(request.weights, asked.source)
    ways += [asked.changed(weights=one, streamed=False) for one in rungs[1:] if one != "fp16"]
    for way in ways:
        chunk = prefill_chunk(way)
        if chunk is not None:
            return way if chunk == way.request.chunk else way.changed(chunk=chunk, chunk_chosen=False)
    return None


def changes(before: Workload, after: Workload) -> dict[str, object]:
    """The settings in which two requests differ; nobody states a chunk that is chosen."""
    own = {"chunk", "chunk_chosen"} if after.chunk_chosen else {"chunk_chosen"}
    names = [field.name for field in fields(Workload) if field.name not in own]
    return {name: getattr(after, name) for name in names if getattr(before, name) != getattr(after, name)}


def _alternatives(asked: Workload, estimate: SizeEstimate) -> Iterator[Workload]:
    """Requests for as many tokens, from the one asked for on: fewest changes first, then smallest."""
    pages = asked.selector == "quest"
    larger = [page for page in _PAGE_SIZES if page > asked.page_size]
    ladders: dict[str, list[Any]] = {
        "device_cache": _from(asked.device_cache, [0]),
        "weights": _rungs(asked.weights, estimate),
        "kv": _from(asked.kv, kv_kinds(estimate.shape)),
        "index": _from(asked.index, [asked.index, sizes.least_index()]),
        "tail": list(dict.fromkeys([asked.tail, *((CLUSTERS, OFF) if asked.estimated else ())])),
        "metadata": _from(asked.metadata, PAGE_METADATA if pages else [asked.metadata]),
        "page_size": [asked.page_size, *(larger if pages else [])],
        "selector": _from(asked.selector, [asked.selector, "topk"]),
    }
    steps = product(*(range(len(ladder)) for ladder in ladders.values()))
    for taken in sorted(steps, key=lambda taken: (sum(step > 0 for step in taken), sum(taken), taken[::-1])):
        chosen = {name: ladder[step] for (name, ladder), step in zip(ladders.items(), taken, strict=True)}
        yield replace(asked, **chosen)


def _rungs(weights: str, estimate: SizeEstimate) -> list[str]:
    """These weights, and those in fewer bits where the model's can be quantized."""
    if estimate.format not in ("", GGUF):
        return [weights]
    return _from(weights, [w for w in WEIGHTS if w != "fp16" or estimate.dtype == "float32"])


def _from(asked: T, ladder: Sequence[T]) -> list[T]:
    return list(dict.fromkeys(ladder[ladder.index(asked) :] if asked in ladder else [asked, *ladder]))


def _thriftiest(asked: Plan) -> Plan:
    *_, last = _alternatives(asked.request, asked.source)
    return plan(asked.source, last, asked.machine)
