"""Answers from a store equal transformers' own generate, for every served family (issue: k = N, 1e-4).

The control leaves the prefix out, and must differ: otherwise these tests could not fail. What is kept of a
layer makes its kind; the longer tests run for a family of each kind, and for all of them with the slow ones.
"""

from pathlib import Path

import pytest
import torch

from offload_decode.hf.compat import generate_name
from tests.exactness import NEW, Case
from tests.families import KINDS, SERVED, slow_but

CLOSE = {"atol": 1e-4, "rtol": 0}
# A token; windows and chunks of 7 and 8, blocks of a prefill and of scans of 16, of delta rules of 64.
LENGTHS = [1, 2, 6, 7, 8, 9, 15, 16, 17, 63, 64, 65]

every = pytest.mark.parametrize("case", SERVED, indirect=True)
kinds = pytest.mark.parametrize("case", slow_but(KINDS, SERVED), indirect=True)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("exact"))


@every
def test_logits_of_every_question_token(case: Case) -> None:
    asked = case.question(0, 9)
    plain = case.plain_logits(case.whole(asked))[:, case.prefix :]
    torch.testing.assert_close(case.logits(asked), plain, **CLOSE)
    torch.testing.assert_close(case.logits(asked[:, :1]), plain[:, :1], **CLOSE)
    without = case.plain_logits(asked, first=case.prefix)
    assert (without - plain).abs().max() > 0.01, "the control"


@every
def test_greedy_answer_through_generate(case: Case) -> None:
    asked = case.question(0, 9)
    assert case.answer(asked) == case.plain_answer(case.whole(asked))


@kinds
def test_answer_to_one_token(case: Case) -> None:
    asked = case.question(0, 1)
    assert case.answer(asked) == case.plain_answer(case.whole(asked))


@kinds
def test_generate_with_the_full_ids(case: Case) -> None:
    full = case.whole(case.question(0, 9))
    out = case.engine.loaded.model.generate(
        full, **{generate_name(): case.engine.new_cache()}, max_new_tokens=NEW, do_sample=False
    )
    assert out[0, full.shape[1] :].tolist() == case.plain_answer(full)


@kinds
def test_beams(case: Case) -> None:
    asked = case.question(0, 9)
    assert case.beams(asked) == case.plain_beams(case.whole(asked))


@kinds
def test_second_turn(case: Case) -> None:
    turn = case.engine.fork()
    first = list(turn.generate(turn.extend(case.question(0, 9)), NEW))
    so_far = case.whole(case.question(0, 9), torch.tensor([first]))
    assert first == case.plain_answer(so_far[:, :-NEW])

    logits = turn.extend(case.question(9, 7))
    whole = torch.cat([so_far, case.question(9, 7)], dim=1)
    torch.testing.assert_close(logits, case.plain_logits(whole)[0, -1], **CLOSE)
    assert list(turn.generate(logits, NEW)) == case.plain_answer(whole)


@kinds
def test_fork_and_crop_leave_each_other_alone(case: Case) -> None:
    root = case.engine.fork()
    root.extend(case.question(0, 6))
    branch = root.fork()
    branch.extend(case.question(20, 12))  # longer than any window
    expected = case.plain_logits(case.whole(case.question(0, 9)))[0, -1]
    torch.testing.assert_close(root.extend(case.question(6, 3)), expected, **CLOSE)
    branch.crop(case.prefix + 6)
    torch.testing.assert_close(branch.extend(case.question(6, 3)), expected, **CLOSE)
    assert branch.length == case.prefix + 9


@kinds
def test_batch_of_ragged_questions(case: Case) -> None:
    rows = [case.question(3 * row, length) for row, length in enumerate([9, 1, 4])]
    expected = [case.plain_answer(case.whole(row)) for row in rows]
    assert case.ragged_answers(rows) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "prefix"),
    # Longrope rotates short texts in another way; a store serves texts of one kind.
    [(family, prefix) for family in SERVED for prefix in LENGTHS if prefix > 32 or family != "phi3-longrope"],
)
def test_prefixes_around_windows_and_blocks(family: str, prefix: int, tmp_path: Path) -> None:
    case = Case(family, tmp_path, prefix)
    for test in (
        test_logits_of_every_question_token,
        test_greedy_answer_through_generate,
        test_answer_to_one_token,
        test_beams,
        test_second_turn,
        test_fork_and_crop_leave_each_other_alone,
        test_batch_of_ragged_questions,
    ):
        test(case)
