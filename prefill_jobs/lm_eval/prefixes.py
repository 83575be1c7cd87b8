"""Which contexts share a stored prefix, and where each is cut: decided by tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

SHARED = 0.75
"""A prefix is shared by contexts of which it is at least this part of what each could have stored alone."""


class Group(NamedTuple):
    """Contexts, by their places, whose first `stored` tokens are the same; 0: nothing is stored for them."""

    stored: int
    members: list[int]


def groups(contexts: Sequence[Tokens], least: int, question: int) -> list[Group]:
    """Every context `[T]` in one group. At least `least` tokens are stored, and never the last `question`
    (1 or more) of a context; contexts that are too short for this are one group, which stores nothing.
    """
    rooms = [len(context) - question for context in contexts]
    order = sorted(range(len(contexts)), key=lambda place: contexts[place].astype(">u4").tobytes())
    short = [place for place in order if rooms[place] < least]
    found: list[Group] = [Group(0, short)] if short else []
    # Of the last group: its last member, and the most that one of its members could store.
    before, longest = None, 0
    for place in order:
        if rooms[place] < least:
            continue
        if before is not None:
            last = found[-1]
            shared = min(last.stored, rooms[place], _common(contexts[before], contexts[place]))
            if shared >= max(least, SHARED * max(longest, rooms[place])):
                found[-1] = Group(shared, [*last.members, place])
                longest, before = max(longest, rooms[place]), place
                continue
        found.append(Group(rooms[place], [place]))
        longest, before = rooms[place], place
    return found


def _common(one: Tokens, other: Tokens) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
