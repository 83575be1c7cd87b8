"""The tiny model that the equivalence check runs: its class, kinds of layers and switches are the model's,
with few layers and small widths.

What a field is follows from its name, so that a family that is new needs nothing here; where the tiny
model that comes out of it cannot be built, one that is shrunk less is tried.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from offload_decode.hf.positions import rope_parameters, rotations
from offload_decode.hf.shape import text_config, text_model

VOCABULARY, WINDOW, CHUNK = 96, 7, 8
_LENGTH = 16  # for rotations that change with the length of a text
_POSITIONS, _MOST_POSITIONS = 256, 1 << 16  # some have a learned row for each
_SPREAD = 0.04  # of weights: with larger ones some models multiply their rounding
_NO_MATTER = frozenset(
    ["transformers_version", "architectures", "_name_or_path", "dtype", "torch_dtype", "output_attentions"]
)

_HEADS = re.compile(r"(swa_)?num_attention_heads(_per_layer)?|n_heads?|num_heads|attention_heads")
_KV_HEADS = re.compile(r"(swa_)?num_key_value_heads|num_(global_)?(key_value|kv)_heads|kv_n_heads|n_head_kv")
_HEAD_DIMS = re.compile(
    r"((swa_|global_|attention_|v_|qk_|qk_nope_|qk_rope_|index_|swa_v_)?head_dim|kv_channels|rotary_dim)"
)
_MAMBA_HEADS, _MOST_MAMBA_HEADS = re.compile(r"mamba_n_heads|mamba_num_heads|n_mamba_heads"), 8
_MAMBA_DIMS = re.compile(r"mamba_d_head|mamba_head_dim|mamba_headdim")
# Names, and the most that such a size may be.
_MOST: tuple[tuple[str, int], ...] = (
    (r"sliding_window(_size)?|(attention_)?window_size", WINDOW),
    (r"attention_chunk_size", CHUNK),
    (_MAMBA_HEADS.pattern, _MOST_MAMBA_HEADS),
    (r".*(token_id|token_index)", 2),
    (r".*vocab_size.*", VOCABULARY),
    (r".*(moe|expert).*(intermediate|ffn|hidden).*size.*", 24),
    (r".*(intermediate|ffn|inner).*|.*_ff(_dim)?", 48),
    (r"(moe_)?(num_|n_)?(local_|routed_)?experts|moe_num_experts|n_routed_experts", 4),
    (r".*experts?_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k", 2),
    (r"n_group|num_expert_group|(mamba_)?n_?groups", 2),
    (r"topk_group", 1),
    (r".*shared_experts", 1),
    (r".*(lora|laurel|adapter|norm)_rank|.*lowrank|moe_latent_size|router_hidden_size", 16),
    (r".*(d_state|state_size)|hidden_size_per_layer_input", 8),
    (r".*dt_rank|floor_scale", 4),
    (r"linear_(num_)?(key_)?(num_)?heads|linear_num_key_heads|linear_num_heads", 2),
    (r"(mamba_)?chunk_size|block_size", 16),
    (r"local_attention", 2 * WINDOW),
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_layers_per_stack")
_PLACES = re.compile(r"idx|index|layer_id|^_")  # of a layer, and what torch keeps of every module
Kind = tuple[Any, ...]


class NoTinyModel(Exception):
    """Why no tiny model of a family can be built."""


def tiny_config_of(config: Any) -> Any:
    """The config of the tiny model for a config; the same one for models that differ in sizes.

    Raises `NoTinyModel` with the reason where none that is small can be built.
    """
    text = text_config(config)
    with torch.device("meta"):
        decoder = text_model(text_config(text)).base_model
    total = _total(text, decoder)
    stack = _stack(text, decoder, total)
    failure: Exception | None = None
    for layers, width in _choices(stack, getattr(text, "num_kv_shared_layers", None) or 0):
        try:
            tiny = _shrunk(text, layers, total, width)
            with torch.device("meta"):
                small = text_model(text_config(tiny)).base_model
            found = _stack(tiny, small, len(layers))
            if [_switches(own) for own in found] != [_switches(stack[layer]) for layer in layers]:
                raise ValueError("its layers are of other kinds")
            return tiny
        except Exception as error:  # noqa: BLE001  # whatever a config's own checks raise
            failure = failure or error
    raise NoTinyModel(" ".join(f"{type(failure).__name__}: {failure}".split())[:200].rstrip(".")) from failure


def tiny_model_of(tiny: Any, seed: int) -> Any:
    """A float32 model of a tiny config with random weights, sinks and norms included."""
    torch.manual_seed(seed)
    model = text_model(text_config(tiny), attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms and sinks start as constants, which would hide mistakes with them
                weight.add_(torch.randn_like(weight) * (1.0 if "sinks" in name else 0.1))
            # As they start, recurrences forget the prefix within a few tokens, and trained ones do not.
            if name.endswith("A_log"):
                weight.uniform_(-4, -1)
            elif name.endswith("dt_bias"):
                weight.zero_()
    return model


def _total(text: Any, decoder: Any) -> int:
    """How many layers the model has, where several pass for one in its cache."""
    stated = {getattr(text, name, None) for name in _LAYER_COUNTS}
    lists = [len(module) for module in decoder.modules() if isinstance(module, torch.nn.ModuleList)]
    return max((length for length in lists if length in stated), default=text.num_hidden_layers)


def _choices(stack: list[Kind], shared: int) -> Iterator[tuple[list[int], int]]:
    """Which layers a tiny model may have, and how wide its heads may be, the best first.

    One layer of each kind in the model's order; where kinds follow from a layer's place, the first layers
    until each kind occurred once, or twice. Layers that read the keys of earlier ones are its last.
    """
    total = len(stack)
    own, reading = stack[: total - shared], stack[total - shared :]

    def first(kinds: list[Kind], times: int) -> int:
        """How many there are until each kind has occurred so many times, or as often as it does."""
        places = [[place for place, one in enumerate(kinds) if one == kind] for kind in set(kinds)]
        return max((found[:times][-1] + 1 for found in places), default=0)

    each = sorted({own.index(kind) for kind in own})
    each = each if len(each) > 1 else [*range(min(2, len(own)))]
    each += [total - shared + place for place in sorted({reading.index(kind) for kind in reading})]
    yield each, 16
    for times, width in ((1, 16), (2, 16), (1, 32), (1, 24), (2, 64)):
        last = first(reading[::-1], times)
        yield [*range(min(max(first(own, times), 2), len(own))), *range(total - last, total)], width


def _stack(text: Any, decoder: Any, total: int) -> list[Kind]:
    types = getattr(text, "layer_types", None) or [None] * total
    lists = (module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList))
    modules = next((module for module in lists if len(module) == total), [None] * total)
    return [(of, *(_parts(layer) if layer else ())) for of, layer in zip(types, modules, strict=False)]


def _parts(layer: Any) -> Iterator[tuple[Any, ...]]:
    """What tells two layers of one model apart: their parts, with their switches and their sizes."""
    for path, module in layer.named_modules():
        if re.search(r"experts\.\d", path):
            continue
        held = {name: own for name, own in vars(module).items() if not _PLACES.search(name)}
        switches = tuple((name, own) for name, own in held.items() if isinstance(own, bool | str | None))
        sizes = [tuple(weight.shape) for weight in module.parameters(recurse=False)]
        sizes += [(name, own) for name, own in held.items() if type(own) is int]
        yield path, type(module).__name__, switches, tuple(sizes)


def _switches(kind: Kind) -> Kind:
    """A kind without its sizes, and without numbers of parts."""
    return kind[0], frozenset(part[1:3] for part in kind[1:])


def _shrunk(text: Any, layers: list[int], total: int, width: int) -> Any:
    """The config with small numbers, and heads of about `width`."""
    sizes = _Sizes(text, width)
    stated = _stated(text.to_dict())
    fields = {name: _cut(name, sizes.field(name, value), layers, total) for name, value in stated.items()}
    for name in _LAYER_COUNTS:
        if isinstance(held := fields.get(name), int) and held % total == 0:
            fields[name] = held // total * len(layers)
    if shared := fields.get("num_kv_shared_layers"):
        fields["num_kv_shared_layers"] = sum(layer >= total - shared for layer in layers)
    fields |= dict.fromkeys(fields.keys() & {"initializer_range", "init_std"}, _SPREAD)
    if "dynamic" in [own.get("rope_type") for own in rotations(rope_parameters(text))]:
        fields["max_position_embeddings"] = _LENGTH
    return type(text).from_dict(fields)


def _stated(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: own for name, own in fields.items() if name not in _NO_MATTER}
    return {name: _stated(own) if isinstance(own, dict) else own for name, own in kept.items()}


class _Sizes:
    """Small sizes for those of one config: equal ones stay equal, heads times their width the hidden size."""

    def __init__(self, text: Any, width: int):
        numbers = list(_numbers(text.to_dict()))
        fields = dict(reversed(numbers))  # where layers differ, what holds for the rest of them
        named = getattr(text, "attribute_map", {})
        self.heads: int = fields.get(named.get("num_attention_heads", "num_attention_heads"), 4)
        self.hidden: int = text.hidden_size
        dims = [value for name, value in fields.items() if _HEAD_DIMS.fullmatch(name)]
        head_dim = fields.get("head_dim") or max(2, self.hidden // self.heads)
        self.divisor = max(1, min([*dims, head_dim]) // width)
        self.few_heads = min(self.heads, 4)
        self.few_hidden = self.few_heads * self._dim(head_dim)
        kv_heads = {value for name, value in numbers if _KV_HEADS.fullmatch(name)}
        self.kv_heads = sorted(kv_heads - {1, self.heads})
        self.expand: int = fields.get("mamba_expand", 2)
        mamba_heads = [value for name, value in fields.items() if _MAMBA_HEADS.fullmatch(name)]
        self.mamba_heads = min([*mamba_heads, _MOST_MAMBA_HEADS])
        self.values_per_key = fields.get("linear_num_value_heads", 2) // fields.get("linear_num_key_heads", 2)
        linear = [v for n, v in fields.items() if re.fullmatch(r"linear_(key_|value_)?head_dim", n)]
        self.linear_divisor = max(1, min(linear, default=1) // 8)

    def field(self, name: str, value: Any) -> Any:
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            return self._rope(value)
        if isinstance(value, dict):
            return {own: self.field(own, one) for own, one in value.items()}
        if isinstance(value, list) and all(type(one) is int for one in value):
            return [self.field(name, one) for one in value] if not _is_choice(name) else value
        return self._number(name, value) if type(value) is int and value > 0 else value

    def _number(self, name: str, value: int) -> int:
        if _HEADS.fullmatch(name):
            return max(1, self.few_heads * value // self.heads) if value >= self.heads else min(value, 2)
        if _KV_HEADS.fullmatch(name):
            return 1 if value == 1 else 2 if value in self.kv_heads[:1] else self.few_heads
        if _HEAD_DIMS.fullmatch(name):
            return self._dim(value)
        if _MAMBA_DIMS.fullmatch(name):
            return self.expand * self.few_hidden // self.mamba_heads
        if name == "mamba_d_ssm":
            return self.expand * self.few_hidden // self.mamba_heads * self.mamba_heads
        if name == "linear_num_value_heads":
            return min(value, 2 * self.values_per_key)
        if re.fullmatch(r"linear_(key_|value_)?head_dim", name):
            return max(1, value // self.linear_divisor)
        # A model's own indexer is not asked behind a prefix, and in the plain pass it leaves nothing out.
        if re.fullmatch(r"max_position_embeddings|n_positions|max_seq_len|index_topk", name):
            return min(max(value, _POSITIONS), _MOST_POSITIONS)
        if value in (self.hidden, 2 * self.hidden) and re.search(r"hidden|dim|^size|width|embd|model", name):
            return value // self.hidden * self.few_hidden
        return min(value, next((most for pattern, most in _MOST if re.fullmatch(pattern, name)), value))

    def _dim(self, value: int) -> int:
        return max(2, 2 * round(value / (2 * self.divisor)))

    def _rope(self, rope: dict[str, Any]) -> dict[str, Any]:
        found = {name: self._rope(own) if isinstance(own, dict) else own for name, own in rope.items()}
        if found.get("rope_type", found.get("type")) == "longrope" or "llama_4_scaling_beta" in found:
            found["original_max_position_embeddings"] = _LENGTH
        for name in ("short_factor", "long_factor", "mrope_section"):
            if held := found.get(name):
                found[name] = list(held)[:: self.divisor][: max(1, round(len(held) / self.divisor))]
        return found


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif type(value) is int and value > 0:
            yield name, value


def _is_choice(name: str) -> bool:
    """Lists of layers and of switches, not of sizes."""
    return bool(re.search(r"layers|indices|_ids|freq|pattern", name)) and "_size" not in name


def _cut(name: str, value: Any, layers: list[int], total: int) -> Any:
    """What a field says of the tiny model's layers."""
    if isinstance(value, list) and len(value) == total and "token" not in name:
        return [value[layer] for layer in layers]
    if isinstance(value, list) and _is_choice(name) and all(type(one) is int for one in value):
        return [layers.index(one) for one in value if one in layers]
    if name == "per_layer_config" and isinstance(value, dict):
        return {str(layers.index(int(own))): one for own, one in value.items() if int(own) in layers}
    if name == "moe_layer_end_index" and isinstance(value, int):
        return min(value, len(layers) - 1)
    return value
