"""GGUF files: found in a folder or by name, and looked at before a library reads them."""

import struct
from pathlib import Path

import pytest

from offload_decode.common.errors import ModelError
from offload_decode.models.checkpoint import located, source_of
from offload_decode.models.gguf import read_header
from offload_decode.models.loading import load
from offload_decode.models.size_estimate import estimate_size
from tests.models import few_bits


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, value: int) -> bytes:
    return text(key) + struct.pack("<IQ", 10, value)


FAR = struct.pack("<IQIQ", 1, 4, 0, 1 << 40)  # of a tensor that would begin there
ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def header(*pairs: bytes, tensors: int = 0, version: int = 3, count: int | None = None) -> bytes:
    count = len(pairs) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return few_bits.gguf(tmp_path_factory.mktemp("gguf") / "model")


def test_a_folder_of_one_file_is_that_file(whole: Path) -> None:
    assert source_of(str(whole.parent)) == source_of(str(whole)) == str(whole)
    assert located(str(whole)) == (str(whole.parent), {"gguf_file": whole.name})
    read_header(whole)
    by_folder, by_name = estimate_size(str(whole.parent)), estimate_size(str(whole))
    assert by_folder.shape == by_name.shape
    assert by_name.format == "gguf"
    assert by_name.dtype == "bfloat16"
    assert 0.8 < by_name.packed / whole.stat().st_size <= 1
    assert (by_name.runs_packed(on_gpu=False), by_name.runs_packed(on_gpu=True)) == (True, False)


def test_a_store_finds_the_file_again_from_anywhere(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(whole.parent)
    assert load(whole.name, "cpu").model_id == str(whole)


def test_of_several_files_one_is_to_be_named(whole: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(whole.read_bytes())
    with pytest.raises(ModelError, match=r"holds 2 GGUF files: name one, such as .*a\.gguf$"):
        source_of(str(tmp_path))
    assert source_of(str(tmp_path / "b.gguf")) == str(tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (b"", "cut off"),
        (b"GGUF", "cut off"),
        (b"PK\3\4" + bytes(64), "does not begin like one"),
        (header(version=1), "of version 1, and 2 and 3 are read"),
        (header(version=1 << 24), "of version 16777216"),
        (header(count=1 << 40), "too many entries"),
        (header(tensors=1 << 60), "too many entries"),
        (header(struct.pack("<Q", 1 << 60)), "a text that is too long"),
        (header(text("key") + struct.pack("<I", 99)), "a value of the unknown type 99"),
        (header(text("key") + struct.pack("<IIQ", 9, 4, 1 << 60)), "a list that is too long"),
        (header(text("key") + struct.pack("<IIQ", 9, 9, 1)), "a list of the unknown type 9"),
        (header(), "names no architecture"),
        (header(ARCHITECTURE, pair("llama.block_count", 10**9)), "its block_count is 1000000000, and"),
        (header(ARCHITECTURE, pair("llama.embedding_length", 10**15)), "its embedding_length is"),
        (header(ARCHITECTURE, pair("tokenizer.ggml.tokens", 1 << 20)), "its ggml.tokens is 1048576, and"),
        (header(ARCHITECTURE, tensors=1), "cut off"),
        (header(ARCHITECTURE, text("t") + struct.pack("<I", 1 << 30), count=1, tensors=1), "four dimensions"),
        (header(ARCHITECTURE, text("t") + FAR, count=1, tensors=1), "cut off"),
        (header(ARCHITECTURE, pair("split.count", 3)), "one of 3 pieces: join them"),
        (header(ARCHITECTURE, text("split.count") + struct.pack("<I", 8) + text("two")), "one of two pieces"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path, held: bytes, why: str) -> None:
    (tmp_path / "odd.gguf").write_bytes(held)
    for model in (tmp_path, tmp_path / "odd.gguf"):
        with pytest.raises(ModelError, match=why) as raised:
            load(str(model), "cpu")
        assert "\n" not in str(raised.value)


def test_a_file_that_was_cut_off_is_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    for kept in (100, len(data) // 2, len(data) - 64):
        (tmp_path / "cut.gguf").write_bytes(data[:kept])
        with pytest.raises(ModelError):
            load(str(tmp_path / "cut.gguf"), "cpu")


def test_a_file_that_is_not_there_and_a_folder_of_that_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no file"):
        load(str(tmp_path / "gone.gguf"), "cpu")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ModelError):
        load(str(tmp_path / "folder.gguf"), "cpu")
