import json
from dataclasses import replace

import pytest

from offload_decode.common.errors import StoreForeign
from offload_decode.store.format import Manifest
from offload_decode.types import LayerKind, ModelShape
from tests.store.jobs import make_job

MANIFEST = make_job(40).manifest


def test_manifest_survives_json() -> None:
    assert Manifest.from_json(json.loads(json.dumps(MANIFEST.to_json()))) == MANIFEST


def test_json_does_not_depend_on_the_order_of_rope_parameters() -> None:
    turned = make_job(40).manifest
    object.__setattr__(turned, "rope", dict(reversed(list(MANIFEST.rope.items()))))
    assert json.dumps(turned.to_json()) == json.dumps(MANIFEST.to_json())


@pytest.mark.parametrize("version", [0, 1, "2", None, 99])
def test_another_version_is_refused_by_number(version: object) -> None:
    with pytest.raises(StoreForeign, match=f"format version {version!r} .* versions 2 and 3"):
        Manifest.from_json(MANIFEST.to_json() | {"format_version": version})


def test_a_manifest_of_version_2_is_read() -> None:
    of_then = {
        "layers": ["full", "sliding", "full"],
        "query_heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "sliding_window": 33,
    }
    then = MANIFEST.to_json() | {"format_version": 2, "shape": of_then}
    kinds = (LayerKind.FULL, LayerKind.SLIDING, LayerKind.FULL)
    now = replace(MANIFEST, shape=ModelShape.uniform(kinds, 4, 2, 64, window=33))
    assert Manifest.from_json(then) == now
    with pytest.raises(StoreForeign, match="window"):
        Manifest.from_json(then | {"shape": of_then | {"sliding_window": 1, "layers": ["sliding", "full"]}})
    with pytest.raises(StoreForeign, match="lacks"):
        Manifest.from_json(then | {"shape": {"layers": ["full"], "query_heads": 1}})


def test_unknown_and_missing_fields_are_named() -> None:
    data = MANIFEST.to_json()
    with pytest.raises(StoreForeign, match="'codec_level'"):
        Manifest.from_json(data | {"codec_level": 3})
    with pytest.raises(StoreForeign, match=r"shape .*'latent_dim'"):
        Manifest.from_json(data | {"shape": data["shape"] | {"latent_dim": 3}})
    del data["tokenizer_hash"]
    with pytest.raises(StoreForeign, match="'tokenizer_hash'"):
        Manifest.from_json(data)


def test_a_scaling_is_said_where_a_layer_has_one_and_makes_no_other_shape() -> None:
    assert "scaling" not in MANIFEST.to_json()["shape"]["layers"][0]
    layers = tuple(replace(own, scaling=0.25) for own in MANIFEST.shape.layers)
    stated = replace(MANIFEST, shape=replace(MANIFEST.shape, layers=layers))
    assert [own.scaling for own in Manifest.from_json(stated.to_json()).shape.layers] == [0.25] * len(layers)
    assert stated == MANIFEST
    data = stated.to_json()
    data["shape"]["layers"][0]["scaling"] = "0.25"
    with pytest.raises(StoreForeign, match="scaling"):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "int4"),
        ("n_tokens", "40"),
        ("n_tokens", 0),
        ("n_tokens", True),
        ("shape", None),
        ("shape", {**MANIFEST.to_json()["shape"], "layers": ["linear"]}),
        ("shape", {**MANIFEST.to_json()["shape"], "query_heads": 3}),
        ("prefill", {}),
        ("rope", []),
        ("template", "xml"),
        ("model_id", 5),
        *(("seam", value) for value in (-1, 41, 1.5, True, "3", None)),
    ],
)
def test_values_that_make_no_sense_are_refused(field: str, value: object) -> None:
    with pytest.raises(StoreForeign, match="manifest"):
        Manifest.from_json(MANIFEST.to_json() | {field: value})
