"""Where attention is led: what an answer can be copied from."""

from __future__ import annotations

import torch

from training.guidance import sources


def test_what_is_copied_stands_before_with_the_same_two_tokens_behind_it() -> None:
    eos = 1
    #                       0  1  2  3  4  5  6  7  8  9  10 11 12
    tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 9, 3, 5, 6, 7, 4, eos]])
    picked = torch.tensor([[7, 9, 10, 3]])
    nothing = torch.full((1, 4, 2), -1)
    hints = torch.full((1, 4, 2), -1)
    alone = torch.zeros(1, 4, dtype=torch.bool)
    found = sources(tokens, tokens, picked, nothing, hints, alone, eos)[0]
    # 5 6 7 is at 0 alone; 7 4 comes nowhere else; 4 ends the answer, but was not seen; 5 6 9 not either.
    assert [row.nonzero().flatten().tolist() for row in found] == [[0], [], [], []]
    ended = torch.tensor([[5, 6, 7, 8, 5, 4, 3, 5, eos, 6]])
    one = (hints[:, :1], alone[:, :1], eos)
    found = sources(ended, ended, torch.tensor([[6]]), nothing[:, :1], *one)[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4]
    found = sources(ended, ended, torch.tensor([[6]]), torch.tensor([[[3, 9]]]), *one)[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4, 6]
    # Where it is told elsewhere, it is found behind that alone.
    told = torch.tensor([[[2, 5]]])
    found = sources(ended, ended, torch.tensor([[6]]), nothing[:, :1], told, alone[:, :1], eos)[0]
    assert found[0].nonzero().flatten().tolist() == [2, 3, 5, 6]
    told[..., 1] = -1
    found = sources(ended, ended, torch.tensor([[6]]), nothing[:, :1], told, alone[:, :1], eos)[0]
    assert found[0].nonzero().flatten().tolist() == [2, 3]
    # A part of a list is the same whatever follows it: 5 6 9 has no like, 5 has two.
    found = sources(tokens, tokens, torch.tensor([[7]]), nothing[:, :1], hints[:, :1], ~alone[:, :1], eos)[0]
    assert found[0].nonzero().flatten().tolist() == [0, 4]


def test_a_counted_word_is_copied_from_where_it_ends() -> None:
    eos = 1
    #                       0  1  2  3  4  5  6
    tokens = torch.tensor([[5, 6, 3, 5, 7, 4, 5, eos]])
    origins = torch.tensor([[-1, 5, 3, -1, 5, 4, 5, eos]])
    nothing = torch.full((1, 1, 2), -1)
    alone = torch.ones(1, 1, dtype=torch.bool)
    found = sources(tokens, origins, torch.tensor([[5]]), nothing, nothing, alone, eos)
    assert found[0, 0].nonzero().flatten().tolist() == [1, 4]
    others = torch.tensor([[[3, -1]]])
    found = sources(tokens, origins, torch.tensor([[5]]), others, nothing, alone, eos)
    assert found[0, 0].nonzero().flatten().tolist() == [1, 2, 4]
