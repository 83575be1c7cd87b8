"""Recurrent states behind a prefix: replaced and never written to, by rows, taken back where a turn began."""

import pytest
import torch

from offload_decode.common.errors import ConfigError
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.cache_layers import KeylessLayer
from offload_decode.hf.recurrent import States
from offload_decode.hf.recurrent_steps import _in_sequence, _takes_one_token
from offload_decode.types import LayerKind, LayerShape, ModelShape, StateShape

FULL = LayerShape(LayerKind.FULL, 1, 4, 4)
RECURRENT = LayerShape(LayerKind.NONE, states=(StateShape("recurrent0", (2,), "float32"),))
SHAPE = ModelShape((RECURRENT, FULL), query_heads=1)


class Decoder:
    """Its width, and where its passes run."""

    class config:
        hidden_size = 4

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Embedding(2, 4)


class Stored:
    """A prefix of ten tokens, of which nothing is read."""

    remembers = False
    length = 10


def stored() -> CorpusCache:
    return CorpusCache.over(Stored(), SHAPE, {}, states={0: [torch.zeros(1, 2)]})  # type: ignore[arg-type]


def run(cache: CorpusCache, tokens: int, rows: int = 1) -> None:
    """A pass that counts its tokens in the state."""
    cache.begin(rows, tokens)
    state = cache.get_recurrent_state(0)
    assert state is not None
    assert state.shape == (rows, 2)
    cache.update_recurrent_state(state.add_(tokens), layer_idx=0)  # as a kernel may that writes in place
    cache.generated_layers[0].generated.append(
        torch.zeros(rows, 1, tokens, 4), torch.zeros(rows, 1, tokens, 4)
    )
    cache.begun = None


def state(cache: CorpusCache) -> list[float]:
    return cache.layers[0].states.held["recurrent0"][:, 0].tolist()


def test_a_convolution_gets_the_inputs_before_the_pass_as_its_release_asks_for_them() -> None:
    inputs = torch.arange(14.0).reshape(1, 2, 7)
    states = States()
    first = states.push("conv0", inputs[..., :2], 4)
    assert first.tolist() == [[[0, 0, 0, 1], [0, 0, 7, 8]]], "nothing came before: zeros"
    assert torch.equal(states.push("conv0", inputs[..., 2:6], 4), torch.cat([first, inputs[..., 2:6]], -1))
    assert torch.equal(states.held["conv0"], inputs[..., 2:6])
    assert torch.equal(states.push("conv0", inputs[..., 6:], None), inputs[..., 3:])
    layer = KeylessLayer(0, states)
    assert layer.conv_states is not None
    assert torch.equal(layer.conv_states, inputs[..., 3:])
    assert layer.recurrent_states is None


def test_states_are_kept_as_the_models_own_cache_keeps_them() -> None:
    kept = StateShape("conv0", (2, 3), "bfloat16"), StateShape("recurrent0", (2,), "float32")
    layers = LayerShape(LayerKind.NONE, states=kept), FULL
    cache = CorpusCache.over(Stored(), ModelShape(layers, 1), {})  # type: ignore[arg-type]
    for rows in (1, 2):
        cache.begin(rows, 1)
        assert cache.update_conv_state(torch.ones(rows, 2, 1), 0, conv_kernel_size=3).dtype == torch.bfloat16
        assert cache.update_recurrent_state(torch.ones(rows, 2).half(), 0).dtype == torch.float32
        assert [own.dtype for own in cache.states(0)] == [torch.bfloat16, torch.float32]
        cache = cache.fork(cache.prefix)
        cache.batch_select_indices(torch.zeros(2, dtype=torch.long))


def test_a_fork_and_its_origin_leave_each_other_alone() -> None:
    cache = stored()
    run(cache, 3)
    fork = cache.fork(cache.prefix)
    run(fork, 4)
    run(cache, 1)
    assert (state(cache), state(fork)) == ([4.0], [7.0])


def test_states_are_taken_back_to_where_a_turn_began() -> None:
    cache = stored()
    run(cache, 3)
    for _ in range(4):
        run(cache, 1)
    run(cache, 5)
    run(cache, 1)
    cache.cut(12)  # the last pass
    assert state(cache) == [12.0]
    with pytest.raises(ConfigError, match="crop to 10, 17 tokens"):
        cache.crop(-2)
    assert (state(cache), cache.generated_length) == ([12.0], 12), "nothing was taken back"
    cache.crop(-5)
    assert (state(cache), cache.generated_length) == ([7.0], 7)
    cache.crop(-7)
    assert state(cache) == [0.0]
    run(cache, 2, rows=3)
    assert state(cache) == [2.0, 2.0, 2.0]


