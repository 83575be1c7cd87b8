"""The equivalence check of passes that several conversations share: packed passes of the tiny model equal its
plain one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from offload_decode.models.arguments import with_cache
from offload_decode.models.joint import JointCache, Segment, logits_after
from offload_decode.models.proof import PREFIX, Trial, check_equivalence

# Of four conversations: the row of the plain pass, and how many tokens of it each pass runs. The first two
# stand behind one prefix, the third behind another, and the last behind nothing.
_ROWS = (0, 1, 2, 0)
_PASSES = ((9, 2, 1, 5), (1, 1, 8, 1), (1, 1, 1, 1), (2, 1, 3, 12))


def packs(config: Any) -> bool:
    """Whether the packed passes of a transformers config's model passed the check."""
    return check_equivalence(config, Packed).served


class Packed(Trial):
    """Several conversations in joint passes; the last tokens' logits are asked for as the engine does."""

    def run_behind(self, ids: Tensor) -> None:
        """Questions and single tokens, mixed."""
        first, other = (self.prefilled(ids[row : row + 1, :PREFIX]) for row in (0, 2))
        talks = [first.fork(first.prefix), first.fork(first.prefix), other, self.prefilled(ids[:1, :0])]
        starts = [talk.prefix_length for talk in talks]
        for number, lengths in enumerate(_PASSES):
            self.step = f"joint pass {number + 1} of several conversations"
            cache = JointCache([Segment(*own) for own in zip(talks, lengths, strict=True)])
            places = list(zip(_ROWS, starts, lengths, strict=True))
            packed = [ids[row, start : start + length] for row, start, length in places]
            last = torch.tensor(lengths).cumsum(0) - 1
            output = self.model(
                input_ids=torch.cat(packed)[None],
                use_cache=True,
                logits_to_keep=last,
                **with_cache(self.model, cache),
            )
            self.check(
                [own[None] for own in logits_after(output, last)],
                [(row, start + length - 1, 1) for row, start, length in places],
                lambda: "the logits are other numbers than in one plain pass",
            )
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
