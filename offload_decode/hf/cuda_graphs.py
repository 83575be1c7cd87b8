"""A decoder's pass on a GPU as CUDA graphs: norms, projections, rotation and MLP between two attentions.

A token's pass launches a dozen kernels a layer besides its attention, each through Python: for a small model
this takes longer than the kernels. A decoder's pass is therefore recorded once for each number of sequences
and tokens, as one graph before each attention and one behind the last; attention runs between them as ever.
Every recording is checked on the spot: replayed with other tokens at other positions it equals the plain
pass, or the model runs without graphs.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import copy, deepcopy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.attention import prefix_attention
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.cache_layers import RUNNING, AttentionCall, GraphCache, LatentLayer, WindowLayer
from offload_decode.hf.compat import CACHE_NAMES, cache_in, cache_name, with_cache
from offload_decode.hf.packed_batch import PackedCache
from offload_decode.hf.positions import depends_on_length

WORTH = 8
"""Passes of a shape before it is recorded: a question comes once, an answer's tokens by the hundred."""
TOKENS = 64
"""Most tokens of a recorded pass: with more, kernels take longer than their launch."""
SHAPES = 16
"""Most shapes that are recorded for a model."""

_ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # of a state's length
_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MORE_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
_ARGUMENTS = ("input_ids", "position_ids", "attention_mask", "use_cache", "return_dict", *CACHE_NAMES)
Shape = tuple[int, int, int]
"""Sequences, tokens, sequences of positions."""
Forward = Callable[[Tensor, Tensor, GraphCache], Any]
"""The output for `ids [B, T]` at `positions [B or 1, T]`, with nothing in the cache."""


class _Stop(NamedTuple):
    """An attention of the pass, and where the graph behind it reads the result."""

    call: AttentionCall
    result: Tensor


