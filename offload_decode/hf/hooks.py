"""Switch a model to the registered attention, and check each of its passes behind a stored prefix.

Two hooks stand around the decoder (`base_model`), where every family passes the ids, the mask, the positions
and the cache by name, in a loop of one's own as in `generate`. A pass that would see a part of the prefix, or
run tokens twice, is refused before anything is appended.
"""

import inspect
from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from offload_decode.common.errors import ConfigError, UnsupportedModel
from offload_decode.hf.attention import NAME, NOT_BOOL, generated_mask, prefix_attention
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.cache_layers import RUNNING, Pass
from offload_decode.hf.compat import cache_in, cache_name, in_its_name
from offload_decode.hf.cuda_graphs import capture
from offload_decode.hf.linear_bf16 import read_in_place
from offload_decode.hf.own_index import watch_indexers
from offload_decode.hf.packed_batch import PackedCache
from offload_decode.hf.positions import UNSAID, depends_on_length
from offload_decode.hf.recurrent_steps import run_rows_apart
from offload_decode.hf.shape import cache_class

_HIDES = "the attention mask hides stored tokens: only tokens after the prefix can be masked"


def activate(model: Any) -> None:
    """Let `model` attend through `prefix_attention`, and check its passes."""
    AttentionInterface.register(NAME, prefix_attention)
    AttentionMaskInterface.register(NAME, generated_mask)
    model.set_attn_implementation(NAME)
    decoder = model.base_model
    if _before not in decoder._forward_pre_hooks.values():
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        decoder.register_forward_hook(_after, with_kwargs=True)
        run_rows_apart(decoder)
        watch_indexers(decoder)
        for module in filter(depends_on_length, decoder.modules()):
            module.register_forward_hook(_FixedLength(), with_kwargs=True)
        read_in_place(model)
        capture(decoder)


