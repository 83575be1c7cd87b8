"""On a GPU, what lies between one attention and the next as CUDA graphs: norms, projections, rotation, MLP.

A token's pass launches a dozen kernels a layer besides its attention, each through Python: of a small model
more time than the kernels take. A decoder's pass is therefore captured once for each number of rows and
tokens, as one graph before each attention and one behind the last. What is attended to is looked up, fetched
and merged between them as ever. Nothing is captured that is not proved on the spot: replayed with other
tokens at other places it equals the plain pass, or the model goes on without.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from copy import copy, deepcopy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from offload_decode.errors import UnsupportedModel
from offload_decode.models.attention import prefix_attention
from offload_decode.models.cache import PrefixCache
from offload_decode.models.joint import JointCache
from offload_decode.models.layers import LatentLayer, TailLayer, WindowLayer
from offload_decode.models.recorded import Asked, RecordedCache
from offload_decode.models.rotation import depends_on_length

WORTH = 8
"""Passes of a shape before it is captured: a question comes once, an answer's tokens by the hundred."""
TOKENS = 64
"""Of a pass that is captured, at most: with more, kernels take longer than their launch."""
SHAPES = 16
"""Captured at most for a model."""

_ROUNDING = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}  # of the largest number
# Of what cannot be captured, and of models that do with a cache what ours of a pass does not know.
_FAILURES = (RuntimeError, UnsupportedModel, AttributeError, TypeError, ValueError, LookupError)

Shape = tuple[int, int, int]
"""Rows, tokens, rows of positions."""
_PLAIN = ("input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict")


class _Stop(NamedTuple):
    """An attention of the pass, and where the graph behind it reads what is answered."""

    asked: Asked
    answer: Tensor


class CapturedPass:
    """A decoder's pass over `ids [B, T]` as graphs. One at a time runs it: its tensors are the same ones
    every time.
    """

    def __init__(self, forward: Callable[..., Any], layers: int, ids: Tensor, positions: Tensor, pool: Any):
        self._ids, self._positions = ids.clone(), positions.clone()
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._stops: list[_Stop] = []
        self._pool = pool
        self._begin()
        try:
            self.output = _passed(
                forward, self._ids, self._positions, RecordedCache(layers, 2, self._stopped)
            )
        except BaseException:
            with suppress(RuntimeError):  # what was not allowed has ended it already
                self._graphs[-1].capture_end()
            raise
        self._graphs[-1].capture_end()
        if self._ids.shape != self.output.last_hidden_state.shape[:2]:
            raise UnsupportedModel("this decoder gives something else than a state for each token")

    @property
    def layers(self) -> list[int]:
        """Whose attention it stops at, in order."""
        return [stop.asked.layer for stop in self._stops]

    def run(self, ids: Tensor, positions: Tensor, answers: Callable[[Asked], Tensor]) -> Tensor:
        """The states `[B, T, W]` of these tokens, which stand at `positions [B or 1, T]`."""
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        for graph, stop in zip(self._graphs, self._stops, strict=False):
            graph.replay()
            stop.answer.copy_(answers(stop.asked))
        self._graphs[-1].replay()
        return self.output.last_hidden_state.clone()  # type: ignore[no-any-return]

    def _stopped(self, asked: Asked) -> Tensor:
        """The pass came to an attention: the graph ends here, and the next one begins with an answer."""
        self._graphs[-1].capture_end()
        query, value = asked.query, asked.value
        answer = query.new_zeros(len(query), query.shape[2], query.shape[1], value.shape[-1])
        self._stops.append(_Stop(asked, answer))
        self._begin()
        return answer

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        # Other threads may go on with a device meanwhile.
        self._graphs[-1].capture_begin(self._pool, capture_error_mode="thread_local")


