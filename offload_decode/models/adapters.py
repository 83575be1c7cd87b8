"""LoRA adapters (arXiv 2106.09685) in PEFT's layout, attached to a model's linear layers as they lie there,
quantized or in blocks; of activated ones (aLoRA, arXiv 2504.12397) the base model stays beside.

Nothing is merged: the model's weights stay mapped, or in few bits, and the products of A and B are added.
What an adapter would do beyond that is refused by the name of its field or weight.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from offload_decode.common.errors import ConfigError, ModelError
from offload_decode.config import STREAMED
from offload_decode.models.checkpoint import ADAPTER_CONFIG, bounded, model_errors, parsed
from offload_decode.models.few_rows import FewRows
from offload_decode.models.fingerprints import hash_of
from offload_decode.store.format import FINGERPRINT_VERSION
from offload_decode.types import ModelShape

WEIGHTS = "adapter_model.safetensors"
MERGE = "merge it into its model (merge_and_unload), save that, and give the folder of the whole"
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_DTYPES = ("F32", "F16", "BF16")
_MOST_RANK, _MOST_CALL, _MOST_PATTERN = 4096, 1024, 256
# Fields that say how it is trained or where it was made, or which weights of the file there are.
_NO_MATTER = frozenset(
    [
        "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
        "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
        "peft_version", "qalora_group_size", "revision", "target_modules", "task_type",
    ]
)  # fmt: skip
_READ = frozenset(
    [
        "alora_invocation_tokens", "alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type",
        "r", "rank_pattern", "use_rslora",
    ]
)  # fmt: skip
_KINDS = {"alpha_pattern": dict, "rank_pattern": dict, "use_rslora": bool}
# Ways to begin a training that leave the base model's weights as they are.
_PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")


class Adapter(NamedTuple):
    """What a folder states, its weights not read yet. `scales`: what B·A is multiplied by, by the name of the
    module; `ranks` of these; `invocation`: the ids of the tokens from which on it applies, empty for always.
    """

    folder: Path
    scales: Mapping[str, float]
    ranks: Mapping[str, int]
    invocation: tuple[int, ...]


class AdaptedLinear(nn.Module):
    """A linear layer `base` and, in float32, `b (a x)`: a `[r, in]`, and b `[out, r]`, scaled already."""

    a: Tensor
    b: Tensor

    def __init__(self, base: Any, a: Tensor, b: Tensor):
        super().__init__()
        self.base = base
        # Buffers, as a model is of the dtype of its parameters; and no part of what it saves.
        self.register_buffer("a", a, persistent=False)
        self.register_buffer("b", b, persistent=False)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, base.bias

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = self.base(input)
        added = functional.linear(functional.linear(input.float(), self.a), self.b)
        return (out + added).to(out.dtype)

    @property
    def weight(self) -> Tensor:
        """Merged anew: some models look into a layer."""
        own: Tensor = self.base.weight
        return (own + self.b @ self.a).to(own.dtype)


def read_adapter(folder: str) -> Adapter:
    """What a LoRA's folder states, and the shapes of its weights. Raises `ModelError`."""
    try:
        path = Path(folder).resolve()
        there = [name for name in (ADAPTER_CONFIG, WEIGHTS) if (path / name).is_file()]
        found = path.is_dir()
    except (OSError, ValueError) as error:  # a name with NUL, or too long, or not to be looked into
        raise ModelError(
            f"{folder[:200]!r} cannot be looked into ({error}): give --adapter the folder of a LoRA"
        ) from error
    if not found:
        raise ModelError(f"there is no folder {folder}: give --adapter the folder of a LoRA")
    for name in (ADAPTER_CONFIG, WEIGHTS):
        if name not in there:
            pickled = "; a pickled one is not read" if name == WEIGHTS else ""
            raise ModelError(f"{path} is no adapter that can be read: it has no file {name}{pickled}")
    bounded(path / ADAPTER_CONFIG)
    stated = parsed(path / ADAPTER_CONFIG)
    _check_fields(path, stated)
    with model_errors(f"cannot read the adapter {path}"):
        ranks = _ranks(path)
        scales = {name: _scale(path, stated, name, rank) for name, rank in ranks.items()}
    return Adapter(path, scales, ranks, _invocation(path, stated))