def _before(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    names = inspect.signature(decoder.forward).parameters if args else ()
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kind: Any = type(decoder)
    if (cache := given.get(cache_name(kind))) is None and (cache := cache_in(given)) is not None:
        given = in_its_name(decoder, given)
    if not isinstance(cache, CorpusCache | PackedCache):
        RUNNING.current = Pass()
        _check_kept(decoder, given)
        return None
    if not isinstance(cache, wanted := cache_class(kind)):
        cache.__class__ = _both(PackedCache if isinstance(cache, PackedCache) else CorpusCache, wanted)
    packed = isinstance(cache, PackedCache)
    _check_model(decoder, given, [segment.cache for segment in cache.segments] if packed else [cache])
    RUNNING.current = (_begin_packed if packed else _begin)(decoder, given, cache)
    return (), given


def _begin(decoder: nn.Module, given: dict[str, Any], cache: CorpusCache) -> Pass:
    """A pass behind one prefix: the cache, the mask and the positions agree on where its tokens stand."""
    if cache.begun is not None:
        cache.take_back()
    ids: Tensor | None = given.get("input_ids")
    new: Tensor | None = given.get("inputs_embeds") if ids is None else ids
    if new is None or new.ndim != (3 if ids is None else 2) or not len(new):
        raise ConfigError("a pass takes input_ids [B, T], or inputs_embeds [B, T, D], with B at least 1")
    rows, tokens = new.shape[:2]
    if not tokens:
        raise ConfigError(
            "no tokens are left to run: without a mask, generate takes the first ids for the stored "
            "tokens; pass a mask over stored and new tokens too, as Engine.inputs does"
        )
    if ids is not None:
        check_ids(ids, decoder)
    if cache.batch not in (None, rows):
        cache.refuse_rows(rows)
    mask = given.get("attention_mask")
    if mask is not None and (not isinstance(mask, Tensor) or mask.ndim not in (2, 4)):
        raise ConfigError("the attention mask must be 2-D, over the stored tokens and those that follow")
    if mask is not None and mask.ndim == 4:
        given["attention_mask"] = _prepared(mask, cache, rows, tokens)
        shown = None
    else:
        shown = None if mask is None else _shown(mask, cache, rows, tokens)
        positions = given.get("position_ids")
        if positions is not None or shown is not None or cache.shown is not None:
            _check_positions(positions, shown, cache, rows, tokens)
        if mask is not None:
            given["attention_mask"] = mask = mask.to(new.device, torch.bool)
    if cache.positions.most is not None:
        cache.check_room(tokens, shown)
    if shown is not None or cache.shown is not None:
        cache.show(tokens, shown)
    if given.get("position_ids") is None and _takes_positions(type(decoder)):  # type: ignore[arg-type]
        # Some models would begin at 0.
        first = cache.get_seq_length()
        given["position_ids"] = torch.arange(first, first + tokens, device=new.device)[None]
    cache.begin(rows, tokens)
    return Pass(
        rotated_for=cache.positions.length or UNSAID,
        mask=mask if mask is not None and mask.ndim == 2 else None,
        unpadded=mask is None and cache.shown is None,
        positions=None if cache.shown is None else cache.positions_of(cache.shown, tokens),
    )


def _after(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    RUNNING.current = Pass()
    cache = kwargs.get(cache_name(type(decoder)))  # type: ignore[arg-type]  # as `_before` passes it on
    if isinstance(cache, CorpusCache | PackedCache):
        cache.check_attended()


def _begin_packed(decoder: nn.Module, given: dict[str, Any], cache: PackedCache) -> Pass:
    """A packed pass: the cache knows the positions of its tokens, and what each of them sees."""
    ids: Tensor | None = given.get("input_ids")
    if ids is None or ids.ndim != 2 or len(ids) != 1:
        raise ConfigError("a packed pass takes input_ids [1, total], the tokens of all segments in order")
    if given.get("attention_mask") is not None or given.get("position_ids") is not None:
        raise ConfigError("a packed pass takes neither a mask nor positions: its segments give both")
    check_ids(ids, decoder)
    cache.begin(ids.shape[1])
    given["position_ids"] = positions = cache.positions.to(ids.device)
    # transformers passes a prepared mask on as it is, and the attention does not look at it.
    given["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids.device)
    return Pass(rotated_for=cache.rotated_for or UNSAID, positions=positions)


def _check_kept(decoder: nn.Module, given: dict[str, Any]) -> None:
    """Phi-3's own `generate` drops a cache where its rotation would change within the answer."""
    ids, mask, positions = (given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if ids is None or cache_in(given) is not None or not any(map(depends_on_length, decoder.modules())):
        return
    hidden = mask is not None and mask.ndim == 2 and mask.shape[1] > ids.shape[1]
    later = positions is not None and bool((positions.amin(-1) > 0).any())
    if hidden or later:
        raise UnsupportedModel(
            "this model's own generate drops the stored prefix here, because its rotation would change: "
            "use Engine.answer, which keeps the rotation of the store"
        )


@lru_cache(maxsize=64)
def _both(ours: type, kind: type) -> Any:
    return type(ours.__name__, (ours, kind), {})


@lru_cache(maxsize=64)
def _takes_positions(decoder: type) -> bool:
    return "position_ids" in inspect.signature(decoder.forward).parameters  # type: ignore[attr-defined]


def check_ids(ids: Tensor, model: Any) -> None:
    """Raise `ConfigError` if some ids are not in the vocabulary."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ConfigError(f"token ids must be whole numbers (int64), and not {ids.dtype}")
    known = model.get_input_embeddings().num_embeddings
    least, most = torch.stack(ids.aminmax()).tolist()  # one wait for the device
    if least < 0 or most >= known:
        wrong = least if least < 0 else most
        raise ConfigError(
            f"token id {wrong} is not in the vocabulary: the model has ids from 0 to {known - 1}"
        )


def _check_model(decoder: Any, given: dict[str, Any], caches: Sequence[CorpusCache]) -> None:
    """The decoder is that of the caches, as it was when it was opened, and attends to the stored tokens."""
    config = decoder.config
    use_cache, weights = given.get("use_cache"), given.get("output_attentions")
    use_cache = config.use_cache if use_cache is None else use_cache
    weights = config.output_attentions if weights is None else weights
    if decoder.training:
        raise ConfigError(
            "the model is in training mode, and attention to stored tokens has neither dropout nor "
            "gradients: call model.eval()"
        )
    if config._attn_implementation != NAME:
        raise UnsupportedModel(
            "this model attends without its stored prefix, because its attention was switched to "
            f"'{config._attn_implementation}': call model.set_attn_implementation('{NAME}')"
        )
    if weights:
        raise ConfigError(
            "attention to stored tokens gives no weights to return: leave output_attentions out, or set "
            "it to False in the model's config"
        )
    if not use_cache:
        raise ConfigError(
            "use_cache=False does not go with a stored prefix, because every step would run and append "
            "all tokens again: pass use_cache=True, as Engine.inputs does"
        )
    windows = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    for cache in caches:
        if cache.decoder not in (None, decoder):
            raise ConfigError("this cache belongs to another model: take one from the engine of this model")
        if cache.dtype not in (None, decoder.dtype) or not cache.windows.issubset(windows):
            raise ConfigError(
                "the dtype or the sliding window of this model changed after its store was opened: load "
                "the model again, and open the store with it"
            )


def _shown(mask: Tensor, cache: CorpusCache, rows: int, tokens: int) -> Tensor:
    """The columns of a 2-D mask after the prefix, checked: bool `[B, generated + T]`."""
    prefix, generated = cache.prefix_length, cache.generated_length
    if mask.shape[1] != (whole := prefix + generated + tokens):
        raise ConfigError(
            f"the attention mask covers {mask.shape[1]} tokens, but {whole} are in the cache with its "
            "stored prefix and the new ones: pass ones for the prefix and for earlier turns too, as "
            "Engine.inputs does"
        )
    if len(mask) != rows:
        raise ConfigError(f"the attention mask has {len(mask)} rows, but there are {rows} to run")
    # The engine's own masks are known to show the prefix: a million entries are not read at every step.
    known, cache.shows_prefix = cache.shows_prefix is mask, None
    if not known and not bool((mask[:, :prefix] != 0).all()):
        raise ConfigError(_HIDES)
    shown = mask[:, prefix:] != 0  # a copy: the caller's mask may change
    earlier = cache.shown
    before = shown[:, :generated]
    if not bool((before if earlier is None else before == earlier.to(before.device)).all()):
        raise ConfigError(
            "the attention mask differs from that of an earlier pass for tokens that both cover, and "
            "tokens stay shown or hidden in a cache: begin with a new one"
        )
    return shown


def _prepared(mask: Tensor, cache: CorpusCache, rows: int, tokens: int) -> Tensor:
    """A 4-D mask without its columns of the prefix."""
    prefix, generated = cache.prefix_length, cache.generated_length
    if mask.dtype != torch.bool:
        raise ConfigError(NOT_BOOL)
    if any(cache.is_sliding):
        raise ConfigError(
            "this model has sliding-window layers, which need another mask than the others: pass a 2-D "
            "attention mask, from which both are made"
        )
    if len(mask) not in (1, rows) or mask.shape[1] != 1 or mask.shape[2] != tokens:
        raise ConfigError(
            f"a prepared attention mask must be [{rows}, 1, {tokens}, …] for these tokens, and not "
            f"{list(mask.shape)}"
        )
    if mask.shape[-1] == prefix + generated + tokens:
        if not bool(mask[..., :prefix].all()):
            raise ConfigError(_HIDES)
        return mask[..., prefix:]
    if mask.shape[-1] != generated + tokens:
        whole = prefix + generated + tokens
        raise ConfigError(
            f"the prepared attention mask covers {mask.shape[-1]} tokens, but {whole} are in the cache "
            "with its stored prefix and the new ones"
        )
    return mask


def _check_positions(
    positions: Tensor | None, shown: Tensor | None, cache: CorpusCache, rows: int, tokens: int
) -> None:
    """A shown token stands behind all that are shown before it; the positions of padding do not matter."""
    if shown is None and cache.shown is not None:
        raise ConfigError(
            "earlier tokens of this cache are padding: pass an attention mask that hides them here too"
        )
    first = cache.get_seq_length()
    device = shown.device if positions is None else positions.device  # type: ignore[union-attr]
    unpadded = torch.arange(first, first + tokens, device=device)[None]
    positions = unpadded if positions is None else positions
    if positions.ndim != 2 or positions.shape[-1] != tokens or len(positions) not in (1, rows):
        raise ConfigError(
            f"position_ids must be [{rows}, {tokens}], one for each new token, and not "
            f"{list(positions.shape)}"
        )
    expected = unpadded
    right = positions == unpadded
    if shown is not None:
        shown = shown.to(device)
        expected = cache.positions_of(shown, tokens)
        right = (positions == expected) | ~shown[:, -tokens:]
    if not bool(right.all()):
        wrong = (~right).nonzero()[0].tolist()
        found, wanted = (int(one.expand_as(right)[tuple(wrong)]) for one in (positions, expected))
        raise ConfigError(
            f"a new token has position {found}, but behind the stored tokens and earlier turns it is "
            f"{wanted}: pass an attention mask over all of them, and position_ids that do not count the "
            "padding"
        )


class _FixedLength:
    """A forward hook by which a rotary embedding obeys `Pass.rotated_for`, with a copy of it for each length:
    modules remember the longest they saw.
    """

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        length = RUNNING.current.rotated_for
        if length is None:
            return output
        if length == UNSAID:
            raise ConfigError(
                "this model rotates keys by the length of the whole text, which this cache does not "
                "state: take a cache from the engine (Engine.new_cache)"
            )
        # Buffers that are made in inference mode cannot be changed in place outside of it.
        with torch.inference_mode(False), torch.no_grad():
            if length not in self.modules:
                self.modules[length] = _unused(module)
            given = dict(zip(("x", "position_ids", "layer_type"), args, strict=False)) | kwargs
            positions: Tensor = given.pop("position_ids")
            if positions.ndim != 2:
                raise UnsupportedModel(
                    "rotation by the length of a text with several positions a token is not served"
                )
            last = torch.full_like(positions[:, :1], length - 1)
            given["position_ids"] = torch.cat([positions, last], dim=1)
            rotated = self.modules[length](given.pop("x"), **given)
            return tuple(part[:, :-1] for part in rotated) if isinstance(rotated, tuple) else rotated[:, :-1]


def _unused(module: nn.Module) -> nn.Module:
    """A copy of a rotary embedding as it was before it saw any text."""
    config = getattr(module, "config", None)
    copy = deepcopy(module, {id(config): config})
    copy._forward_hooks.clear()
    for name, original in list(copy.named_buffers(recurse=False)):
        if name.endswith("original_inv_freq"):
            setattr(copy, name.removesuffix("original_inv_freq") + "inv_freq", original.clone())
    for name in [name for name in vars(copy) if name.endswith("max_seq_len_cached")]:
        setattr(copy, name, copy.original_max_seq_len)
    return copy
