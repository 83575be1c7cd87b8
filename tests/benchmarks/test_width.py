"""`benchmarks/width.py`: the weights as GGUF, what llama.cpp's cache is filled with, and rows of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import llama_beside, llama_gguf, width
from benchmarks.width_parts import distance
from offload_decode.errors import ConfigError
from offload_decode.kernels.rows import numpy_view
from offload_decode.store.memory import MemoryStore
from offload_decode.types import LayerKind, ModelShape
from tests.tiny import tiny_model


def rotated(rows: torch.Tensor, angles: torch.Tensor, neighbours: bool) -> torch.Tensor:
    """`rows [D]` turned by `angles [D/2]`: pairs of neighbours, as in llama.cpp, or i and i + D/2."""
    first, second = (rows[::2], rows[1::2]) if neighbours else rows.chunk(2)
    turned = torch.polar(torch.ones_like(angles), angles) * torch.complex(first, second)
    both = (turned.real, turned.imag)
    return torch.stack(both, 1).flatten() if neighbours else torch.cat(both)


def test_channels_in_pairs_are_rotated_as_halves_are() -> None:
    rows, angles = torch.randn(8), torch.randn(4)
    torch.testing.assert_close(
        rotated(llama_gguf.paired(rows), angles, True), llama_gguf.paired(rotated(rows, angles, False))
    )


@pytest.mark.parametrize("kind", ["BF16", "F16"])
def test_a_gguf_file_has_all_weights_and_queries_in_pairs(tmp_path: Path, kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    model = tiny_model(tie_word_embeddings=True).to(torch.bfloat16)
    reader = gguf.GGUFReader(llama_gguf.write_llama(tmp_path / "a.gguf", model, kind))
    found = {tensor.name: tensor for tensor in reader.tensors}
    layers, config = model.config.num_hidden_layers, model.config
    assert len(found) == 2 + 9 * layers, "a table, which is the head too, a norm, and nine of each layer"
    dtype = torch.bfloat16 if kind == "BF16" else torch.float16

    def numbers(name: str) -> torch.Tensor:
        raw = torch.from_numpy(np.ascontiguousarray(found[name].data).view(np.uint8).copy())
        return raw.view(dtype).reshape(tuple(reversed(found[name].shape.tolist()))).float()

    own = model.model.layers[1]
    torch.testing.assert_close(numbers("token_embd.weight"), model.model.embed_tokens.weight.float())
    torch.testing.assert_close(numbers("blk.1.ffn_down.weight"), own.mlp.down_proj.weight.float())
    torch.testing.assert_close(numbers("blk.1.attn_v.weight"), own.self_attn.v_proj.weight.float())
    torch.testing.assert_close(
        torch.from_numpy(np.array(found["blk.1.ffn_norm.weight"].data)),
        own.post_attention_layernorm.weight.float(),
    )
    given = torch.randn(config.hidden_size)
    for name, part in (("attn_q", own.self_attn.q_proj), ("attn_k", own.self_attn.k_proj)):
        expected = llama_gguf.paired((part.weight.float() @ given).unflatten(0, (-1, config.head_dim)))
        torch.testing.assert_close(numbers(f"blk.1.{name}.weight") @ given, expected.flatten())


def test_a_context_is_filled_with_every_head_in_halves() -> None:
    shape = ModelShape.uniform((LayerKind.FULL, LayerKind.FULL), 4, 2, 8)
    keys, values = torch.randn(2, 2, 2, 30, 8).bfloat16()
    store = MemoryStore(shape, numpy_view(keys), numpy_view(values))
    found = {kind: torch.from_numpy(llama_beside.halves(store, kind, 1)) for kind in ("keys", "values")}
    assert found["keys"].dtype == torch.float16
    torch.testing.assert_close(found["values"][:, 8:].float(), values[1, 1].float())
    torch.testing.assert_close(found["keys"][:, 8:16:2].float(), keys[1, 1, :, :4].float())
    torch.testing.assert_close(found["keys"][:, 9:16:2].float(), keys[1, 1, :, 4:].float())


def test_a_python_that_is_not_there_is_told_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install llama-cpp-python"):
        llama_beside.Llama(tmp_path / "python", tmp_path / "a.gguf", 8, 1, True, tmp_path / "log")


def test_the_fastest_turn_counts_with_its_median() -> None:
    turns: list[Any] = [[(3.0, {"model": 1.0})] * 3, [(9.0, {"model": 5.0}), *[(2.0, {"model": 0.5})] * 2]]
    row = width.Row.of("them", "ours", turns, 10)
    assert (row.seconds, row.turns, row.stages) == (2.0, [3.0, 2.0], {"model": 0.5})
    base = width.Row.of("them", "them", [[(8.0, {})]], 20)
    found = width.figures([row, base])
    assert found["them/ours/x"] == 4
    assert found["them/them/tokens per second"] == 1 / 8


@pytest.mark.slow
def test_all_of_it_runs_without_llama(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["tiny", "--tokens", "1024", "--k", "64", "--decode", "3", "--rounds", "1"]
    saved = tmp_path / "tiny.json"
    monkeypatch.chdir(tmp_path)  # where its folder of a while is made
    width.main([*asked, "--json", str(saved)])
    report = json.loads(saved.read_text())["tiny"]
    assert [row["way"] for row in report["rows"]] == ["topk, k = 64", width.FULL]
    assert report["seen"]["topk, k = 64"]["ratio"] > 0.95
    logits = report["seen"]["logits"]
    assert logits["ours, dense"] < 0.02 < logits["empty"]
    assert "llama.cpp is left out: make a virtual environment" in capsys.readouterr().out


def test_distances_are_relative() -> None:
    assert distance(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0])) == pytest.approx(0.1)
