"""What each field of a manifest may hold. All of it is looked at before any of it is used: a manifest is text
from outside, and its checksums only tell that nobody changed it later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from offload_decode.store.checks import count, just_names, one_of, plain_object, plain_values, text
from offload_decode.types import ModelShape

MOST_TOKENS = 2**31 - 1
"""Tokens of a store: indexes number them with int32."""

MOST_SAMPLES = 1 << 20
"""Queries of a KV head in a store: a thousand times what tuning takes; their places are held in memory."""

_DEPTH = 8


def check_fields(data: Mapping[str, Any], dtypes: Collection[str], encodings: Collection[str]) -> None:
    """`ValueError` names the field of a manifest that has not the type or the range that it must have."""
    for name in ("model_id", "model_config_hash", "weights_hash", "tokenizer_hash", "token_hash", "software"):
        text(name, data[name])
    for name in ("n_tokens", "page_size"):
        count(name, data[name], MOST_TOKENS)
    count("query_samples", data["query_samples"], 2**63 - 1)
    if data["format_version"] != 2 or data["seam"] is not None:
        count("seam", data["seam"], data["n_tokens"], least=0)
    one_of("dtype", data["dtype"], dtypes)
    one_of("template", data["template"], ("chat", "plain"))
    for name in ("rope", "prefill"):
        plain_object(name, data[name])
        plain_values(name, data[name], _DEPTH)
    text("prefill.method", data["prefill"].get("method"))
    if "weights" in data["prefill"]:
        one_of("prefill.weights", data["prefill"]["weights"], ("int8", "int4"))
    plain_object("kv", data["kv"])
    just_names("kv", data["kv"], ("keys", "values"))
    for kind, form in data["kv"].items():
        one_of(f"kv.{kind}", form, (data["dtype"], *encodings))


def check_errors(data: Mapping[str, Any], shape: ModelShape, encodings: Collection[str]) -> None:
    """`ValueError` unless `kv_error` is empty, or has an entry a full layer of all that is encoded."""
    found, full = data["kv_error"], shape.full_layers
    kinds = ("keys",) if shape.latent else ("keys", "values")
    encoded = [kind for kind in kinds if data["kv"][kind] in encodings]
    plain_object("kv_error", found)
    if not found:
        return
    just_names("kv_error", found, encoded)
    for kind, entries in found.items():
        name = f"kv_error.{kind}"
        if not isinstance(entries, list) or len(entries) != len(full):
            raise ValueError(f"{name} is not a list with an entry a full-attention layer")
        for entry, layer in zip(entries, full, strict=True):
            plain_object(name, entry)
            sums = () if data["seam"] is None else ("sums",)
            just_names(name, entry, ("layer", "relative_rms", "largest", *sums))
            if type(entry["layer"]) is not int or entry["layer"] != layer:
                raise ValueError(f"{name} has no entry of layer {layer} in its place")
            for part in ("relative_rms", "largest"):
                if not _is_size(entry[part]):
                    raise ValueError(f"{name} has a {part} that is no number of 0 or more")
            for part in sums:
                if (
                    not isinstance(entry[part], list)
                    or len(entry[part]) != 3
                    or not all(map(_is_size, entry[part]))
                ):
                    raise ValueError(f"{name} has {part} that are not three numbers of 0 or more")


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")
