"""Lists come in the order that the model prefers, and stay the same lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from training import network
from training.favourites import favourites_first
from training.forward import Trainee
from training.items import alternatives
from training.rows import Row
from training.several import several

WORDS, COMMON, BOS = np.arange(500), np.arange(40), 0


@pytest.fixture(scope="module")
def trainee() -> Trainee:
    torch.manual_seed(0)
    return Trainee(network.create(network.config("demo", 500, 0, 1, 2)))


def sure() -> Trainee:
    """One whose logits are far apart."""
    torch.manual_seed(0)
    model = network.create(network.config("demo", 500, 0, 1, 2))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(200)
    return Trainee(model)


def drawn(seed: int) -> Row:
    made, belongs, lists = several(np.random.default_rng(seed), 128, WORDS, COMMON, BOS)
    nothing = np.zeros(128, bool)
    none = np.zeros(128, np.int64)
    return Row(*made, made.ends, belongs, nothing, nothing, False, none, "several", lists)


def test_another_order_has_the_same_parts_and_accepts_what_is_left() -> None:
    row = next(r for r in map(drawn, range(99)) if any(len(said.parts) > 2 for said in r.lists))
    number = next(n for n, said in enumerate(row.lists) if len(said.parts) > 2)
    old = row.lists[number]
    order = [1, 0, *range(2, len(old.parts))]
    turned = row.reordered(number, order)
    new = turned.lists[number]
    assert [part.tolist() for part in new.parts] == [old.parts[i].tolist() for i in order]
    answer = slice(old.start, old.start + old.size)
    for at, part in zip(new.starts, new.parts, strict=True):
        assert (turned.tokens[answer][at : at + len(part)] == part).all()
        assert (turned.weights[answer][at : at + len(part)] == 1).all()
    assert sorted(turned.tokens[answer]) == sorted(row.tokens[answer])
    assert (turned.others[answer] == alternatives(new)).all()
    outside = np.ones(len(row.tokens), bool)
    outside[answer] = False
    assert (turned.tokens[outside] == row.tokens[outside]).all()


def test_the_part_that_the_model_would_say_first_comes_first() -> None:
    trainee = sure()
    rows = [row for row in map(drawn, range(160)) if any(len(said.parts) > 1 for said in row.lists)]
    found = favourites_first(np.random.default_rng(0), rows, trainee, 1.0, "cpu")
    turned = falling = seen = 0
    for old, new in zip(rows, found, strict=True):
        # The first list of a row stands behind the same tokens as before.
        said = new.lists[0]
        if len(said.parts) < 2:
            continue
        seen += 1
        logits = trainee.inner(torch.from_numpy(new.tokens)[None]).logits[0]
        scores = logits[said.start + said.starts[0] - 1, [int(part[0]) for part in said.parts]].tolist()
        same = (old.tokens == new.tokens).all()
        turned += not same
        falling += scores == sorted(scores, reverse=True)
    assert turned
    assert seen >= 30
    assert falling / seen > 0.6  # seven in ten lists, and some of the others by chance


def test_what_the_model_likes_as_much_comes_in_any_order(trainee: Trainee) -> None:
    row = next(r for r in map(drawn, range(99)) if any(len(said.parts) > 2 for said in r.lists))
    orders = {
        favourites_first(np.random.default_rng(seed), [row], trainee, 1.0, "cpu")[0].tokens.tobytes()
        for seed in range(12)
    }
    assert len(orders) > 3


def test_rows_without_lists_stay(trainee: Trainee) -> None:
    row = drawn(0)
    bare = replace(row, lists=())
    assert favourites_first(np.random.default_rng(0), [bare], trainee, 1.0, "cpu")[0] is bare
