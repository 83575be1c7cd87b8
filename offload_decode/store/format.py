"""The manifest: what a store says about itself, in its root group's attributes, checked field by field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from offload_decode.common.errors import ConfigError, StoreForeign
from offload_decode.common.rows import encodings
from offload_decode.common.rows.arrays import KEY_DTYPES
from offload_decode.types import IndexShape, LayerKind, LayerShape, ModelShape, StateShape

TEXT, OPENING = 4096, 1 << 16
MOST_TOKENS = 2**31 - 1
"""Tokens of a store: indexes number them with int32."""
MOST_SAMPLES = 1 << 20
"""Queries of a KV head in a store: a thousand times what tuning takes; their places are held in memory."""
_LAYERS, _HEADS, _CHANNELS, _STATES, _AXES, _DEPTH = 4096, 65_536, 65_536, 64, 8, 8
_MOST_NUMBERS = 1 << 32  # of a recurrent state; the largest that are known have a thousandth


def check(name: str, value: Any, wanted: Any) -> None:
    """`ValueError` with the `name` of a value from outside that is not as `wanted`, one of these: a range of
    whole numbers; a tuple of texts; a dict of fields, just these; a list of what each entry is and a range of
    lengths; `str`, `bool`, None; `float`, 0 or more; `dict`, of JSON values.
    """
    if isinstance(wanted, range):
        fits = type(value) is int and value in wanted  # True is an int to isinstance
        what = f"a whole number from {wanted[0]:,} to {wanted[-1]:,}"
    elif isinstance(wanted, tuple):
        fits, what = isinstance(value, str) and value in wanted, f"one of {', '.join(wanted)}"
    elif isinstance(wanted, dict):
        fits, what = isinstance(value, dict), "an object"
    elif isinstance(wanted, list):
        fits = isinstance(value, list) and len(value) in wanted[1]
        what = f"a list of {wanted[1][0]:,} to {wanted[1][-1]:,} entries"
    elif wanted is float:
        fits = type(value) in (int, float) and 0 <= value < float("inf")
        what = "a number of 0 or more"
    elif wanted is dict:
        fits = isinstance(value, dict) and _is_shallow(value, _DEPTH)
        what = f"an object, nested at most {_DEPTH} deep"
    elif wanted is str:
        fits, what = isinstance(value, str) and len(value) <= TEXT, f"a text of at most {TEXT:,} letters"
    else:
        fits = value is None if wanted is None else type(value) is bool
        what = "null" if wanted is None else "true or false"
    if not fits:
        raise ValueError(f"{name} is not {what}")
    if isinstance(wanted, dict):
        check_names(name, value, wanted)
        for field_name, inner in wanted.items():
            check(f"{name}.{field_name}", value[field_name], inner)
    elif isinstance(wanted, list):
        for each in value:
            check(f"an entry of {name}", each, wanted[0])


def unplaced(base: Any) -> Any:
    """What of a `Manifest.base` makes another store: all but where that lies, which may move."""
    return {**base, "store": None} if isinstance(base, dict) else base


def check_names(name: str, value: Mapping[str, Any], wanted: Collection[str]) -> None:
    """`ValueError` unless an object has just these names."""
    if unknown := sorted({*value} - {*wanted}):
        raise ValueError(f"{name} has a field {unknown[0]!r} that this release does not know")
    if missing := sorted({*wanted} - {*value}):
        raise ValueError(f"{name} lacks the field {missing[0]!r}")


def _is_shallow(value: Any, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not inner or (depth > 0 and all(_is_shallow(each, depth - 1) for each in inner))


def shape_from(data: Any, version: int, dtypes: Collection[str]) -> ModelShape:
    """The shape in a manifest of that format version; `ValueError` names what it cannot be."""
    layers = data.get("layers") if isinstance(data, dict) else None
    if not isinstance(layers, list) or not 0 < len(layers) <= _LAYERS:
        raise ValueError(f"shape.layers is not a list of 1 to {_LAYERS:,} layers")
    if version == 2:
        data = _of_version_2(data, layers)
    check_names("shape", data, ("layers", "query_heads"))
    check("shape.query_heads", data["query_heads"], range(1, _HEADS + 1))
    shapes = tuple(_layer(own, tuple(dtypes)) for own in data["layers"])
    full = [own for own in shapes if own.kind is LayerKind.FULL] or [own for own in shapes if own.local][:1]
    if len({(own.kv_heads, own.key_dim, own.value_dim, own.latent, own.index) for own in full}) != 1:
        raise ValueError("shape.layers has no full layers of one geometry")
    if data["query_heads"] % full[0].kv_heads:
        raise ValueError("shape.query_heads is no multiple of the KV heads")
    return ModelShape(shapes, data["query_heads"])


def _layer(data: Any, dtypes: tuple[str, ...]) -> LayerShape:
    name, kind = "a layer of shape.layers", data.get("kind") if isinstance(data, dict) else None
    heads, channels = (range(1, _HEADS + 1), range(1, _CHANNELS + 1)) if kind != "none" else (range(1),) * 2
    axes = [range(1, _MOST_NUMBERS + 1), range(1, _AXES + 1)]
    state = {"name": str, "shape": axes, "dtype": dtypes}
    data = {"index": None, "scaling": None, **data} if isinstance(data, dict) else data
    wanted: dict[str, Any] = {
        "kind": tuple(LayerKind),
        "kv_heads": heads,
        "key_dim": channels,
        "value_dim": channels,
        "window": range(2, 2**63) if kind in ("sliding", "chunked") else None,
        "states": [state, range(_STATES + 1)],
        "latent": bool,
        "index": None,
        "scaling": None,
    }
    if isinstance(data, dict) and data["index"] is not None:
        wanted["index"] = {"dim": range(1, _CHANNELS), "topk": range(1, 2**31)}
    if isinstance(data, dict) and data["scaling"] is not None:
        wanted["scaling"] = float
    check(name, data, wanted)
    index = None if data["index"] is None else IndexShape(**data["index"])
    if index is not None and not (data["latent"] and index.dim < data["key_dim"]):
        raise ValueError(f"index of {name} is no part of a latent's row")
    if data["latent"] and data["key_dim"] != data["value_dim"]:
        raise ValueError(f"latent of {name} is not what its widths say")
    states = tuple(StateShape(own["name"], tuple(own["shape"]), own["dtype"]) for own in data["states"])
    for own in states:
        if not own.name.isalnum() or not own.name.isascii():
            raise ValueError(f"the name of a state of {name} is not of letters and digits")
        if prod(own.shape) > _MOST_NUMBERS:
            raise ValueError(f"a state of {name} has more than {_MOST_NUMBERS:,} numbers")
    if len({own.name for own in states}) != len(states):
        raise ValueError(f"the states of {name} have one name twice")
    return LayerShape(**{**data, "kind": LayerKind(data["kind"]), "states": states, "index": index})


def _shape_fields(shape: ModelShape) -> dict[str, Any]:
    """What `shape_from` reads. An index and a scaling are left out where there are none, so that earlier
    releases read the others.
    """
    fields = asdict(shape)
    fields["layers"] = [
        {name: value for name, value in own.items() if name not in ("index", "scaling") or value is not None}
        for own in fields["layers"]
    ]
    return fields


def _of_version_2(data: dict[str, Any], kinds: list[Any]) -> dict[str, Any]:
    """Version 2 states the heads once, for layers that are full or slide."""
    check_names("shape", data, ("layers", "query_heads", "kv_heads", "head_dim", "sliding_window"))
    every = {"kv_heads": data["kv_heads"], "key_dim": data["head_dim"], "value_dim": data["head_dim"]}
    every |= {"states": [], "latent": False}
    layers = [
        {**every, "kind": kind, "window": data["sliding_window"] if kind == "sliding" else None}
        for kind in kinds
    ]
    return {"query_heads": data["query_heads"], "layers": layers}


FORMAT_VERSION = 3
READ_VERSIONS = (2, FORMAT_VERSION)
"""Stores of version 2 have plain layers alone, and say so in fewer words."""
FINGERPRINT_VERSION = "2"
"""Of `model_config_hash` and `weights_hash`, which begin with it and a colon; the others are of version 1."""
ATTRIBUTE = "offload_decode"
"""Attribute of the root group that holds the manifest."""

Array = npt.NDArray[Any]

DTYPES = {dtype.name: dtype for dtype in KEY_DTYPES}
"""Of models, by name."""
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
    return DTYPES[name] if name in DTYPES else np.dtype(name)


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
    `rope` and `prefill` hold plain JSON values; `prefill` names its `method` and what else shaped the
    numbers: `weights`, where they were quantized for the prefill (`int8` or `int4`), `rope`, where it was
    scaled (`yarn:4`), `adapter`, the folder of a LoRA that the model had, and `system`, a message before the
    corpus.
    `weights_hash` tells a fine-tuned model from its base. It and `model_config_hash` begin with
    `FINGERPRINT_VERSION`.
    `template` is "chat" where the tokens open a chat template, else "plain". `opening` is what the template
    wrote before the corpus, which may name the day; None in stores of earlier releases, and of given tokens.
    `trained` is the length of texts that the model was trained for, and that without its scaling
    (`hf.rope_scaling.Trained`); None in stores of earlier releases.
    `kv` says how `keys` and `values` are stored: in `dtype`, or as rows of `common.rows.encodings`.
    `kv_error` is what encoding cost, measured as they were written and empty until then: for `keys` and
    `values` a list with an entry a layer, of the error's root mean square relative to that of the numbers,
    and the largest error; and the sums that these are made of (`streams.EncodingLoss`) at the seam.
    `seam` is the last chunk boundary: the tokens of whole forward chunks, after which an append continues.
    Windows and states there are kept too. 0 where there are none; None in stores of format version 2.
    `marks` is how many tokens apart they, and the errors of encoding, are kept in between (`store.marks`);
    where it is stated, queries are kept to spare for a corpus that shrinks. None in stores of earlier
    releases, and without full attention.
    `base` names the store that this one begins as: its path as a `store` seen from this one's folder, its
    `digest`, and the `tokens` taken over from it.
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
    opening: str | None = None
    trained: dict[str, int] | None = None
    kv: dict[str, str] = field(default_factory=dict)
    kv_error: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    page_size: int = 16
    query_samples: int = 1024
    seam: int | None = 0
    marks: int | None = None
    base: dict[str, Any] | None = None
    software: str = field(default_factory=running_software)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if not self.kv:
            object.__setattr__(self, "kv", {"keys": self.dtype, "values": self.dtype})
        assert self.dtype in DTYPES, f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}"
        assert self.template in ("chat", "plain"), f"template {self.template!r} is neither 'chat' nor 'plain'"
        assert self.n_tokens >= 0 < min(self.page_size, self.query_samples), "counts are positive"
        assert isinstance(self.prefill.get("method"), str), "prefill names its method"
        assert set(self.kv) == {"keys", "values"}, "kv says how keys and values are stored"
        assert {*self.kv.values()} <= {self.dtype, *_ENCODED}, f"kv {self.kv} is not of {self.dtype} rows"
        assert encodings.INT4 not in self.kv.values() or self.shape.value_dim % 2 == 0, "int4 rows are even"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The model's dtype, of bounds, queries and plain rows; bfloat16 is that of `ml_dtypes`."""
        return numpy_dtype(self.dtype)

    @property
    def weights(self) -> str:
        """Of the model that prefilled: `auto` (the checkpoint's), `int8` or `int4`."""
        return str(self.prefill.get("weights", "auto"))

    @property
    def scaled(self) -> str:
        """How the RoPE of the model that prefilled was scaled, such as `yarn:4`; empty as it is trained."""
        return str(self.prefill.get("rope", ""))

    @property
    def adapter(self) -> str:
        """The folder of the LoRA of the model that prefilled; empty without one."""
        return str(self.prefill.get("adapter", ""))

    def approximations(self) -> list[str]:
        """How its keys and values differ from those of exact attention, kept as the model computes them."""
        given = [
            f"{name}={value}"
            for name, value in self.prefill.items()
            if name not in ("method", "weights", "system")
        ]
        method = self.prefill["method"]
        parts = [f"prefilled with {method} ({', '.join(given)})"] if method != "dense" else []
        return parts + [f"{kind} are {form}" for kind, form in self.kv.items() if self.encoding(kind)]

    def encoding(self, kind: str) -> str | None:
        """How `keys` or `values` are encoded; None where they are in the model's dtype."""
        return self.kv[kind] if self.kv[kind] in _ENCODED else None

    @property
    def encoded(self) -> list[str]:
        """Which of `keys` and `values` are encoded; the values of latents are their keys."""
        return [kind for kind in ("keys", "values")[: 2 - self.shape.latent] if self.encoding(kind)]

    @property
    def n_marks(self) -> int:
        """Marks of a layer: up to the seam."""
        return (self.seam or 0) // self.marks if self.marks else 0

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
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"shape": _shape_fields(self.shape)}
        if self.base is None:  # so that earlier releases read stores without one
            del values["base"]
        ordered: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True, allow_nan=False))
        return ordered

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """The manifest of a store; StoreForeign names a version or field that this release does not know."""
        check_version(data)
        if data["format_version"] == 2:
            data = {"seam": None, **data}
        data = {"opening": None, "trained": None, "marks": None, "base": None, **data}
        try:
            shape = _checked(data, [own.name for own in fields(cls)])
        except ValueError as error:
            raise StoreForeign(
                f"The store's manifest cannot be used, because {error}: use the release that made the store, "
                "or prefill again."
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


def _checked(data: Mapping[str, Any], names: Collection[str]) -> ModelShape:
    """The shape in a manifest; `ValueError` names a field of a wrong type or out of range."""
    check_names("it", data, names)
    texts = ("model_id", "model_config_hash", "weights_hash", "tokenizer_hash", "token_hash", "software")
    ranges = {**dict.fromkeys(("n_tokens", "page_size"), MOST_TOKENS), "query_samples": 2**63 - 1}
    wanted = {**dict.fromkeys(texts, str), **{name: range(1, most + 1) for name, most in ranges.items()}}
    wanted |= {"dtype": tuple(DTYPES), "template": ("chat", "plain"), "rope": dict, "prefill": dict}
    for name, own in wanted.items():
        check(name, data[name], own)
    if not (
        data["opening"] is None or (isinstance(data["opening"], str) and len(data["opening"]) <= OPENING)
    ):
        raise ValueError(f"opening is not a text of at most {OPENING:,} letters")
    if data["trained"] is not None:
        check("trained", data["trained"], dict.fromkeys(("length", "unscaled"), range(1 << 53)))
    if data["base"] is not None:
        tokens = range(data["n_tokens"] + 1)
        check("base", data["base"], {"store": str, "digest": str, "tokens": tokens})
    if data["format_version"] != 2 or data["seam"] is not None:
        check("seam", data["seam"], range(data["n_tokens"] + 1))
    check("prefill.method", data["prefill"].get("method"), str)
    if data["marks"] is not None:
        chunk = data["prefill"].get("chunk")
        check("prefill.chunk", chunk, range(1, MOST_TOKENS + 1))
        check("marks", data["marks"], range(chunk, MOST_TOKENS + 1, chunk))
        if (data["marks"] // chunk).bit_count() != 1:
            raise ValueError("marks is not prefill.chunk doubled some times")
    if "weights" in data["prefill"]:
        check("prefill.weights", data["prefill"]["weights"], ("int8", "int4"))
    for name in {"rope", "adapter"} & {*data["prefill"]}:
        check(f"prefill.{name}", data["prefill"][name], str)
    kinds = (data["dtype"], *_ENCODED)
    check("kv", data["kv"], {"keys": kinds, "values": kinds})
    shape = shape_from(data["shape"], data["format_version"], DTYPES)
    if encodings.INT4 in data["kv"].values() and shape.value_dim % 2:
        raise ValueError("int4 rows have an even number of channels")
    if shape.latent and data["kv"]["keys"] != data["kv"]["values"]:
        raise ValueError("the values of its latents are not stored as their keys")
    if min(data["query_samples"], data["n_tokens"] * shape.group) > MOST_SAMPLES:
        raise ValueError(f"it keeps more than {MOST_SAMPLES:,} queries of a KV head")
    if data["kv_error"] != {}:  # an entry a full layer of all that is encoded
        full, sums = shape.full_layers, {} if data["seam"] is None else {"sums": [float, range(3, 4)]}
        encoded = [kind for kind in ("keys", "values")[: 2 - shape.latent] if data["kv"][kind] in _ENCODED]
        entry = {"layer": range(_LAYERS), "relative_rms": float, "largest": float, **sums}
        count = range(len(full), len(full) + 1)
        check("kv_error", data["kv_error"], {kind: [entry, count] for kind in encoded})
        for kind, found in data["kv_error"].items():
            if [own["layer"] for own in found] != [*full]:
                raise ValueError(f"kv_error.{kind} has not an entry for each full-attention layer, in order")
    return shape
