"""What a job may use: checked before it begins, and enforced while it runs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from offload_decode.common.errors import ConfigError, DoesNotFit
from offload_decode.common.memory import limit_memory, total_memory
from offload_decode.config import STREAMED, EngineConfig
from offload_decode.hf.compat import check_dtype, pick_device
from offload_decode.indexes.registry import kinds, load_libraries
from offload_decode.kv.host_cache import BLOCK_TOKENS
from offload_decode.kv.indexes import DEFAULT
from offload_decode.models.layer_streaming import check_card
from offload_decode.models.quantization import GGUF, check_quantizer, check_weights
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.planning.plan import CUDA_BYTES, Machine, Medium, Part, Plan, plan
from offload_decode.planning.proposals import LEAST_CHUNK, changes, halves, nearest, nearest_prefill
from offload_decode.planning.sizes import least_index
from offload_decode.planning.workload import QUESTION_TOKENS, SELECTORS, Workload, weights_given
from offload_decode.selectors import registry
from offload_decode.selectors.budgets import PASS_TOKENS
from offload_decode.selectors.unselected import OFF
from offload_decode.store.format import Manifest, kv_kinds, stored_types
from offload_decode.types import PAGE_METADATA

_OPTION = {Medium.GPU: "--gpu-memory", Medium.RAM: "--ram"}
_UNLIMITED = 1 << 62


@dataclass(frozen=True)
class Caps:
    """Bytes that this process may use; None is all there is."""

    gpu_memory: int | None = None
    ram: int | None = None

    def of(self, place: Medium) -> int | None:
        return {Medium.GPU: self.gpu_memory, Medium.RAM: self.ram}.get(place)


def apply_caps(caps: Caps, device: str = "auto") -> None:
    """Allocations beyond the caps fail from here on. Raises `ConfigError` for a cap that cannot be kept."""
    if caps.gpu_memory is not None:
        import torch

        chosen = pick_device(device)
        if chosen.type != "cuda":
            raise ConfigError("--gpu-memory caps a GPU, and this runs on the CPU: leave it out, or cap --ram")
        if caps.gpu_memory <= CUDA_BYTES:
            raise ConfigError(f"--gpu-memory must be more than the {size(CUDA_BYTES)} that CUDA itself takes")
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        total = torch.cuda.get_device_properties(index).total_memory
        share = min(1.0, (caps.gpu_memory - CUDA_BYTES) / total)
        torch.cuda.set_per_process_memory_fraction(share, index)
    if caps.ram is not None:
        load_libraries()
        limit_memory(caps.ram)


def planned_ask(
    estimate: SizeEstimate,
    manifest: Manifest,
    config: EngineConfig,
    caps: Caps,
    held: int,
    *,
    index: str = "flat",
) -> Plan:
    """What asking a store takes: a question and an answer of usual length. `held`: bytes of memory that the
    program holds before it loads the model. `index`: the kind that is searched where the options name none.
    """
    weights = config.weights_after(manifest.weights)
    request = replace(_request(config, index), tokens=manifest.n_tokens, kv=kv_of(manifest), weights=weights)
    return plan(replace(estimate, dtype=manifest.dtype), request, here(config.device, caps, held))


def check_ask(asked: Plan, caps: Caps, what: str = "asking this store") -> list[str]:
    """Whether a store can be asked; returns what to know beforehand, as sentences. Raises `DoesNotFit`."""
    return _judged(asked, asked.asking, what, caps)


def admit_question(asked: Plan, caps: Caps, tokens: int, sequences: int = 1) -> int:
    """Tokens of a forward pass with which `sequences` of so many tokens fit, where a question of the usual
    length does. Raises `DoesNotFit`: beyond a cap, or beyond the machine even without the weights.
    """
    usual = asked.request.pass_tokens
    if tokens * sequences <= QUESTION_TOKENS:
        return usual
    # What a whole question chooses together must not depend on the memory that there is.
    sizes = [usual, *(halves(usual // 2) if usual <= PASS_TOKENS else [])]
    for size_of_pass in sizes:
        longer = asked.changed(generated=tokens + QUESTION_TOKENS, batch=sequences, pass_tokens=size_of_pass)
        lacking = [place for place in longer.lacking() if _certain(longer, place, caps)]
        if not lacking:
            return size_of_pass
    place, what, fewer = lacking[0], f"a question of {tokens:,} tokens", "ask a shorter one"
    if sequences > 1:
        what = f"{sequences} questions of up to {tokens:,} tokens"
        fewer = "take a smaller --batch-size or shorter ones"
    allowed = _OPTION[place] + " allows" if caps.of(place) else "this machine has"
    raise DoesNotFit(
        f"{what} takes about {size(longer.need(place))} of memory, and {allowed} "
        f"{size(longer.machine.size(place))}: {fewer}"
    )


def _certain(asked: Plan, place: Medium, caps: Caps) -> bool:
    """Whether what is lacking there is refused: without a cap, a CPU may read weights from their file."""
    there = asked.machine.size(place)
    capped = caps.of(place) == there or place is Medium.GPU
    return capped or asked.need(place) - _weights(asked.asking, place) > there


def check_prefill(
    estimate: SizeEstimate,
    chunk: int | None,
    dtype: str,
    device: str,
    caps: Caps,
    held: int,
    weights: str = "auto",
) -> list[str]:
    """Whether a model can prefill at all, in chunks of so many tokens, or of those that are chosen (None);
    returns what to know beforehand, as sentences. Raises `DoesNotFit`, and `ConfigError` for an
    unknown dtype, and for weights that are unknown or cannot be streamed.
    """
    check_dtype(dtype)
    check_weights(weights)
    check_quantizer(weights, pick_device(device))
    if dtype != "auto":
        estimate = replace(estimate, dtype=dtype)
    if weights == STREAMED:
        check_card(pick_device(device))
    chunks = {"chunk_chosen": True} if chunk is None else {"chunk": chunk}
    request = Workload(BLOCK_TOKENS, **weights_given(weights), **chunks)
    asked = plan(estimate, request, here(device, caps, held))
    return _judged(asked, asked.prefilling, "this prefill", caps)


def here(device: str, caps: Caps, held: int) -> Machine:
    """This machine within the caps; the disk is not looked at."""
    chosen, gpu = pick_device(device), None
    if chosen.type == "cuda":
        import torch

        gpu = min(caps.gpu_memory or _UNLIMITED, torch.cuda.get_device_properties(chosen).total_memory)
    return Machine(gpu, min(caps.ram or _UNLIMITED, total_memory()), _UNLIMITED, held)


def kv_of(manifest: Manifest) -> str:
    """The `--kv` that a store was made with."""
    shape, dtype = manifest.shape, manifest.dtype
    return next(kind for kind in kv_kinds(shape) if stored_types(kind, dtype, shape) == manifest.kv)


def size(amount: float) -> str:
    """Bytes in binary units, as sizes are given: three digits, or all before the point."""
    units = iter(("bytes", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while amount >= 1024 and unit != "TiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


_SPELLED = {
    "selector": "-s {}",
    "weights": "--weights {}",
    "kv": "--kv {}",
    "device_cache": "without --device-cache",  # no smaller one is ever proposed
    "streamed": f"--weights {STREAMED}",
}


def described(settings: Mapping[str, object]) -> str:
    """Settings as options of the command line."""
    given = {name: value for name, value in settings.items() if value is not False}  # others take their place
    return " ".join(_SPELLED.get(name, f"-o {name}={{}}").format(value) for name, value in given.items())


def _judged(asked: Plan, parts: tuple[Part, ...], what: str, caps: Caps) -> list[str]:
    """Refuse what is beyond a cap, and a model larger than the machine; of anything else make a note."""
    notes = []
    for place, missing in asked.lacking(parts).items():
        need, there, cap = asked.need(place, parts), asked.machine.size(place), caps.of(place)
        named, owner, held = "memory", "this machine", asked.machine.held
        if place is Medium.GPU:
            named, owner, held = "GPU memory", "the GPU", CUDA_BYTES
        listed = ", ".join(f"{part.name} {size(part.bytes)}" for part in parts if part.place is place)
        sentence = f"{what} takes about {size(need)} of {named} ({listed})"
        if cap is not None and cap == there:
            way = _what_fits(asked, parts) or _the_least(asked, parts, place)
            raise DoesNotFit(f"{sentence}, and {_OPTION[place]} allows {size(cap)}: {way}")
        if _weights(parts, place) + held > there:
            way = _what_fits(asked, parts) or "take a smaller model, or a machine with more memory"
            raise DoesNotFit(f"{sentence}, and {owner} has {size(there)}: {way}")
        notes.append(f"{sentence}, {size(missing)} more than there are: it may fail, or be slow")
    if parts is asked.asking and asked.from_disk:
        notes.append(
            f"The store has {size(asked.kv_bytes)} of keys and values, and {size(asked.spare_ram)} of memory "
            f"are left for it: each token reads up to {size(asked.from_disk)} from the disk."
        )
    return notes


def _weights(parts: tuple[Part, ...], place: Medium) -> int:
    return sum(part.bytes for part in parts if part.place is place and part.name.startswith("weights"))


def _what_fits(asked: Plan, parts: tuple[Part, ...]) -> str | None:
    given = nearest_prefill(asked) if parts is asked.prefilling else nearest(asked, kinds=(asked.request.kv,))
    return None if given is None else f"what fits is {described(changes(asked.request, given.request))}"


def _the_least(asked: Plan, parts: tuple[Part, ...], place: Medium) -> str:
    """The caps that would be enough for the way to do it that takes least of a place."""
    fewest, given = ("auto", "") if asked.source.format not in ("", GGUF) else ("int4", "--weights int4 ")
    if parts is asked.prefilling:
        smallest = asked.changed(chunk=LEAST_CHUNK, chunk_chosen=False, streamed=False, weights=fewest)
        ways = {given: smallest}
        if asked.can_stream:
            ways[f"--weights {STREAMED} "] = smallest.changed(weights="auto", streamed=True)
        options, needs = min(ways.items(), key=lambda one: one[1].need(place, one[1].prefilling))
        return f"with {options}-o chunk={LEAST_CHUNK}, the least, it is {_needs(needs, needs.prefilling)}"
    tail, also = (OFF, f" -o tail={OFF}") if asked.request.estimated else (asked.request.tail, "")
    least = asked.changed(weights=fewest, selector="topk", tail=tail, device_cache=0)
    enough = [least.changed(index=kind) for kind in (least.request.index, least_index())]
    needs = min(enough, key=lambda needs: needs.need(Medium.RAM))
    return f"with {given}-s topk{also}, the least, it is {_needs(needs, needs.asking)}"


def _needs(asked: Plan, parts: tuple[Part, ...]) -> str:
    return " and ".join(
        f"{_OPTION[place]} {-(-asked.need(place, parts) // 2**20)}MiB"
        for place in _OPTION
        if asked.need(place, parts)
    )


def _request(config: EngineConfig, built: str) -> Workload:
    """As far as sizes depend on it. What the selector itself will refuse is left to it."""
    selector, options = config.selector, config.options
    page = str(options.get("page_size", ""))
    index, metadata = (str(options.get(name, "")) for name in ("index", "metadata"))
    dense = options.get("dense_layers")
    return Workload(
        1,
        pass_tokens=registry.get(selector).pass_tokens if selector in registry.names() else PASS_TOKENS,
        selector="quest" if selector == "quest+topk" else selector if selector in SELECTORS else "topk",
        device_cache=config.device_cache,
        index=index if index in kinds() else built,
        metadata=metadata if metadata in PAGE_METADATA else "fp16",
        page_size=int(page) if page.isdecimal() and int(page) else 16,
        budget=str(options.get("budget", Workload.budget)),
        error=str(options.get("error", "")),
        tail=str(options.get("tail", Workload.tail)),
        clusters=built == DEFAULT,
        dense_layers=None if dense is None else str(dense),
    )
