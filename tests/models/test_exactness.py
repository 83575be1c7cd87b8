"""Answers from a store equal transformers' own generate, for every served architecture (issue: k = N, 1e-4).

The control leaves the prefix out, and must differ: otherwise these tests could not fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload_decode.engine.engine import Engine
from offload_decode.models.architectures import EXACT
from offload_decode.models.loading import wrap
from offload_decode.types import Document
from prefill_jobs.job import Settings, prefill_tokens
from tests.families import SERVED, VOCAB
from tests.tiny import tiny_model

PREFIX, NEW = 45, 8
CLOSE = {"atol": 1e-4, "rtol": 0}


class Case:
    """One architecture: a plain model to compare with, and an engine over a store with k = N."""

    def __init__(self, family: str, folder: Path):
        self.plain = tiny_model(family)
        self.plain.set_attn_implementation("eager")  # older releases' default leaves Gemma 2's soft cap out
        served = wrap(tiny_model(family))
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(3, VOCAB, (1, PREFIX + 40), generator=generator)
        tokens = self.ids[0, :PREFIX].numpy().astype(np.int32)
        # Chunks of 16: neither the prefix nor a window is a multiple of them.
        prefill_tokens(
            served, tokens, [Document("all", 0, PREFIX)], folder / "store", Settings(options={"chunk": 16})
        )
        self.engine = Engine.open(folder / "store", served, options={"budget": str(PREFIX)})

    def question(self, start: int, tokens: int) -> torch.Tensor:
        return self.ids[:, PREFIX + start : PREFIX + start + tokens]

    def plain_logits(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.plain(ids).logits

    def plain_answer(self, ids: torch.Tensor) -> list[int]:
        out = self.plain.generate(
            ids, max_new_tokens=NEW, do_sample=False, attention_mask=torch.ones_like(ids)
        )
        return out[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module", params=SERVED)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("exact"))


def test_every_served_architecture_is_here() -> None:
    assert {tiny_model(family).config.model_type for family in SERVED} == EXACT


@pytest.mark.parametrize("tokens", [1, 9])
def test_logits_of_every_question_token(case: Case, tokens: int) -> None:
    asked = case.question(0, tokens)
    with torch.inference_mode():
        ours = case.engine.loaded.model(asked, past_key_values=case.engine.new_cache()).logits
    plain = case.plain_logits(torch.cat([case.ids[:, :PREFIX], asked], dim=1))[:, PREFIX:]
    torch.testing.assert_close(ours, plain, **CLOSE)


def test_control_without_the_prefix_differs(case: Case) -> None:
    asked = case.question(0, 9)
    position = torch.arange(PREFIX, PREFIX + 9)[None]
    with torch.inference_mode():
        without = case.plain(asked, position_ids=position).logits
    plain = case.plain_logits(torch.cat([case.ids[:, :PREFIX], asked], dim=1))[:, PREFIX:]
    assert (without - plain).abs().max() > 0.01


@pytest.mark.parametrize("tokens", [1, 9])
def test_greedy_answer_through_generate(case: Case, tokens: int) -> None:
    asked = case.question(0, tokens)
    expected = case.plain_answer(torch.cat([case.ids[:, :PREFIX], asked], dim=1))
    out = case.engine.loaded.model.generate(
        asked,
        attention_mask=torch.ones(1, PREFIX + tokens, dtype=torch.bool),
        past_key_values=case.engine.new_cache(),
        max_new_tokens=NEW,
        do_sample=False,
    )
    assert out[0, tokens:].tolist() == expected


def test_generate_with_the_full_ids(case: Case) -> None:
    full = case.ids[:, : PREFIX + 9]
    out = case.engine.loaded.model.generate(
        full, past_key_values=case.engine.new_cache(), max_new_tokens=NEW, do_sample=False
    )
    assert out[0, PREFIX + 9 :].tolist() == case.plain_answer(full)


def test_beams(case: Case) -> None:
    full = case.ids[:, : PREFIX + 9]
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3}
    expected = case.plain.generate(full, attention_mask=torch.ones_like(full), **settings)
    ours = case.engine.loaded.model.generate(full, past_key_values=case.engine.new_cache(), **settings)
    assert ours.tolist() == expected.tolist()


def test_second_turn(case: Case) -> None:
    turn = case.engine.fork()
    first = list(turn.generate(turn.extend(case.question(0, 9)), NEW))
    so_far = torch.cat([case.ids[:, : PREFIX + 9], torch.tensor([first])], dim=1)
    assert first == case.plain_answer(so_far[:, : PREFIX + 9])

    logits = turn.extend(case.question(9, 7))
    whole = torch.cat([so_far, case.question(9, 7)], dim=1)
    torch.testing.assert_close(logits, case.plain_logits(whole)[0, -1], **CLOSE)
    assert list(turn.generate(logits, NEW)) == case.plain_answer(whole)


def test_fork_and_crop_leave_each_other_alone(case: Case) -> None:
    root = case.engine.fork()
    root.extend(case.question(0, 6))
    branch = root.fork()
    branch.extend(case.question(20, 12))  # longer than any window
    expected = case.plain_logits(torch.cat([case.ids[:, : PREFIX + 6], case.question(6, 3)], dim=1))[0, -1]
    torch.testing.assert_close(root.extend(case.question(6, 3)), expected, **CLOSE)
    branch.crop(PREFIX + 6)
    torch.testing.assert_close(branch.extend(case.question(6, 3)), expected, **CLOSE)
    assert branch.length == PREFIX + 9


def test_batch_of_ragged_questions(case: Case) -> None:
    lengths = [9, 1, 4]
    rows = [case.question(3 * row, length) for row, length in enumerate(lengths)]
    pad = [torch.zeros(1, max(lengths) - length, dtype=torch.long) for length in lengths]
    ids = torch.cat([torch.cat([filler, row], dim=1) for filler, row in zip(pad, rows, strict=True)])
    mask = torch.ones(3, PREFIX + max(lengths), dtype=torch.bool)
    for row, filler in enumerate(pad):
        mask[row, PREFIX : PREFIX + filler.shape[1]] = False
    out = case.engine.loaded.model.generate(
        ids, attention_mask=mask, past_key_values=case.engine.new_cache(), max_new_tokens=NEW, do_sample=False
    )
    for row, asked in enumerate(rows):
        expected: list[Any] = case.plain_answer(torch.cat([case.ids[:, :PREFIX], asked], dim=1))
        assert out[row, max(lengths) :].tolist() == expected
