"""The shape of a model: built from its config on torch's meta device, and run on two tokens.

A layer keeps what transformers' own cache holds of it after the pass, so no family needs a formula.
"""

import inspect
import math
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_decode.common.errors import UnsupportedModel
from offload_decode.hf.compat import DTYPES, cache_name, class_of, text_of, with_cache
from offload_decode.hf.mla import index_of, latent_of
from offload_decode.hf.positions import rope_parameters, rotations
from offload_decode.hf.user_cache import cached
from offload_decode.store.format import FORMAT_VERSION, shape_from
from offload_decode.types import LayerKind, LayerShape, ModelShape, StateShape

_FORM = 3
"""Version of a cached shape."""
_LONG_S = 0.1  # shapes that took longer are cached between runs
_NAME = "offload_decode_observed"

_OWN_CODE = (
    "{which}this '{name}' model attends in code of its own, which never calls the registered attention "
    "function and so would leave out what is stored: use another model"
)
# By the class of transformers' cache layer, where it holds keys after the pass.
_KINDS = {
    "DynamicLayer": LayerKind.FULL,
    "DynamicIndexedLayer": LayerKind.FULL,
    "DynamicSlidingWindowLayer": LayerKind.SLIDING,
    "LinearAttentionLayer": LayerKind.NONE,
    "LinearAttentionAndFullAttentionLayer": LayerKind.FULL,
    "LinearAttentionAndSlidingWindowAttentionLayer": LayerKind.SLIDING,
    "DummyLayer": LayerKind.NONE,
}

_pass = threading.local()


class _Seen(NamedTuple):
    """A call of the attention function: by which module, with how many query heads, at which scaling."""

    module: Any
    query_heads: int
    scaling: Any


