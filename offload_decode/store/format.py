"""The manifest: what a store says about itself, in the attributes of its root group."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from offload_decode.errors import ConfigError, StoreForeign
from offload_decode.indexes.rows import encodings
from offload_decode.store.fields import MOST_SAMPLES, check_errors, check_fields
from offload_decode.store.shapes import shape_from
from offload_decode.types import LayerShape, ModelShape

FORMAT_VERSION = 3
READ_VERSIONS = (2, FORMAT_VERSION)
"""Stores of version 2 have plain layers alone, and say so in fewer words."""
FINGERPRINT_VERSION = "2"
"""Of `model_config_hash` and `weights_hash`, which begin with it and a colon; the others are of version 1."""
ATTRIBUTE = "offload_decode"
"""Attribute of the root group that holds the manifest."""

Array = npt.NDArray[Any]

_DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}
_ENCODED = (encodings.INT8, encodings.INT4)

KV_KINDS: dict[str, tuple[str | None, str | None]] = {
    "auto": (None, None),
    "int8": (encodings.INT8, encodings.INT8),
    "int4-values": (encodings.INT8, encodings.INT4),
}
"""What `--kv` offers: how keys and values are encoded; None is the model's dtype."""


def kv_encodings(kv: str) -> tuple[str | None, str | None]:
    """One of `KV_KINDS`; raises `ConfigError`."""
    if kv not in KV_KINDS:
        raise ConfigError(f"unknown kv '{kv}'; known are: {', '.join(KV_KINDS)}")
    return KV_KINDS[kv]


def kv_kinds(shape: ModelShape) -> list[str]:
    """Those of `KV_KINDS` that a model can be stored in."""
    halves = shape.value_dim % 2 == 0 and not shape.latent
    return [kv for kv, (_, values) in KV_KINDS.items() if halves or values != encodings.INT4]


def stored_types(kv: str, dtype: str, shape: ModelShape) -> dict[str, str]:
    """What the manifest's `kv` is for `--kv` and a model. Raises `ConfigError`."""
    keys, values = kv_encodings(kv)
    if kv not in kv_kinds(shape):
        reason = (
            "encodes values unlike keys, and this model's values are its keys"
            if shape.latent
            else f"keeps two channels in a byte, and this model's values have {shape.value_dim}"
        )
        raise ConfigError(f"kv '{kv}' {reason}: choose kv int8")
    return {"keys": keys or dtype, "values": values or dtype}


def token_hash(tokens: Array) -> str:
    """SHA-256 of the tokens as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<i4").data).hexdigest()


def fingerprint_version(fingerprint: str) -> str:
    """The version that a fingerprint states."""
    version, colon, _ = fingerprint.partition(":")
    return version if colon else "1"


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name, `bfloat16` included; encoded rows are bytes."""
    if name in _ENCODED:
        return np.dtype(np.uint8)
    return _DTYPES[name] if name in _DTYPES else np.dtype(name)


def running_software() -> str:
    """This release, as a manifest names it."""
    try:
        return f"offload-decode {version('offload-decode')}"
    except PackageNotFoundError:  # run from a checkout that was never installed
        return "offload-decode"