class CapturedForward:
    """Takes the place of a decoder's `forward`, which it calls for what is not captured.

    refused: why nothing (more) is, for people; None as long as nothing was refused.
    """

    def __init__(self, decoder: Any):
        self.decoder = decoder
        self.__wrapped__ = decoder.forward  # of which `inspect.signature` tells
        self.refused: str | None = None
        self.passes: dict[Shape, CapturedPass] = {}
        self._came: Counter[Shape] = Counter()
        # Passes may share it: what one leaves there is no other's concern.
        self._pool = torch.cuda.graph_pool_handle()
        self._busy = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """For a copy of the decoder, whose weights lie elsewhere."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        held = deepcopy({"decoder": self.decoder, "__wrapped__": self.__wrapped__}, memo)
        other.__dict__.update(held, refused=self.refused, passes={})
        other._came, other._pool, other._busy = Counter(), torch.cuda.graph_pool_handle(), threading.Lock()
        return other

    def __call__(self, *args: Any, **given: Any) -> Any:
        if args or self.refused is not None or not _serves(given) or not self._busy.acquire(blocking=False):
            return self.__wrapped__(*args, **given)
        try:
            held = self._pass(given["input_ids"], given["position_ids"])
            cache = given["past_key_values"]
            if held is None or held.layers != [layer.index for layer in cache.tails]:
                return self.__wrapped__(**given)
            output = copy(held.output)
            output.past_key_values = cache
            output.last_hidden_state = held.run(
                given["input_ids"], given["position_ids"], functools.partial(_answered, cache)
            )
            return output
        finally:
            self._busy.release()

    def _pass(self, ids: Tensor, positions: Tensor) -> CapturedPass | None:
        shape = (*ids.shape, len(positions))
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
        with torch.inference_mode(False), torch.no_grad(), ExitStack() as held:
            # Nothing can be captured on the stream that everything runs on by itself.
            current, own = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
            own.wait_stream(current)
            held.callback(current.wait_stream, own)
            held.enter_context(torch.cuda.stream(own))
            try:
                # Once before anything is captured, so that libraries have what they take at their first call.
                _passed(self.__wrapped__, ids, positions, RecordedCache(layers, 1, _stand_in))
                captured = CapturedPass(self.__wrapped__, layers, ids, positions, self._pool)
                self.refused = self._difference(captured, ids, positions, layers)
            except _FAILURES as error:
                self.refused = str(error).splitlines()[0] if str(error) else type(error).__name__
            else:
                if self.refused is None:
                    self.passes[shape] = captured

    def _difference(self, captured: CapturedPass, ids: Tensor, positions: Tensor, layers: int) -> str | None:
        """Whether other tokens at other places get other states than in a plain pass: how, or None."""
        others, places = ids // 2, positions + 3
        cache = RecordedCache(layers, 5, _stand_in)
        true = _passed(self.__wrapped__, others, places, cache).last_hidden_state.float()
        replayed = captured.run(others, places, _stand_in).float()
        apart = float((true - replayed).abs().max() / true.abs().max())
        if apart <= _ROUNDING.get(captured.output.last_hidden_state.dtype, 0.0):
            return None
        return f"a captured pass is {apart:.2g} apart from a plain one"


def capture(decoder: Any) -> None:
    """Let the passes of a decoder on a GPU be captured once they come again and again."""
    on_card = {parameter.device.type for parameter in decoder.parameters()} == {"cuda"}
    if on_card and not isinstance(decoder.forward, CapturedForward):
        decoder.forward = CapturedForward(decoder)


def report(decoder: Any) -> dict[str, Any] | None:
    """What is captured of a decoder on a GPU, as JSON can hold it: shapes `[rows, tokens]`; why no more."""
    forward = decoder.forward
    if not isinstance(forward, CapturedForward):
        return None
    return {
        "passes": sorted([rows, tokens] for rows, tokens, _ in forward.passes),
        "refused": forward.refused,
    }


def _serves(given: dict[str, Any]) -> bool:
    """Whether a pass is one of those that are captured, as far as its shape is: few tokens, each of which
    sees all of its conversation.
    """
    cache, ids, positions = (given.get(name) for name in ("past_key_values", "input_ids", "position_ids"))
    if torch.is_grad_enabled() or ids is None or positions is None or ids.numel() > TOKENS:
        return False
    if not all(given[name] is None or given[name] is False for name in given.keys() - set(_PLAIN)):
        return False
    if isinstance(cache, JointCache):
        return not any(layer.latent for layer in cache.tails)
    if not isinstance(cache, PrefixCache) or ids.shape[1] > 1 or cache.recurrent or cache.shown is not None:
        return False
    mask: Tensor | None = given.get("attention_mask")
    return (mask is None or mask.ndim == 2) and all(map(_plain, cache.tails))


def _plain(layer: TailLayer) -> bool:
    return not isinstance(layer, LatentLayer) and not (isinstance(layer, WindowLayer) and layer.chunked)


def _passed(forward: Callable[..., Any], ids: Tensor, positions: Tensor, cache: RecordedCache) -> Any:
    # A prepared mask is handed on as it is, and no attention looks at it.
    seen = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return forward(
        input_ids=ids, position_ids=positions, attention_mask=seen, past_key_values=cache, use_cache=True
    )


def _answered(cache: PrefixCache | JointCache, asked: Asked) -> Tensor:
    """What is stored and what followed it, attended to."""
    layer = cache.layers[asked.layer]
    keys, values = cache.update(asked.key, asked.value, asked.layer)
    if isinstance(layer, WindowLayer):  # one token sees all of what is near
        keys, values, _ = layer.near(1)
        keys.offload_layer = layer  # type: ignore[attr-defined]
    out, _ = prefix_attention(
        asked.module, asked.query, keys, values, None, asked.scaling, asked.softcap, asked.sinks
    )
    return out


def _stand_in(asked: Asked) -> Tensor:
    """Something that depends on all that is asked, in place of an answer: for a proof."""
    query, key, value = asked.query, asked.key, asked.value
    groups = query.shape[1] // key.shape[1]
    scores = (query * key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) * asked.scaling
    return (scores.sigmoid() * value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous()