class GraphPass:
    """A decoder's pass over `ids [B, T]` as graphs: one before each attention, and one behind the last. Its
    tensors are the same ones every time, so only one caller at a time may run it.
    """

    def __init__(self, forward: Forward, layers: int, ids: Tensor, positions: Tensor, pool: Any):
        self._ids, self._positions = ids.clone(), positions.clone()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stops: list[_Stop] = []
        self._pool = pool
        cache = GraphCache(layers, int(positions.max()), self._stopped)
        self._begin()
        try:
            self.output = forward(self._ids, self._positions, cache)
        except BaseException:
            with suppress(RuntimeError):  # a forbidden operation has ended it already
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()
        outputs = [name for name, one in self.output.items() if isinstance(one, Tensor | tuple)]
        if outputs != ["last_hidden_state"] or self._ids.shape != self.output.last_hidden_state.shape[:2]:
            raise UnsupportedModel("this decoder returns something else than a state for each token")

    @property
    def layers(self) -> list[int]:
        """The layers at whose attention it stops, in order."""
        return [stop.call.layer for stop in self._stops]

    def run(self, ids: Tensor, positions: Tensor, attend: Callable[[AttentionCall], Tensor]) -> Tensor:
        """The states `[B, T, W]` of these tokens, which stand at `positions [B or 1, T]`."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        for graph, stop in zip(self._graphs, self._stops, strict=False):
            graph.replay()
            stop.result.copy_(attend(stop.call))
        self._graphs[-1].replay()
        return self.output.last_hidden_state.clone()  # type: ignore[no-any-return]

    def _stopped(self, call: AttentionCall) -> Tensor:
        """The pass came to an attention: the graph ends here, and the next one begins with its result."""
        self._graphs[-1].capture_end()
        query, value = call.query, call.value
        result = query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        self._stops.append(_Stop(call, result))
        self._begin()
        return result

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may use a device meanwhile.
        self._graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")


class Snapshot:
    """A module as it is now: its parts, the addresses of its weights, its hooks; cheap to compare."""

    def __init__(self, module: torch.nn.Module):
        self._slots: list[tuple[dict[str, Any], str, Any]] = []
        sized: list[dict[str, Any]] = []
        for part in module.modules():
            held = (part._modules, part._parameters, part._buffers)
            self._slots += [(own, name, one) for own in held for name, one in own.items()]
            self._slots.append((part.__dict__, "forward", part.__dict__.get("forward")))
            sized += [*held, *(getattr(part, hooks) for hooks in _HOOKS)]
        self._sized, self._sizes = sized, [len(own) for own in sized]
        self._tensors = [one for _, _, one in self._slots if isinstance(one, Tensor)]
        self._places = [one.data_ptr() for one in self._tensors]

    def holds(self) -> bool:
        """Whether nothing was taken out, put in or moved since."""
        return (
            [len(own) for own in self._sized] == self._sizes
            and all(own.get(name) is one for own, name, one in self._slots)
            and [one.data_ptr() for one in self._tensors] == self._places
        )


class GraphForward:
    """Replaces a decoder's `forward`, which it calls for passes that are not recorded.

    refused: why nothing (more) is recorded, for people; None as long as nothing was refused.
    """

    def __init__(self, decoder: Any):
        self.decoder = decoder
        self.__wrapped__ = decoder.forward  # whose signature `inspect.signature` shows
        self.refused: str | None = None
        self._busy = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self.passes: dict[Shape, GraphPass] = {}
        self._came: Counter[Shape] = Counter()
        self._known: Snapshot | None = None
        # Passes may share it: none reads what another left there.
        self._pool = torch.cuda.graph_pool_handle()
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        held = deepcopy({"decoder": self.decoder, "__wrapped__": self.__wrapped__}, memo)
        other.__dict__.update(held, refused=self.refused, _busy=threading.Lock())
        other._begin()
        return other

    def __call__(self, *args: Any, **given: Any) -> Any:
        served = not args and self.refused is None and _serves(self.decoder.config, given)
        if not served or not self._busy.acquire(blocking=False):
            return self.__wrapped__(*args, **given)
        try:
            ids, positions, cache = given["input_ids"], given["position_ids"], cache_in(given)
            held = self._pass(ids, positions)
            if held is None or held.layers != [layer.index for layer in cache.generated_layers]:
                return self.__wrapped__(**given)
            output = copy(held.output)
            setattr(output, cache_name(type(self.decoder)), cache)  # type: ignore[arg-type]
            # Passes on other streams use the same tensors.
            stream = torch.cuda.current_stream(ids.device)
            if self._done is not None:
                stream.wait_event(self._done)
            try:
                output.last_hidden_state = held.run(ids, positions, functools.partial(_attend, cache))
            finally:
                self._done = stream.record_event(self._done)
            return output
        finally:
            self._busy.release()

    def _forward(self, ids: Tensor, positions: Tensor, cache: GraphCache) -> Any:
        # A prepared mask is passed on as it is, and no attention looks at it.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
        given = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "use_cache": True}
        return self.__wrapped__(**given, **with_cache(self.decoder, cache))

    def _pass(self, ids: Tensor, positions: Tensor) -> GraphPass | None:
        shape = (*ids.shape, len(positions))
        if self._known is not None and not self._known.holds():
            self._begin()  # an adapter came, or weights moved: the recordings are of the former model
        if shape not in self.passes and len(self.passes) < SHAPES:
            self._came[shape] += 1
            if self._came[shape] >= WORTH:
                self._capture(shape, ids, positions)
        return self.passes.get(shape)

    def _capture(self, shape: Shape, ids: Tensor, positions: Tensor) -> None:
        if any(map(depends_on_length, self.decoder.modules())):
            self.refused = "its rotation depends on the length of the text"
            return
        layers = self.decoder.config.num_hidden_layers
        with ExitStack() as held:
            held.enter_context(torch.inference_mode(False))
            held.enter_context(torch.no_grad())
            held.enter_context(torch.cuda.device(ids.device))
            # Nothing can be captured on the default stream.
            current = torch.cuda.current_stream()
            self._stream = own = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
            own.wait_stream(current)
            held.callback(current.wait_stream, own)
            held.enter_context(torch.cuda.stream(own))
            try:
                # Once before the recording, so that libraries have allocated what their first call takes.
                seen = int(positions.max())
                self._forward(ids, positions, GraphCache(layers, seen, _stand_in))
                captured = GraphPass(self._forward, layers, ids, positions, self._pool)
                self.refused = self._difference(captured, ids, positions, layers)
            except Exception as error:  # noqa: BLE001  # whatever a model does with a cache it does not know
                self.refused = str(error).splitlines()[0] if str(error) else type(error).__name__
            else:
                if self.refused is None:
                    self.passes[shape] = captured
                    self._known = self._known or Snapshot(self.decoder)
        if self.refused is not None:
            self._begin()

    def _difference(self, captured: GraphPass, ids: Tensor, positions: Tensor, layers: int) -> str | None:
        """How states of smaller ids and positions, which all tables have, differ from plain ones; or None."""
        others, places = ids // 2, positions // 2
        cache = GraphCache(layers, int(places.max()), _stand_in)
        true = self._forward(others, places, cache).last_hidden_state.float()
        replayed = captured.run(others, places, _stand_in).float()
        apart = float(((true - replayed).norm(dim=-1) / true.norm(dim=-1)).max())
        if apart <= _ROUNDING.get(captured.output.last_hidden_state.dtype, 0.0):
            return None
        return f"a captured pass is {apart:.2g} apart from a plain one"


def capture(decoder: Any) -> None:
    """Let passes of a decoder on one GPU be recorded once their shape has come often.

    Not with torch before 2.13, which does not recover from a capture that failed, nor for int8 products,
    which look up outliers on the host.
    """
    devices = {parameter.device for parameter in decoder.parameters()}
    if len(devices) != 1 or devices.pop().type != "cuda" or _TORCH < (2, 13):
        return
    if any(type(module).__name__ == "Linear8bitLt" for module in decoder.modules()):
        return
    if not isinstance(decoder.forward, GraphForward):
        decoder.forward = GraphForward(decoder)


def report(decoder: Any) -> dict[str, Any] | None:
    """The recorded passes of a decoder on a GPU, for JSON: shapes `[sequences, tokens]`, and why no more."""
    forward = decoder.forward
    if not isinstance(forward, GraphForward):
        return None
    shapes = sorted([rows, tokens] for rows, tokens, _ in forward.passes)
    return {"passes": shapes, "refused": forward.refused}


def _serves(config: Any, given: dict[str, Any]) -> bool:
    """Whether a pass can be recorded: few tokens that see all before them, and the last states alone."""
    cache, ids, positions = cache_in(given), given.get("input_ids"), given.get("position_ids")
    if torch.is_grad_enabled() or ids is None or positions is None or ids.numel() > TOKENS:
        return False
    # Autocast casts weights into memory that it gives back.
    if torch.is_autocast_enabled("cuda") or any(getattr(config, more, False) for more in _MORE_OUTPUTS):
        return False
    others = (given[name] for name in given.keys() - set(_ARGUMENTS))
    if given.get("return_dict") is False or any(one is not None and one is not False for one in others):
        return False
    if isinstance(cache, PackedCache):
        return not any(layer.latent for layer in cache.generated_layers)
    if not isinstance(cache, CorpusCache) or ids.shape[1] > 1 or cache.recurrent or cache.shown is not None:
        return False
    mask: Tensor | None = given.get("attention_mask")
    return (mask is None or mask.ndim == 2) and not any(
        isinstance(layer, LatentLayer) or (isinstance(layer, WindowLayer) and layer.chunked)
        for layer in cache.generated_layers
    )


def _attend(cache: CorpusCache | PackedCache, call: AttentionCall) -> Tensor:
    layer = cache.layers[call.layer]
    keys, values = cache.update(call.key, call.value, call.layer)
    if isinstance(layer, WindowLayer):  # one token sees all of the window
        keys, values, _ = layer.near(1)
        RUNNING.current.updated(layer, keys)
    # A watch may keep the query, whose memory is the next token's too.
    query = call.query.clone()
    return prefix_attention(call.module, query, keys, values, None, call.scaling, call.softcap, call.sinks)[0]


def _stand_in(call: AttentionCall) -> Tensor:
    """In place of attention: depends on all inputs and on the position, as q·k of one's own does not."""
    query, key, value = call.query, call.key, call.value
    groups = query.shape[1] // key.shape[1]
    weights = (query.mean(-1, keepdim=True) + key.repeat_interleave(groups, 1).mean(-1, keepdim=True)).tanh()
    return (weights * value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous()