@dataclass(frozen=True)
class Manifest:
    """What was prefilled, with which model, and how.

    There is no time in it, so that two prefills of one corpus are the same bytes.
    `rope` and `prefill` hold plain JSON values; `prefill` names its `method` and what else shaped
    the numbers: `weights`, where they were quantised for the prefill (`int8` or `int4`).
    `weights_hash` tells a fine-tuned model from its base. It and `model_config_hash` begin with
    `FINGERPRINT_VERSION`.
    `template` is "chat" where the tokens open a chat template, else "plain".
    `kv` says how `keys` and `values` are stored: in `dtype`, or as rows of `indexes.rows.encodings`.
    `kv_error` is what encoding cost, measured as they were written and empty until then: for `keys` and
    `values` a list with an entry a layer, of the error's root mean square relative to that of the numbers,
    and the largest error; and the sums that these are made of (`store.encoded.EncodingLoss`) at the seam.
    `seam` tokens are those of whole forward chunks, after which an append goes on: windows and states there
    are kept too. 0 where there are none; None in stores of format version 2.
    """

    model_id: str
    model_config_hash: str
    weights_hash: str
    tokenizer_hash: str
    dtype: str
    shape: ModelShape
    rope: dict[str, Any]
    n_tokens: int
    token_hash: str
    prefill: dict[str, Any]
    template: str = "plain"
    kv: dict[str, str] = field(default_factory=dict)
    kv_error: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    page_size: int = 16
    query_samples: int = 1024
    seam: int | None = 0
    software: str = field(default_factory=running_software)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not self.kv:
            object.__setattr__(self, "kv", {"keys": self.dtype, "values": self.dtype})
        assert self.dtype in _DTYPES, f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}"
        assert self.template in ("chat", "plain"), f"template {self.template!r} is neither 'chat' nor 'plain'"
        assert self.n_tokens >= 0 < min(self.page_size, self.query_samples), "counts are positive"
        assert isinstance(self.prefill.get("method"), str), "prefill names its method"
        assert set(self.kv) == {"keys", "values"}, "kv says how keys and values are stored"
        assert {*self.kv.values()} <= {self.dtype, *_ENCODED}, f"kv {self.kv} is not of {self.dtype} rows"
        assert encodings.INT4 not in self.kv.values() or self.shape.value_dim % 2 == 0, "int4 rows are even"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The model's dtype, of bounds, queries and plain keys and values (`ml_dtypes.bfloat16` for
        bfloat16).
        """
        return numpy_dtype(self.dtype)

    @property
    def weights(self) -> str:
        """Of the model that prefilled: `auto` (the checkpoint's), `int8` or `int4`."""
        return str(self.prefill.get("weights", "auto"))

    def encoding(self, kind: str) -> str | None:
        """How `keys` or `values` are encoded; None where they are in the model's dtype."""
        return self.kv[kind] if self.kv[kind] in _ENCODED else None

    @property
    def n_samples(self) -> int:
        """Sampled queries per KV head: as asked for, or all there are."""
        return min(self.query_samples, self.n_tokens * self.shape.group)

    def window(self, layer: LayerShape) -> int:
        """Tokens whose KV a local layer keeps: those that the next token can see besides itself."""
        assert layer.window is not None, "it is a local layer"
        return min(self.n_tokens, layer.window - 1)

    def kept_window(self, layer: LayerShape) -> int:
        """Tokens of which the store has them: from the first that is in the window at the seam."""
        assert layer.window is not None, "it is a local layer"
        return self.n_tokens - max(0, (self.seam or self.n_tokens) - (layer.window - 1))

    @property
    def keeps_seam(self) -> bool:
        """Whether the states at the seam are others than those at the end."""
        return bool(self.seam) and self.seam != self.n_tokens

    def to_json(self) -> dict[str, Any]:
        """JSON values in one order, whatever the order of the inner dicts was."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"shape": asdict(self.shape)}
        ordered: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True, allow_nan=False))
        return ordered

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest of a store; StoreForeign names a version or field that this release does not know."""
        check_version(data)
        if data["format_version"] == 2:
            data = {"seam": None, **data}
        _same_names("manifest", data, {f.name for f in fields(cls)})
        try:
            check_fields(data, _DTYPES, _ENCODED)
            shape = shape_from(data["shape"], data["format_version"], _DTYPES)
            if encodings.INT4 in data["kv"].values() and shape.value_dim % 2:
                raise ValueError("int4 rows have an even number of channels")
            if shape.latent and data["kv"]["keys"] != data["kv"]["values"]:
                raise ValueError("the values of its latents are not stored as their keys")
            if min(data["query_samples"], data["n_tokens"] * shape.group) > MOST_SAMPLES:
                raise ValueError(f"it keeps more than {MOST_SAMPLES:,} queries of a KV head")
            check_errors(data, shape, _ENCODED)
        except ValueError as error:
            raise StoreForeign(
                f"The store's manifest cannot be used, because {error}: prefill again."
            ) from error
        return cls(**{**data, "shape": shape, "format_version": FORMAT_VERSION})


def check_version(data: Mapping[str, Any]) -> None:
    """StoreForeign where the manifest `data` is of a format version that this release cannot read."""
    version = data.get("format_version")
    if type(version) is not int or version not in READ_VERSIONS:
        raise StoreForeign(
            f"The store has format version {version!r:.40} and this release reads versions "
            f"{' and '.join(map(str, READ_VERSIONS))}: use the release that made it, or prefill again."
        )


def _same_names(what: str, data: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(data) - known):
        raise StoreForeign(
            f"The store's {what} has a field {unknown[0]!r} that this release does not know: "
            "use the release that made the store, or prefill again."
        )
    if missing := sorted(known - set(data)):
        raise StoreForeign(f"The store's {what} lacks the field {missing[0]!r}: prefill again.")
