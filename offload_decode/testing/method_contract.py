"""What every prefill method promises. Inherit, set `name` and `options`, and pytest collects the promises."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from offload_decode.attention.queries import Queries
from offload_decode.attention.rows import Rows
from offload_decode.common.errors import ConfigError, StoreMismatch
from offload_decode.models.loading import wrap
from offload_decode.prefill_jobs.job import Settings, prefill_tokens
from offload_decode.prefill_jobs.methods.base import Method, Sparse
from offload_decode.prefill_jobs.methods.registry import create, get
from offload_decode.store.reader import KVStore
from offload_decode.testing import devices
from offload_decode.testing.tiny import VOCAB, tiny_llama
from offload_decode.types import Document, LayerKind, ModelShape

TOKENS, CHUNK, LAYERS = 90, 16, 2
SHAPE = ModelShape.uniform((LayerKind.FULL,) * LAYERS, query_heads=4, kv_heads=2, head_dim=8)


class Written:
    """Forty earlier tokens of two layers with two KV heads, drawn at random; the later, the longer."""

    length = 40

    def drawn(self, layer: int, head: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * layer + head)
        lengths = torch.linspace(0.2, 3, self.length)[:, None]
        return torch.randn(self.length, 8, generator=generator) * lengths

    def keys(self, layer: int, head: int) -> Rows:
        return Rows(self.drawn(layer, head).numpy())

    def key_norms(self, layer: int, head: int) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(self.drawn(layer, head), dim=-1)
        return norms


def asked(tokens: int = 12) -> Queries:
    """The queries of a chunk."""
    rows = torch.randn(2, 2 * tokens, 8, generator=torch.Generator().manual_seed(3)) + 0.5
    return Queries(rows, scaling=0.3, group=2, tokens=tokens)


def prefilled(
    folder: Path,
    method: str = "dense",
    options: Mapping[str, object] | None = None,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    device: str = "cpu",
) -> KVStore:
    """A store of a random Llama and random tokens, in chunks of 16, on `device`."""
    tokens = np.random.default_rng(2).integers(3, VOCAB, TOKENS).astype(np.int32)
    settings, model = Settings(method, {"chunk": CHUNK, **(options or {})}), wrap(tiny_llama().to(device))
    prefill_tokens(model, tokens, [Document("all", 0, TOKENS)], folder, settings, progress=progress)
    return KVStore.open(folder)


def assert_same_rows(store: KVStore, other: KVStore) -> None:
    """Keys and values are equal, bit for bit."""
    for layer in store.manifest.shape.full_layers:
        for head in range(store.manifest.shape.kv_heads):
            assert np.array_equal(store.keys(layer, head), other.keys(layer, head))
            assert np.array_equal(store.values(layer, head), other.values(layer, head))


class MethodContract:
    """Promises of `prefill_jobs.methods.base.Method`; those of a budget, where it is a `Sparse` one."""

    name: ClassVar[str]
    options: ClassVar[dict[str, object]] = {}

    def make(self, **options: object) -> Method:
        """The method for two layers of two KV heads."""
        return create(self.name, {**self.options, **options}, SHAPE)

    def budgets(self, *budgets: str) -> list[dict[str, object]]:
        """Options with each of the budgets; without one where the method has none."""
        if issubclass(get(self.name), Sparse):
            return [{"budget": budget} for budget in budgets]
        return [{}]

    def test_it_says_what_it_is(self) -> None:
        kind = get(self.name)
        assert kind.name == self.name
        assert kind.paper.strip()
        kind.options_type()  # every option has a default

    def test_ids_are_of_earlier_tokens_and_unique(self) -> None:
        for options in self.budgets("0", "1", "7", "30%", "39", "100%", "500"):
            for layer in range(LAYERS):
                ids = self.make(**options).select(layer, asked(), Written())
                if ids is None:
                    continue
                assert ids.dtype == torch.int64
                assert ids.shape[0] == 2
                assert ((ids >= 0) & (ids < Written.length)).all()
                assert all(len(set(row)) == len(row) for row in ids.tolist())

    @pytest.mark.parametrize(("budget", "sizes"), [("5", (5, 5)), ("10%", (4, 4)), ("3,20%", (3, 8))])
    def test_a_budget_is_a_count_or_a_share_of_what_came_before(
        self, budget: str, sizes: tuple[int, int]
    ) -> None:
        for options in self.budgets(budget):
            if not options:
                pytest.skip("it has no budget")
            for layer, size in enumerate(sizes):
                ids = self.make(**options).select(layer, asked(), Written())
                assert ids is not None
                assert ids.shape == (2, size)

    def test_a_chunk_of_one_token_chooses_too(self) -> None:
        for options in self.budgets("5"):
            ids = self.make(**options).select(1, asked(1), Written())
            assert ids is None or ids.shape[0] == 2

    def test_the_same_chunk_is_given_the_same_tokens(self) -> None:
        """Whatever was asked in between: a prefill that was interrupted goes on with a new method."""
        for options in self.budgets("5"):
            one, other = self.make(**options), self.make(**options)
            first = one.select(1, asked(), Written())
            for again in (one.select(1, asked(), Written()), other.select(1, asked(), Written())):
                assert (again is None) == (first is None)
                assert again is None or first is None or torch.equal(again, first)

    def test_a_budget_of_everything_is_dense_prefill_bit_for_bit(self, tmp_path: Path) -> None:
        dense = prefilled(tmp_path / "dense")
        for options in self.budgets("100%", str(TOKENS)):
            if not options:
                pytest.skip("it has no budget")
            path = tmp_path / str(options["budget"])
            assert_same_rows(prefilled(path, self.name, {**self.options, **options}), dense)

    def test_on_a_device_it_writes_what_it_writes_on_the_host_bit_for_bit(self, tmp_path: Path) -> None:
        """Host and device do not mix, and numpy does not read what is on a device: docs/extending.md."""
        options = {**self.options, **self.budgets("20%")[0]}
        with devices.beside_device():
            expected = prefilled(tmp_path / "host", self.name, options)
            with devices.on_device():
                assert_same_rows(prefilled(tmp_path / "device", self.name, options, device="cuda"), expected)

    def test_the_store_says_how_it_was_made(self, tmp_path: Path) -> None:
        options = {**self.options, **self.budgets("20%")[0]}
        store = prefilled(tmp_path / "store", self.name, options)
        own = dataclasses.asdict(self.make(**{**options, "chunk": CHUNK}).options)
        assert store.manifest.prefill == {"method": self.name, **own}

    def test_interrupted_and_resumed_is_the_same_bytes(self, tmp_path: Path) -> None:
        class Stopped(Exception):
            pass

        def stop(stage: str, done: int, total: int) -> None:
            if stage == "prefill" and done == 3 * CHUNK:
                raise Stopped

        options = {**self.options, **self.budgets("20%")[0]}
        prefilled(tmp_path / "whole", self.name, options)
        with pytest.raises(Stopped):
            prefilled(tmp_path / "again", self.name, options, stop)
        for other in self.budgets("21%"):
            if other:
                with pytest.raises(StoreMismatch, match="another prefill"):
                    prefilled(tmp_path / "again", self.name, {**options, **other})
        prefilled(tmp_path / "again", self.name, options)
        whole, again = (
            {file.relative_to(root): file.read_bytes() for file in root.rglob("*") if file.is_file()}
            for root in (tmp_path / "whole", tmp_path / "again")
        )
        assert again == whole

    def test_options_that_cannot_be_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="has no option 'colour'"):
            self.make(colour="green")
        with pytest.raises(ConfigError, match="chunk 0 is out of range"):
            self.make(chunk="0")
        for wrong in self.budgets("mass=0.9", "3/4", "much", "1,2,3"):
            if wrong:
                with pytest.raises(ConfigError, match=r"budget|none of these|layers"):
                    self.make(**wrong)
