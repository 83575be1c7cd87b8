"""The shape of a model as a manifest states it, looked at before it is used."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

from offload_decode.store.checks import count, just_names, one_of, plain_object, text
from offload_decode.types import LayerKind, LayerShape, ModelShape, StateShape

_LAYERS, _HEADS, _CHANNELS, _STATES, _AXES = 4096, 65_536, 65_536, 64, 8
_MOST_NUMBERS = 1 << 32  # of a recurrent state; the largest that are known have a thousandth


def shape_from(data: Any, version: int, dtypes: Collection[str]) -> ModelShape:
    """The shape in a manifest of that format version; `ValueError` names what it cannot be."""
    plain_object("shape", data)
    layers = data.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= _LAYERS:
        raise ValueError(f"shape.layers is not a list of 1 to {_LAYERS:,} layers")
    if version == 2:
        data = _of_version_2(data, layers)
    just_names("shape", data, ("layers", "query_heads"))
    count("shape.query_heads", data["query_heads"], _HEADS)
    shapes = tuple(_layer(own, dtypes) for own in data["layers"])
    full = [own for own in shapes if own.kind is LayerKind.FULL] or [own for own in shapes if own.local][:1]
    if len({(own.kv_heads, own.key_dim, own.value_dim, own.latent) for own in full}) != 1:
        raise ValueError("shape.layers has no full layers of one geometry")
    if data["query_heads"] % full[0].kv_heads:
        raise ValueError("shape.query_heads is no multiple of the KV heads")
    return ModelShape(shapes, data["query_heads"])


def _layer(data: Any, dtypes: Collection[str]) -> LayerShape:
    name = "a layer of shape.layers"
    plain_object(name, data)
    just_names(name, data, ("kind", "kv_heads", "key_dim", "value_dim", "window", "states", "latent"))
    one_of(f"the kind of {name}", data["kind"], [*LayerKind])
    kind = LayerKind(data["kind"])
    keeps, local = kind is not LayerKind.NONE, kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
    for field, most in (("kv_heads", _HEADS), ("key_dim", _CHANNELS), ("value_dim", _CHANNELS)):
        count(f"{field} of {name}", data[field], most if keeps else 0, least=int(keeps))
    if local:
        count(f"the window of {name}", data["window"], 2**63 - 1, least=2)
    elif data["window"] is not None:
        raise ValueError(f"{name} has a window and does not slide")
    if type(data["latent"]) is not bool or (data["latent"] and data["key_dim"] != data["value_dim"]):
        raise ValueError(f"latent of {name} is not what its widths say")
    states = data["states"]
    if not isinstance(states, list) or len(states) > _STATES:
        raise ValueError(f"the states of {name} are no list of at most {_STATES}")
    found = tuple(_state(own, dtypes) for own in states)
    if len({own.name for own in found}) != len(found):
        raise ValueError(f"the states of {name} have one name twice")
    return LayerShape(**{**data, "kind": kind, "states": found})


def _state(data: Any, dtypes: Collection[str]) -> StateShape:
    name = "a state of shape.layers"
    plain_object(name, data)
    just_names(name, data, ("name", "shape", "dtype"))
    text(f"the name of {name}", data["name"])
    if not data["name"].isalnum() or not data["name"].isascii():
        raise ValueError(f"the name of {name} is not of letters and digits")
    one_of(f"the dtype of {name}", data["dtype"], dtypes)
    sizes = data["shape"]
    if not isinstance(sizes, list) or not 0 < len(sizes) <= _AXES:
        raise ValueError(f"the shape of {name} is no list of 1 to {_AXES} sizes")
    for size in sizes:
        count(f"a size of {name}", size, _MOST_NUMBERS)
    if prod(sizes) > _MOST_NUMBERS:
        raise ValueError(f"{name} has more than {_MOST_NUMBERS:,} numbers")
    return StateShape(data["name"], tuple(sizes), data["dtype"])


def _of_version_2(data: dict[str, Any], kinds: list[Any]) -> dict[str, Any]:
    """Version 2 states the heads once, for layers that are full or slide."""
    just_names("shape", data, ("layers", "query_heads", "kv_heads", "head_dim", "sliding_window"))
    return {
        "query_heads": data["query_heads"],
        "layers": [
            {
                "kind": kind,
                "kv_heads": data["kv_heads"],
                "key_dim": data["head_dim"],
                "value_dim": data["head_dim"],
                "window": data["sliding_window"] if kind == "sliding" else None,
                "states": [],
                "latent": False,
            }
            for kind in kinds
        ],
    }