def claimed_shape(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a text model in `dtype` (None: the checkpoint's) from its transformers config, without the
    equivalence check (`hf.verify.shape_of` runs it).

    Refuses what a config says that no tiny model could show: raises `UnsupportedModel` with the reason.
    """
    name = config.model_type
    for rope in rotations(rope_parameters(config)):
        for field in ("rope_theta", "factor"):
            if not rope.get(field, 1.0) > 0:
                raise UnsupportedModel(
                    f"this '{name}' model has a {field} of {rope[field]}, and only positive ones make "
                    "positions: mend its config.json"
                )
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):  # "vision": images alone
        raise UnsupportedModel(f"this '{name}' model attends to later tokens too; use a causal model")
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 2:
        raise UnsupportedModel(
            f"this '{name}' model has a sliding window of {window}, in which no token sees an earlier "
            "one: mend its config.json, or use another model"
        )
    return observed_shape(config, dtype)


def observed_shape(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of the text model of a transformers config, in `dtype` (None: the checkpoint's).

    Observed once for a config and cached. Raises `UnsupportedModel` with the reason.
    """
    text = text_config(config)
    if dtype is not None:
        text.dtype = dtype
    of = ["shape", _FORM, text.to_dict()]
    return cached(
        of, lambda: _observed(text), asdict, lambda own: shape_from(own, FORMAT_VERSION, DTYPES), _LONG_S
    )


def text_config(config: Any) -> Any:
    """A copy of the text model's part of a config, without quantization."""
    text = text_of(config)
    if hasattr(text, "quantization_config"):
        del text.quantization_config
    return text


def text_model(config: Any, **arguments: Any) -> Any:
    """The causal model of a text config with fresh weights, in evaluation mode."""
    return class_of(config)._from_config(config, **arguments).eval()


def _observed(text: Any) -> ModelShape:
    """Run two tokens without data through the model's decoder, behind the cache that transformers makes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from offload_decode.hf.attention import generated_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, generated_mask)
    text._experts_implementation = "batched_mm"  # the one that reads no numbers of a tensor
    _pass.updated, _pass.seen = None, {}
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.device("meta"):
            model = text_model(text, attn_implementation=_NAME)
            cache = _cache(text, model.base_model)
            with _WithoutData():  # type: ignore[no-untyped-call]
                decoder = model.base_model
                ids = torch.zeros(1, 2, dtype=torch.long)
                decoder(input_ids=ids, use_cache=True, **with_cache(decoder, cache))
    except Exception as error:
        name = text.model_type
        if isinstance(error, KeyError) and error.args == (_NAME,):
            raise UnsupportedModel(_OWN_CODE.format(which="", name=name)) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise UnsupportedModel(
            f"this '{name}' model does not run with another cache and attention function ({reason}): use a "
            "newer release of transformers, or another model"
        ) from error
    return _shape(text.model_type, text, cache, _pass.seen)


def _attention(
    module: Any, query: Any, key: Any, value: Any, mask: Any = None, scaling: Any = None, *_: Any, **__: Any
) -> Any:
    """The attention function of an observed pass: notes which module called it after which cache layer."""
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError("its attention adds numbers to the scores")
    if _pass.updated is not None:
        _pass.seen.setdefault(_pass.updated, _Seen(module, query.shape[1], scaling))
        _pass.updated = None
    batch, heads, tokens = query.shape[:3]
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


@cache
def cache_class(decoder: Any) -> Any:
    """The class of caches that a decoder of this class takes: transformers' own, or its model's (MiniMax)."""
    from transformers import Cache, DynamicCache

    parameter = inspect.signature(decoder.forward).parameters.get(cache_name(decoder))
    types = [] if parameter is None else [parameter.annotation, *get_args(parameter.annotation)]
    kinds = [kind for kind in types if isinstance(kind, type) and issubclass(kind, Cache)]
    return next((kind for kind in kinds if hasattr(kind, "get_linear_cache")), DynamicCache)


def _cache(text: Any, decoder: Any) -> Any:
    """transformers' own cache for a config, which notes the layer that was updated last."""
    from transformers import DynamicCache

    kind = cache_class(type(decoder))  # type: ignore[arg-type]
    cache = DynamicCache(config=text) if kind is DynamicCache else kind()
    if not cache.layers and kind is DynamicCache:
        # Where no layers share keys, older releases treat all of them as sharing.
        plain = SimpleNamespace(**{k: v for k, v in text.to_dict().items() if k != "num_kv_shared_layers"})
        plain.get_text_config = lambda **_: plain
        cache = DynamicCache(config=plain)
    update: Callable[..., Any] = cache.update

    def noted(keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        _pass.updated = layer
        return update(keys, values, layer, *args, **kwargs)

    cache.update = noted
    return cache


class _WithoutData(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Values that a model reads from tensors without data: zeros, true conditions, no indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        first = args[0] if args else None
        if not isinstance(first, torch.Tensor) or not first.is_meta:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return first.dtype == torch.bool or torch.zeros((), dtype=first.dtype, device="cpu").item()
        if func is aten.nonzero.default:
            return first.new_empty(0, first.ndim, dtype=torch.int64)
        device = kwargs.get("device")
        if func is aten._to_copy.default and device is not None and device.type != "meta":
            return torch.zeros(first.shape, dtype=kwargs.get("dtype") or first.dtype, device=device)
        if func is aten.split_with_sizes.default and not any(args[1]):  # sizes that were read as zeros
            return func(first, [first.shape[args[2] if len(args) > 2 else 0], *args[1][1:]], *args[2:])
        return func(*args, **kwargs)


def _shape(name: str, text: Any, cache: Any, seen: dict[int, _Seen]) -> ModelShape:
    types = getattr(text, "layer_types", None) or []
    layers = []
    for index, layer in enumerate(cache.layers):
        chunked = getattr(text, "sliding_window", None) is None
        if types:  # a looped model's cache has more layers
            chunked = types[index : index + 1] == ["chunked_attention"]
        layers.append(_layer(name, index, layer, seen, chunked))
    # Older releases keep nothing for the last layers where these read the keys of others.
    layers += [LayerShape(LayerKind.NONE)] * (len(types) - len(layers))
    # Layers that share the choice of another's indexer have room for an index key too: rows have one width.
    if own := next((own for own in layers if own.index is not None), None):
        layers = [replace(own, states=each.states) if each.latent else each for each in layers]
    for index, state in enumerate(getattr(cache, "linear_cache", ())):
        if isinstance(state, torch.Tensor):
            layers[index] = LayerShape(LayerKind.NONE, states=(_state("recurrent0", state),))
    keeping = [i for i, own in enumerate(layers) if own.kind is not LayerKind.NONE]
    if not keeping:
        raise UnsupportedModel(
            f"this '{name}' model keeps keys and values in none of its layers, so there is nothing to "
            "store: use a model with attention"
        )
    searched = [i for i in keeping if layers[i].kind is LayerKind.FULL] or keeping[:1]
    found = ((seen[i].query_heads, layers[i]) for i in searched)
    geometries = sorted({(heads, own.kv_heads, own.key_dim, own.value_dim) for heads, own in found})
    if len(geometries) > 1:
        listed = " and ".join(f"{q} query and {kv} KV heads of {k} and {v}" for q, kv, k, v in geometries)
        raise UnsupportedModel(
            f"the full-attention layers of this '{name}' model differ ({listed} numbers), and a store has "
            "one geometry for all of them: use another model"
        )
    query_heads, kv_heads = geometries[0][:2]
    if query_heads % kv_heads:
        raise UnsupportedModel(
            f"this '{name}' model has {query_heads} query heads for {kv_heads} KV heads, not a multiple"
        )
    return ModelShape(tuple(layers), query_heads)


def _layer(name: str, index: int, layer: Any, seen: dict[int, _Seen], chunked: bool) -> LayerShape:
    """The shape of a layer of transformers' cache after the pass."""
    kind = _KINDS.get(type(layer).__name__)
    if kind is None:
        raise UnsupportedModel(
            f"layer {index} of this '{name}' model keeps more than keys, values and states "
            f"({type(layer).__name__}), which is not served: use another model"
        )
    kept = {sort: getattr(layer, f"{sort}_states", None) for sort in ("conv", "recurrent")}
    states = tuple(
        _state(f"{sort}{number}", state)
        for sort, own in kept.items()
        for number, state in (own if isinstance(own, dict) else {0: own}).items()
        if state is not None
    )
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return LayerShape(LayerKind.NONE, states=states)
    if index not in seen:
        raise UnsupportedModel(_OWN_CODE.format(which=f"layer {index} of ", name=name))
    if kind is LayerKind.SLIDING and chunked:
        kind = LayerKind.CHUNKED
    latent = latent_of(seen[index].module)
    heads, key_dim, value_dim = keys.shape[1], keys.shape[-1], values.shape[-1]
    if latent is not None and kind is LayerKind.FULL:
        own = index_of(seen[index].module, getattr(layer, "indexer_keys", None))
        dim = latent.dim + (0 if own is None else own.dim)
        return LayerShape(kind, 1, dim, dim, None, states, True, own, _scaling(seen[index], dim))
    window, scaling = None if kind is LayerKind.FULL else layer.sliding_window, _scaling(seen[index], key_dim)
    return LayerShape(kind, heads, key_dim, value_dim, window, states, scaling=scaling)


def _scaling(seen: _Seen, key_dim: int) -> float | None:
    """What a layer scales its scores by; None where that is 1/sqrt(`key_dim`), or is not stated."""
    if seen.scaling is None or math.isclose(seen.scaling, key_dim**-0.5, rel_tol=1e-6):
        return None
    return float(seen.scaling)


def _state(name: str, state: torch.Tensor) -> StateShape:
    return StateShape(name, tuple(state.shape[1:]), str(state.dtype).removeprefix("torch."))
