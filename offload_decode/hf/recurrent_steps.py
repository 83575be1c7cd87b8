"""How recurrent layers run behind a stored prefix: without padding, and from their state on.

Attention masks padding out. A recurrence does not: behind a prefix, padding would push the prefix's last
inputs out of the convolutions and let its state decay. So rows with as much padding run together, each group
from its first own token on. And some layers of transformers go on from their state in a pass of one token
alone, and begin anew, or see a part of it, in a pass of several (Mamba 1): those run token by token.
"""

import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.cache_layers import KeylessLayer
from offload_decode.hf.compat import with_cache
from offload_decode.hf.recurrent import States

Forward = Callable[..., Any]
_PROBE_TOKENS = 3
_ROUNDING = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of a probe's largest number


def run_rows_apart(decoder: Any) -> None:
    """Let the recurrent layers of a decoder run as they must behind a `CorpusCache`.

    They are called with hidden states, a cache and a mask, and have no registered function that could be
    replaced, as attention has: their `forward` is wrapped.
    """
    alone: dict[type, bool] = {}
    for module in decoder.modules():
        if is_mixer(module):
            kind = type(module)
            forward = partial(_in_sequence, module.forward)
            if kind not in alone:
                alone[kind] = _takes_one_token(module, decoder)
            if alone[kind]:
                forward = partial(_by_token, module.layer_idx, forward)
            module.forward = partial(_apart, module, forward)


def is_mixer(module: torch.nn.Module) -> bool:
    """It convolves its inputs or lets a state decay (lightning attention), and knows its layer."""
    convolves = any(isinstance(child, torch.nn.Conv1d) for child in module.children())
    decays = isinstance(getattr(module, "slope_rate", None), Tensor)
    return (convolves or decays) and isinstance(getattr(module, "layer_idx", None), int)


def _apart(module: Any, forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_of(args, kwargs)
    length = hidden_states.shape[1]
    padding = None if cache is None else cache.hidden(length)
    if cache is None or padding is None:
        return forward(hidden_states, *args, **kwargs)
    layer = cache.layers[module.layer_idx]
    out: list[Any] = []
    whole = layer.states
    for start in sorted({*padding.tolist()} - {length}):
        rows = (padding == start).nonzero()[:, 0]
        layer.states = whole.rows(rows)
        part = _on_part(forward, hidden_states, args, kwargs, slice(start, None), rows)
        several = isinstance(part, tuple)
        parts = part if several else (part,)
        out = out or [one.new_zeros(len(padding), length, *one.shape[2:]) for one in parts]
        for own, one in zip(out, parts, strict=True):
            if one.shape[1] == length - start:  # else no sequence
                own[rows.to(own.device), start:] = one
        whole = whole.scattered(rows, layer.states)
    layer.states = whole
    if not out:
        return torch.zeros_like(hidden_states)
    return tuple(out) if several else out[0]


def _in_sequence(forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """`[B, 1, D]` of one token also where the layer gives `[B, D]` (Falcon-H1 with a norm)."""
    out = forward(hidden_states, *args, **kwargs)
    flat = isinstance(out, Tensor) and out.ndim == 2 and hidden_states.shape[1] == 1
    return out[:, None] if flat else out


def _by_token(layer_idx: int, forward: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    cache, length = _cache_of(args, kwargs), hidden_states.shape[1]
    if cache is None or length == 1 or not cache.has_previous_state(layer_idx):
        return forward(hidden_states, *args, **kwargs)
    tokens = (slice(token, token + 1) for token in range(length))
    return _joined([_on_part(forward, hidden_states, args, kwargs, one) for one in tokens])


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(own, dim=1) for own in zip(*parts, strict=True))
    return torch.cat(list(parts), dim=1)


def _on_part(
    forward: Forward,
    hidden: Tensor,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tokens: slice,
    rows: Any = None,
) -> Any:
    """`forward` of some tokens, of some rows; no padding is among them, so that no mask is needed."""

    def part(given: Any) -> Any:
        if not isinstance(given, Tensor) or len(given) != len(hidden):
            return given
        if given.ndim == 2:  # a mask, in transformers 5.5 over the prefix too
            return None
        if given.shape[1] != hidden.shape[1]:
            return given
        return (given if rows is None else given[rows.to(given.device)])[:, tokens]

    return forward(part(hidden), *map(part, args), **{name: part(one) for name, one in kwargs.items()})


def _takes_one_token(module: Any, decoder: Any) -> bool:
    """Whether a pass of several tokens differs from theirs one by one, or ignores some state."""
    device = decoder.get_input_embeddings().weight.device
    if next(module.parameters()).device != device:  # of streamed weights: it is tried where it will run
        module = deepcopy(module).to(device)
    floating = next(p for p in module.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 2 * _PROBE_TOKENS, decoder.config.hidden_size, generator=generator)
    first, rest = inputs.to(floating.device, floating.dtype).chunk(2, dim=1)
    probe = _probe(module.layer_idx, States())
    with torch.inference_mode():
        _run(module, first, probe)
        held = probe.layers[-1].states.copy()
        others = [States(held.held | {name: 2 * state + 1}) for name, state in held.held.items()]
        try:
            wholes = [_probed(module, [rest], states) for states in (held, *others)]
        except (IndexError, RuntimeError, ValueError):
            return True
        if any(all(map(torch.equal, wholes[0], whole)) for whole in wholes[1:]):
            return True
        stepped = (_probed(module, rest.chunk(_PROBE_TOKENS, dim=1), states) for states in (held, *others))
        return not all(map(_agree, wholes, stepped))


def _agree(whole: Sequence[Tensor], stepped: Sequence[Tensor]) -> bool:
    return len(whole) == len(stepped) and all(
        one.shape == other.shape
        and bool((one - other).abs().max() <= _ROUNDING.get(one.dtype, 5e-2) * other.abs().max())
        for one, other in zip(whole, stepped, strict=True)
    )


def _probed(module: Any, passes: Sequence[Tensor], states: States) -> list[Tensor]:
    """The sequences that a mixer gives for passes from these states on (MiniMax's gives its state too)."""
    probe = _probe(module.layer_idx, states.copy())
    out = _joined([_run(module, inputs, probe) for inputs in passes])
    parts: Sequence[Tensor] = out if isinstance(out, tuple) else (out,)
    return [one for one in parts if one.shape[1] == _PROBE_TOKENS]


def _run(module: Any, inputs: Tensor, probe: CorpusCache) -> Any:
    _, *others = inspect.signature(module.forward).parameters.values()
    given = {own.name: None for own in others if own.default is own.empty and own.kind is not own.VAR_KEYWORD}
    return _in_sequence(module, inputs, **{**given, **with_cache(module, probe)})


def _probe(layer_idx: int, states: States) -> CorpusCache:
    """A cache within a pass, that holds nothing but the states of one layer."""
    probe = CorpusCache([KeylessLayer(index, states) for index in range(layer_idx + 1)])
    probe.begun = (0, 0, 0)
    return probe


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> CorpusCache | None:
    given = (*args, *kwargs.values())
    return next((one for one in given if isinstance(one, CorpusCache)), None)
