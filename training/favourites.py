"""Lists in orders in which the model would say them.

In an order of chance what was said is seldom what the model would have said first, so that it can go on with
its favourite and be right. Left to itself it says the favourite, and then has to leave out what attracts it
most: that is what it must learn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from training.curriculum import side_by_side
from training.forward import Trainee
from training.rows import Row

SHARE = 0.7  # of the lists; the others stay in an order of chance


@torch.no_grad()
def favourites_first(
    rng: np.random.Generator, rows: Sequence[Row], trainee: Trainee, softening: float, device: str
) -> list[Row]:
    """The rows with most of their lists in an order drawn by the first tokens' probabilities where the list
    begins, each time from those that are left (Gumbel noise on the logits)."""
    chosen = {
        i: [n for n, said in enumerate(row.lists) if len(said.parts) > 1 and rng.random() < SHARE]
        for i, row in enumerate(rows)
    }
    chosen = {i: numbers for i, numbers in chosen.items() if numbers}
    if not chosen:
        return list(rows)
    tokens = np.stack([rows[i].tokens for i in chosen])
    picked = np.zeros((len(chosen), max(map(len, chosen.values()))), np.int64)
    for at, (i, numbers) in zip(picked, chosen.items(), strict=True):
        lists = [rows[i].lists[n] for n in numbers]
        at[: len(lists)] = [said.start + said.starts[0] - 1 for said in lists]
    branches = np.stack([rows[i].branches for i in chosen])
    order = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    places = torch.as_tensor(side_by_side(order, branches), device=device)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    states, *_ = trainee.states(
        torch.as_tensor(tokens, device=device),
        places,
        torch.as_tensor(picked, device=device),
        torch.zeros(tokens.shape, device=device),
        torch.as_tensor(branches, device=device),
        none,
        none,
        torch.zeros((len(chosen), 0), device=device),
        torch.tensor(softening, device=device),
    )
    logits = trainee.logits(states).cpu().numpy()
    out = list(rows)
    for scores, (i, numbers) in zip(logits, chosen.items(), strict=True):
        for at, n in zip(scores, numbers, strict=False):
            firsts = [int(part[0]) for part in out[i].lists[n].parts]
            liked = at[firsts] + rng.gumbel(size=len(firsts))
            out[i] = out[i].reordered(n, np.argsort(-liked, kind="stable").tolist())
    return out