def check_activated(adapter: Adapter, shape: ModelShape, weights: str) -> None:
    """Raise `ConfigError` where an activated adapter would not be exact behind stored tokens: of latents the
    keys and values are made anew for each query, and by its weights.
    """
    latent = shape.latent and any(name.endswith(".kv_b_proj") for name in adapter.ranks)
    if adapter.invocation and (latent or weights == STREAMED):
        why = "is for kv_b_proj, by which stored latents are read" if latent else "is not streamed"
        raise ConfigError(f"the activated adapter {adapter.folder} {why}: answer without it")


def attach(model: Any, adapter: Adapter, device: torch.device) -> str:
    """Put an adapter on the linear layers of a model; the SHA-256 of all that it adds. Raises `ModelError`
    where it names modules that the model does not have as linear layers, or is of other shapes.
    """
    from safetensors import safe_open

    added: list[tuple[str, Tensor]] = []
    with (
        model_errors(f"cannot read the adapter {adapter.folder}"),
        safe_open(_weights(adapter), "pt") as file,
    ):
        shapes = {name: _shapes(file, name) for name in adapter.ranks}
        layers = {name: _linear(model, adapter, name, *shapes[name]) for name in adapter.ranks}
        for name, layer in layers.items():
            a, b = (file.get_tensor(key).float() for key in _keys(name))
            if not (a.isfinite().all() and b.isfinite().all()):
                raise ModelError(f"the adapter {adapter.folder} has numbers that are not finite in {name}")
            b = b * adapter.scales[name]
            added += [(f"{name}.a", a), (f"{name}.b", b)]
            parent, _, own = name.rpartition(".")
            made = AdaptedLinear(layer, a.to(device), b.to(device)).eval()
            setattr(model.get_submodule(parent), own, made)
    for module in model.modules():  # compiled calls of a decoder layer know nothing of it
        compiled = isinstance(getattr(vars(module).get("forward"), "__self__", None), FewRows)
        if compiled and any(isinstance(inner, AdaptedLinear) for inner in module.modules()):
            del module.forward
    return hash_of(added)


def adapted_hash(weights_hash: str, added: str) -> str:
    """The `weights_hash` of a model with what an adapter adds."""
    whole = hashlib.sha256(f"{weights_hash} {added}".encode()).hexdigest()
    return f"{FINGERPRINT_VERSION}:{whole}"


def twin(model: Any) -> Any:
    """A model with modules of its own, to attach an adapter to, which share all weights with the given one;
    before its attention is switched, as hooks know their module.
    """
    inner = vars(nn.Module())
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    for module in model.modules():
        shared += [value for name, value in vars(module).items() if name not in inner]
    return copy.deepcopy(model, {id(one): one for one in shared})


