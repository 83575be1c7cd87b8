"""What each field of a manifest may hold. All of it is looked at before any of it is used: a manifest is text
from outside, and its checksums only tell that nobody changed it later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

MOST_TOKENS = 2**31 - 1
"""Tokens of a store: indexes number them with int32."""

_LAYERS, _HEADS, _CHANNELS = 4096, 65_536, 65_536
_TEXT, _DEPTH = 4096, 8


def check_fields(data: Mapping[str, Any], dtypes: Collection[str], encodings: Collection[str]) -> None:
    """`ValueError` names the field of a manifest that has not the type or the range that it must have."""
    shape = data["shape"]
    _check_shape(shape)
    for name in ("model_id", "model_config_hash", "weights_hash", "tokenizer_hash", "token_hash", "software"):
        _text(name, data[name])
    for name in ("n_tokens", "page_size"):
        _count(name, data[name], MOST_TOKENS)
    _count("query_samples", data["query_samples"], 2**63 - 1)
    _one_of("dtype", data["dtype"], dtypes)
    _one_of("template", data["template"], ("chat", "plain"))
    for name in ("rope", "prefill"):
        _object(name, data[name])
        _plain(name, data[name], _DEPTH)
    _text("prefill.method", data["prefill"].get("method"))
    _object("kv", data["kv"])
    _names("kv", data["kv"], ("keys", "values"))
    for kind, form in data["kv"].items():
        _one_of(f"kv.{kind}", form, (data["dtype"], *encodings))
    full = [layer for layer, kind in enumerate(shape["layers"]) if kind == "full"]
    _check_errors(data["kv_error"], [kind for kind, form in data["kv"].items() if form in encodings], full)


def _check_shape(shape: Any) -> None:
    _object("shape", shape)
    _names("shape", shape, ("layers", "query_heads", "kv_heads", "head_dim", "sliding_window"))
    layers, window = shape["layers"], shape["sliding_window"]
    if not isinstance(layers, list) or not 0 < len(layers) <= _LAYERS:
        raise ValueError(f"shape.layers is not a list of 1 to {_LAYERS:,} layers")
    for kind in layers:
        _one_of("shape.layers", kind, ("full", "sliding"))
    _count("shape.query_heads", shape["query_heads"], _HEADS)
    _count("shape.kv_heads", shape["kv_heads"], _HEADS)
    _count("shape.head_dim", shape["head_dim"], _CHANNELS)
    if shape["query_heads"] % shape["kv_heads"]:
        raise ValueError("shape.query_heads is no multiple of shape.kv_heads")
    if window is None:
        if "sliding" in layers:
            raise ValueError("shape.sliding_window is missing, and layers slide")
    else:
        _count("shape.sliding_window", window, 2**63 - 1, least=2)


def _check_errors(found: Any, encoded: list[str], full: list[int]) -> None:
    """Empty, or an entry a full-attention layer of all that is encoded."""
    _object("kv_error", found)
    if not found:
        return
    _names("kv_error", found, encoded)
    for kind, entries in found.items():
        name = f"kv_error.{kind}"
        if not isinstance(entries, list) or len(entries) != len(full):
            raise ValueError(f"{name} is not a list with an entry a full-attention layer")
        for entry, layer in zip(entries, full, strict=True):
            _object(name, entry)
            _names(name, entry, ("layer", "relative_rms", "largest"))
            if type(entry["layer"]) is not int or entry["layer"] != layer:
                raise ValueError(f"{name} has no entry of layer {layer} in its place")
            for part in ("relative_rms", "largest"):
                if type(entry[part]) not in (int, float) or not 0 <= entry[part] < float("inf"):
                    raise ValueError(f"{name} has a {part} that is no number of 0 or more")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _TEXT:
        raise ValueError(f"{name} is not a text of at most {_TEXT:,} letters")


def _count(name: str, value: Any, most: int, least: int = 1) -> None:
    if type(value) is not int or not least <= value <= most:  # True is an int to isinstance
        raise ValueError(f"{name} is not a whole number from {least} to {most:,}")


def _one_of(name: str, value: Any, known: Collection[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} is none of {', '.join(known)}")


def _object(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")


def _names(name: str, value: dict[str, Any], wanted: Collection[str]) -> None:
    if odd := sorted({*value} ^ {*wanted}):
        raise ValueError(
            f"{name} should have just {', '.join(wanted)}, and {odd[0]!r} is too many or missing"
        )


def _plain(name: str, value: Any, depth: int) -> None:
    """Values of JSON, nested no deeper than options and RoPE parameters are."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if inner and not depth:
        raise ValueError(f"{name} is nested too deeply")
    for each in inner:
        _plain(name, each, depth - 1)