def test_a_pass_that_was_interrupted_is_taken_back() -> None:
    cache = stored()
    run(cache, 3)
    cache.begin(1, 1)
    cache.update_recurrent_state(torch.full((1, 2), 99.0), layer_idx=0)
    cache.take_back()
    assert state(cache) == [3.0]


def test_passes_of_one_question_are_one_turn() -> None:
    cache = stored()
    run(cache, 3)
    run(cache, 1)
    for _ in range(3):
        run(cache, 4)
    cache.join(4)
    assert sorted(cache.marks) == [0, 4]


def test_rows_are_picked_and_repeated_with_their_states() -> None:
    cache = stored()
    run(cache, 2, rows=2)
    cache.layers[0].states.held["recurrent0"][1] = 9.0
    cache.batch_repeat_interleave(2)
    assert state(cache) == [2.0, 2.0, 9.0, 9.0]
    cache.reorder_cache(torch.tensor([3, 0]))
    assert state(cache) == [9.0, 2.0]
    run(cache, 1, rows=2)
    cache.cut(2)
    assert state(cache) == [9.0, 2.0]


def test_the_mask_of_a_layer_without_keys_is_that_of_full_attention() -> None:
    kinds = LayerShape(LayerKind.NONE), LayerShape(LayerKind.SLIDING, 1, 4, 4, 7), FULL
    window = torch.zeros(1, 1, 6, 4)
    cache = CorpusCache.over(Stored(), ModelShape(kinds, 1), {1: (window, window)})  # type: ignore[arg-type]
    # transformers asks the first layer that is not sliding (Lfm3: a convolution).
    assert cache.get_mask_sizes(3, 0) == cache.get_mask_sizes(3, 2) == (3, 10)
    assert cache.get_mask_sizes(3, 1) == (9, 4)


def test_padding_behind_tokens_is_refused() -> None:
    cache = stored()
    with pytest.raises(ConfigError, match="need padding on the left"):
        cache.show(3, torch.tensor([[True, True, False]]))


class Sums(torch.nn.Module):
    """A recurrent layer, and how those of some releases treat a state in a pass of several tokens."""

    layer_idx = 0

    def __init__(self, several: str) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.several = several

    def forward(self, hidden: torch.Tensor, cache_params: CorpusCache) -> torch.Tensor:
        before = cache_params.get_recurrent_state(0)
        if before is not None and hidden.shape[1] > 1:
            if self.several == "fails":
                raise RuntimeError("one token alone")
            if self.several == "takes one":
                hidden = hidden[:, -1:]
            if self.several == "forgets":
                before = None
            if self.several == "sees the last alone":
                hidden = hidden[:, -1:].expand_as(hidden) / hidden.shape[1]
        sums = hidden.cumsum(1) + (torch.zeros(1, 1, hidden.shape[2]) if before is None else before)
        cache_params.update_recurrent_state(sums[:, -1:], layer_idx=0)
        return sums


@pytest.mark.parametrize("several", ["goes on", "forgets", "takes one", "sees the last alone", "fails"])
def test_a_layer_that_does_not_go_on_from_its_state_is_found_out(several: str) -> None:
    assert _takes_one_token(Sums(several), Decoder()) == (several != "goes on")


def test_a_state_may_have_an_effect_on_another_output_than_the_first() -> None:
    class Two(Sums):
        def forward(self, hidden: torch.Tensor, cache_params: CorpusCache) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
            sums = super().forward(hidden, cache_params)
            return hidden, sums, sums[:, -1:].expand(1, 5, 4)  # and what is no sequence

    assert [_takes_one_token(Two(several), Decoder()) for several in ("goes on", "forgets")] == [False, True]


def test_an_output_without_its_one_token_is_given_it_back() -> None:
    def squeezed(hidden: torch.Tensor) -> torch.Tensor:
        return hidden[:, 0] if hidden.shape[1] == 1 else hidden

    for tokens in (1, 3):
        hidden = torch.rand(2, tokens, 4)
        assert torch.equal(_in_sequence(squeezed, hidden), hidden)