def last_call(invocation: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Where the invocation comes last in these tokens, as PEFT looks for it; None where it is not there."""
    call, size = [*invocation], len(invocation)
    places = range(len(tokens) - size, -1, -1)
    return next((at for at in places if tokens[at] == call[0] and [*tokens[at : at + size]] == call), None)


def _weights(adapter: Adapter) -> Path:
    return adapter.folder / WEIGHTS


def _keys(name: str) -> tuple[str, str]:
    a, b = (f"base_model.model.{name}.lora_{part}.weight" for part in "AB")
    return a, b


def _check_fields(path: Path, stated: Mapping[str, Any]) -> None:
    if stated.get("peft_type") != "LORA":
        kind = str(stated.get("peft_type"))[:40]
        raise ModelError(f"{path} is an adapter of the type {kind}, and LoRA's are served: {MERGE}")
    refused = [name for name, value in stated.items() if name not in _NO_MATTER | _READ and value]
    if stated.get("bias", "none") != "none":
        refused.append("bias")
    if stated.get("init_lora_weights") not in _PLAIN_BEGINNINGS:
        refused.append("init_lora_weights")
    refused += [name for name, kind in _KINDS.items() if not isinstance(stated.get(name) or kind(), kind)]
    if refused:
        value = str(stated[refused[0]])[:40]
        raise ModelError(f"the adapter {path} has {refused[0]}={value}, which is not served: {MERGE}")


def _ranks(path: Path) -> dict[str, int]:
    """The ranks by the names of modules, from the header of the weights."""
    from safetensors import safe_open

    found: dict[str, dict[str, list[int]]] = {}
    with safe_open(path / WEIGHTS, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            part, own = _KEY.fullmatch(key), file.get_slice(key)
            shape = own.get_shape()
            if part is None or len(shape) != 2 or own.get_dtype() not in _DTYPES:
                raise ModelError(f"the adapter {path} has {key[:120]}, which is not served: {MERGE}")
            found.setdefault(part[1], {})[part[2]] = shape
    for name, parts in found.items():
        if len(parts) != 2 or parts["A"][0] != parts["B"][1] or not 0 < parts["A"][0] <= _MOST_RANK:
            raise ModelError(
                f"the adapter {path} has no matrices A and B of one rank, at most {_MOST_RANK}, for "
                f"{name[:80]}: fetch it again"
            )
    if not found:
        raise ModelError(f"the adapter {path} has no weights: fetch it again")
    return {name: parts["A"][0] for name, parts in sorted(found.items())}


def _scale(path: Path, stated: Mapping[str, Any], name: str, rank: int) -> float:
    """What B·A is multiplied by: alpha / r, or of rank-stabilized LoRA (arXiv 2312.03732) alpha / √r."""
    r, alpha = _of_pattern(path, stated, "rank", name), _of_pattern(path, stated, "alpha", name)
    if r != rank:
        raise ModelError(f"the adapter {path} states the rank {r} for {name}, and has {rank}: fetch it again")
    return float(alpha / (math.sqrt(rank) if stated.get("use_rslora") else rank))


def _of_pattern(path: Path, stated: Mapping[str, Any], kind: str, name: str) -> float:
    """The rank or alpha of a module: that of the first pattern that ends its name, as in PEFT."""
    patterns = stated.get(f"{kind}_pattern") or {}
    value = stated.get({"rank": "r", "alpha": "lora_alpha"}[kind], 8)
    for pattern, own in patterns.items():
        # Without groups, and with few repetitions, no pattern takes longer than its length allows.
        if len(pattern) > _MOST_PATTERN or "(" in pattern or sum(map(pattern.count, "*+?{")) > 3:
            raise ModelError(
                f"the adapter {path} has a {kind}_pattern {pattern[:80]} that is not read: {MERGE}"
            )
        if re.match(rf"(.*\.)?({pattern})$", name):
            value = own
            break
    if type(value) not in (int, float) or not 0 < value < 1e6:
        raise ModelError(f"the adapter {path} states no {kind} that can be for {name[:80]}: fetch it again")
    return float(value)


def _invocation(path: Path, stated: Mapping[str, Any]) -> tuple[int, ...]:
    ids = stated.get("alora_invocation_tokens")
    if ids is None:
        return ()
    whole = isinstance(ids, list) and 0 < len(ids) <= _MOST_CALL
    if not whole or not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
        raise ModelError(f"the adapter {path} has alora_invocation_tokens that are no tokens: fetch it again")
    return tuple(ids)


def _shapes(file: Any, name: str) -> tuple[int, int]:
    """How many numbers a pair of matrices takes and gives."""
    a, b = (file.get_slice(key).get_shape() for key in _keys(name))
    return a[1], b[0]


def _linear(model: Any, adapter: Adapter, name: str, takes: int, gives: int) -> Any:
    """The linear layer of a name, if it is of this shape."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        layer = None
    sizes = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if layer is None or not all(isinstance(size, int) for size in sizes):
        raise ModelError(
            f"the adapter {adapter.folder} is for {name[:120]}, which is no linear layer of this model: give "
            "the model that it was trained for, or merge it there (merge_and_unload)"
        )
    if sizes != (takes, gives):
        raise ModelError(
            f"the adapter {adapter.folder} takes {takes} numbers and gives {gives} in {name}, and this model "
            f"{sizes[0]} and {sizes[1]}: give the model that it was trained for"
        )
    return layer
