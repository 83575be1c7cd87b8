"""Weights in GGUF's blocks: unpacked as the gguf package does, and multiplied where they lie."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from offload_decode.common.errors import ModelError
from offload_decode.common.rows import ggml_blocks, ggml_products
from offload_decode.common.rows.ggml_blocks import FORMATS, unpack
from offload_decode.common.rows.ggml_products import Matrices, quantized
from tests.common.test_scan import run_compiled

HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 12: [0, 2], 13: [0, 2], 14: [208]}  # bytes of float16
KINDS = [pytest.param(kind, id=form.name) for kind, form in FORMATS.items()]
OF_512 = 37  # rows, no multiple of what a thread or a tile takes


def with_halves(blocks, kind, values):
    """Blocks [rows, blocks of a row, bytes] with these float16 as scales and minima, as rows of bytes."""
    for place in HALVES[kind]:
        bits = np.broadcast_to(np.asarray(values, np.float16), blocks.shape[:2]).copy()
        blocks[:, :, place : place + 2] = bits[..., None].view(np.uint8)
    return blocks.reshape(len(blocks), blocks.shape[1] * blocks.shape[2])


def random_blocks(kind, rows=OF_512, width=512, seed=0, scales=None):
    rng = np.random.default_rng(seed)
    form = FORMATS[kind]
    blocks = rng.integers(0, 256, (rows, width // form.weights, form.bytes), dtype=np.uint8)
    return with_halves(blocks, kind, rng.standard_normal(blocks.shape[:2]) if scales is None else scales)


def unpacked(blocks, kind):
    form = FORMATS[kind]
    out = np.full((len(blocks), blocks.shape[1] // form.bytes * form.weights), np.nan, np.float32)
    unpack(blocks, kind, out)
    return out


def activations(count, width=512, seed=1):
    return np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_weights_are_those_of_the_gguf_package(kind):
    blocks = random_blocks(kind)
    np.testing.assert_array_equal(
        unpacked(blocks, kind), gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    )


@pytest.mark.parametrize("kind", [2, 3, 6, 7, 8])
def test_quantized_weights_come_back(kind):
    weights = activations(5)
    blocks = gguf.quantize(weights, gguf.GGMLQuantizationType(kind))
    found = unpacked(blocks, kind)
    np.testing.assert_array_equal(found, gguf.dequantize(blocks, gguf.GGMLQuantizationType(kind)))
    assert np.linalg.norm(found - weights) < 0.1 * np.linalg.norm(weights)


@pytest.mark.parametrize("kind", [7, 14])
def test_bfloat16_is_rounded_to_nearest_even(kind):
    scales = np.full((OF_512, 512 // FORMATS[kind].weights), 1.001)
    scales[0], scales[1], scales[2] = 6e-8, np.nan, np.inf  # subnormal, and what is no number
    blocks = random_blocks(kind, scales=scales)
    out = np.empty((OF_512, 512), np.uint16)
    unpack(blocks, kind, out)
    expected = unpacked(blocks, kind).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(out.view(ml_dtypes.bfloat16).astype("f"), expected.astype("f"))


def multiply(x, blocks, kind):
    return Matrices([(blocks, kind)]).multiply(x)[0]


OFTEN = (6, 8, 14)  # in every form of products: of one part a block, of eight bits, and the largest of fewer
FORMS = [pytest.param((kind, ""), id=form.name) for kind, form in FORMATS.items()] + [
    pytest.param((kind, form), id=f"{own.name}-{form}", marks=() if kind in OFTEN else pytest.mark.slow)
    for form in ggml_products.forms()[1:]
    for kind, own in FORMATS.items()
]


@pytest.fixture(params=FORMS)
def kind(request, monkeypatch):
    number, form = request.param
    monkeypatch.setattr(ggml_products, "FORM", form or ggml_products.FORM)
    return number


def test_products_are_those_of_the_rounded_activations(kind):
    blocks = random_blocks(kind)
    weights = unpacked(blocks, kind).T.astype(np.float64)
    for count in (1, 2, 3, 5, 8, 16, 21):
        x = activations(count)
        codes, scales, *_ = quantized(x, len(x))
        rounded = (codes.reshape(*scales.shape, 32) * scales[..., None]).reshape(-1, 512)[:count]
        assert np.abs(rounded - x).max() <= 0.5001 * scales.max()
        found = multiply(x, blocks, kind)
        assert found.shape == (count, OF_512)
        assert (np.abs(found - rounded @ weights) <= 1e-6 * (np.abs(rounded) @ np.abs(weights))).all()
        assert np.linalg.norm(found - x @ weights) < 0.01 * np.linalg.norm(x @ weights)


@pytest.mark.parametrize("width", [32, 96, 160, 224])
def test_rows_of_an_odd_number_of_parts(kind, width):
    """Parts are multiplied in pairs, and blocks of one part four at a time: the last ones stand alone."""
    if FORMATS[kind].weights > 32:
        pytest.skip("a block holds eight parts")
    blocks = random_blocks(kind, width=width, scales=1)
    for count in (1, 5, 16):
        x = np.random.default_rng(2).integers(-127, 128, (count, width)).astype(np.float32)
        x[:, ::32] = -127  # so that the scale of every part is 1
        expected = x @ unpacked(blocks, kind).T.astype(np.float64)
        np.testing.assert_array_equal(multiply(x, blocks, kind), expected)


@pytest.mark.parametrize("count", [5, 16])
def test_whole_numbers_are_multiplied_exactly(kind, count):
    x = np.random.default_rng(2).integers(-127, 128, (count, 512)).astype(np.float32)
    x[:, ::32] = -127  # so that the scale of every part is 1
    blocks = random_blocks(kind, scales=1)
    np.testing.assert_array_equal(multiply(x, blocks, kind), x @ unpacked(blocks, kind).T.astype(np.float64))


@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("count", [4, 16])
def test_the_largest_codes_do_not_overflow(kind, byte, sign, count):
    form = FORMATS[kind]
    shape = 3, 512 // form.weights, form.bytes
    blocks = with_halves(np.full(shape, byte, np.uint8), kind, 1)
    x = np.full((count, 512), 127.0 * sign, np.float32)
    np.testing.assert_allclose(multiply(x, blocks, kind), x @ unpacked(blocks, kind).T.astype("d"), rtol=1e-6)


def test_matrices_that_share_activations_have_the_products_of_each():
    matrices = [
        (random_blocks(kind, rows, seed=rows), kind) for kind, rows in ((2, 3), (12, 700), (8, 1), (2, 0))
    ]
    x = activations(3)
    for found, (blocks, kind) in zip(Matrices(matrices).multiply(x), matrices, strict=True):
        np.testing.assert_array_equal(found, multiply(x, blocks, kind))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [2, 16])
def test_what_is_not_finite_is_not_hidden(value, count):
    x = activations(count)
    x[1, 40] = value
    found = multiply(x, random_blocks(8), 8)
    assert np.isfinite(np.delete(found, 1, 0)).all()
    assert not np.isfinite(found[1]).any()
    scales = np.ones((OF_512, 16))
    scales[3, 2] = value
    found = multiply(activations(count), random_blocks(8, scales=scales), 8)
    assert not np.isfinite(found[:, 3]).any()
    assert np.isfinite(np.delete(found, 3, 1)).all()


@pytest.mark.parametrize("kind", [6, 14])
def test_activations_of_one_sign_lose_nothing(kind):
    """What codes are stored with would add up to far more than the products themselves."""
    x, blocks = np.abs(activations(1, 8192)), random_blocks(kind, 3, 8192)
    codes, scales, *_ = quantized(x, len(x))
    rounded = (codes.reshape(*scales.shape, 32) * scales[..., None]).reshape(1, -1).astype(np.float64)
    weights = unpacked(blocks, kind).T.astype(np.float64)
    found = multiply(x, blocks, kind)
    assert (np.abs(found - rounded @ weights) <= 1e-6 * (rounded @ np.abs(weights))).all()


def test_blocks_of_a_mapped_file_are_read_where_they_lie(tmp_path):
    blocks = random_blocks(12)
    blocks.tofile(tmp_path / "blocks")
    mapped = np.memmap(tmp_path / "blocks", np.uint8, "r", shape=blocks.shape)
    np.testing.assert_array_equal(multiply(activations(1), mapped, 12), multiply(activations(1), blocks, 12))
    np.testing.assert_array_equal(unpacked(mapped, 12), unpacked(blocks, 12))


GENERIC = """
import numpy as np
from offload_decode.common.rows import compiled, ggml_blocks, ggml_products
blocks = np.random.default_rng(0).integers(0, 256, (5, 34 * 4), np.uint8)
blocks[:, ::34], blocks[:, 1::34] = 1, np.array([0x00, 0x3C, 0x80, 0xBC, 0x10])[:, None]
weights, x = np.empty((5, 128), "f"), np.random.default_rng(1).standard_normal((1, 128)).astype("f")
ggml_blocks.unpack(blocks, 8, weights)
codes, scales = (blocks.reshape(5, 4, 34)[..., part].copy() for part in (slice(2, None), slice(0, 2)))
assert (weights.reshape(5, 4, 32) == codes.view("i1") * scales.view("f2").astype("f")).all()
found, = ggml_products.Matrices([(blocks, 8)]).multiply(x)
assert (abs(found - x @ weights.T) <= 0.02 * (abs(x) @ abs(weights).T)).all()
print(ggml_products.FORM, compiled.converts())
"""


@pytest.mark.slow
def test_code_for_any_processor_gives_the_same(tmp_path):
    assert run_compiled(GENERIC, tmp_path, NUMBA_CPU_NAME="generic") == "vectors False"


def test_activations_of_nothing_give_nothing():
    x = np.zeros((1, 512), np.float32)
    x[0, 5] = 1e-45  # has no scale
    assert not multiply(x, random_blocks(2), 2).any()


@pytest.mark.parametrize(
    ("blocks", "kind"),
    [
        (np.zeros((2, 34 * 16), np.uint8), 9),
        (np.zeros((2, 34 * 16 + 1), np.uint8), 8),
        (np.zeros((2, 0), np.uint8), 8),
        (np.zeros((2, 34 * 16), np.int8), 8),
        (np.zeros(34 * 16, np.uint8), 8),
        (np.zeros((4, 34 * 16), np.uint8)[::2], 8),
        (np.zeros((2, 34 * 15), np.uint8), 8),
    ],
)
def test_blocks_of_another_size_or_type_are_refused(blocks, kind):
    with pytest.raises(ModelError):
        multiply(activations(1), blocks, kind)


@pytest.mark.parametrize("x", [activations(1)[0], activations(2)[:, ::2], activations(1).astype(np.float64)])
def test_other_activations_are_refused(x):
    with pytest.raises(ModelError):
        multiply(x, np.zeros((2, x.shape[-1] // 32 * 34), np.uint8), 8)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 511), "f"), ((1, 512), "f"), ((2, 512), "d")])
def test_there_must_be_room_for_what_is_unpacked(shape, dtype):
    with pytest.raises(ModelError):
        ggml_blocks.unpack(np.zeros((2, 34 * 16), np.uint8), 8, np.empty(shape, dtype))
