"""Where attention is led beside the loss: each gives, averaged, what is missed of where it should go.

paid is attention float32[B, H, P, T] of the heads of one layer, at some places, to the T tokens of a row;
"heads together" sums over H. An answer has one token that must be found and many that are copied in passing:
the loss alone takes long to tell where the one is.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LED = ("copied", "said", "named", "counted", "begun", "read")
SINKS = (32, 256)  # occurrences of a word at which each head that counts pays it half of its attention
LONGEST = 10  # tokens of a counted word
LONGER = 64  # times as many tokens, of other words, are simulated around a word that is counted


def copied(
    paid: torch.Tensor,
    tokens: torch.Tensor,
    picked: torch.Tensor,
    others: torch.Tensor,
    hints: torch.Tensor,
    opens: torch.Tensor,
    origins: torch.Tensor,
    branches: torch.Tensor,
    weights: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    """The last layer, to what is said next: weighted mean of -log of what its heads together pay there.

    Where a counted word begins it is of what they pay to one word, on average (`agreed`).
    The arguments are those of `Trainee.forward`; weights float32[B, P].
    """
    begins = opened(opens, picked) > 0
    wanted = sources(tokens, origins, branches, picked, others, hints, begins, eos)
    together = (paid * wanted[:, None]).sum((1, 3))
    counts = (origins != tokens).any(1, keepdim=True) & begins
    mass = torch.where(counts, agreed(paid, tokens, origins, picked, others), together)
    return missed(mass.clamp(1e-6, 1).log(), weights * wanted.any(2))


def agreed(
    paid: torch.Tensor,
    tokens: torch.Tensor,
    origins: torch.Tensor,
    picked: torch.Tensor,
    others: torch.Tensor,
) -> torch.Tensor:
    """What heads pay on average to one of the words that would be right, the one they pay most: [B, P].

    Ten words that come equally often would share what there is, and what is read of all ten is none of them.
    Which one is taken is all the same, as long as it is the same for every head. The first half of the heads
    reads a word's first token where it ends; the others, which copy what stands there, may pay the row's
    first token instead.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    half = paid.shape[1] // 2
    mean = paid.mean(1) * (order <= picked[:, :, None])
    idle = paid[:, half:, :, 0].sum(1) / paid.shape[1]
    right = torch.cat([F.pad(tokens, (0, 1)).gather(1, picked + 1)[..., None], others], 2)
    by_word = [
        (mean * ((origins[:, None] == word[..., None]) & (word >= 0)[..., None])).sum(2)
        for word in right.unbind(2)
    ]
    return torch.stack(by_word).amax(0) + idle


def remembering(
    paid: torch.Tensor, picked: torch.Tensor, opens: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer before the last, to each part that a list has said, where the next one begins.

    Weighted mean of -log of what its heads together pay to a part's first token, of all parts alike: one of
    three that has all of the attention leaves two to be said again.
    """
    begun = opened(opens, picked)
    order = torch.arange(opens.shape[1], device=opens.device)
    said = (opens[:, None] == begun[:, :, None]) & (begun[:, :, None] > 0) & (order <= picked[:, :, None])
    logs = (paid.sum(1).clamp(1e-6, 1).log() * said).sum(2) / said.sum(2).clamp(min=1)
    return missed(logs, weights * said.any(2))


def belonging(paid: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """The layer before the last, from a field's value to the name of its document.

    bound int64[B, R, 3]: a value's token, and the first and the last token of the name, or -1; paid: there.
    """
    order = torch.arange(paid.shape[3], device=paid.device)
    name = (order >= bound[:, :, 1:2]) & (order <= bound[:, :, 2:])
    return missed((paid.sum(1) * name).sum(2).clamp(1e-6, 1).log(), (bound[:, :, 0] >= 0).float())


def counting(paid: torch.Tensor, counted: torch.Tensor, so_far: torch.Tensor, sink: int) -> torch.Tensor:
    """One head, float32[B, C, T], from a word of a list to the n times that it has come: n / (n + sink).

    So it is from a word's beginning to the n words that began so: one that is common is spelled by that.

    So much attention tells how often a word has come, up to any number; what is left goes to the row's first
    token, for a softmax without anything beside would be 1 from the first time on. What goes to any other
    token counts LONGER times: a little of it for each makes all of it in a list of some thousand words.
    Kullback-Leibler divergence in nats, averaged over the places counted, int64[B, C] (so_far int64[B, T]:
    which beginning of a word, or all of it, has been read by then, or 0).
    """
    mine = so_far.gather(1, counted)
    order = torch.arange(so_far.shape[1], device=so_far.device)
    same = (so_far[:, None] == mine[:, :, None]) & (order <= counted[:, :, None])
    times = same.sum(2)
    share = times / (times + sink)
    mass, first = (paid * same).sum(2), paid[:, :, 0]
    strayed = LONGER * (1 - mass - first).clamp(min=0)
    mass = (mass / (mass + first + strayed)).clamp(1e-6, 1 - 1e-6)
    apart = share * (share / mass).log() + (1 - share) * ((1 - share) / (1 - mass)).log()
    return missed(-apart, (mine > 0).float())


def beginning(
    paid: torch.Tensor, tokens: torch.Tensor, origins: torch.Tensor, counted: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """The layer before the last, from a counted word's end to its first token, by which it is said.

    counted int64[B, C]: places, at some of which words end; paid float32[B, H, C, T]: there.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    back = counted[:, :, None] - order
    first = (tokens[:, None] == origins.gather(1, counted)[:, :, None]) & (back >= 0) & (back < LONGEST)
    mass = (paid.sum(1) * first).sum(2).clamp(1e-6, 1)
    return missed(mass.log(), (ends.gather(1, counted) > 0).float())


def reading(
    logits: torch.Tensor, origins: torch.Tensor, counted: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """What heads that look for counted words say of where one ends, float32[B, C, V]: its first token."""
    true = logits.log_softmax(2).gather(2, origins.gather(1, counted)[..., None].clamp(min=0))[..., 0]
    return missed(true, (ends.gather(1, counted) > 0).float())


def visible(met: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Whether tokens of the branches met are seen from own: bool, broadcast."""
    return (met == 0) | (met == own)


def opened(opens: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """Of which list the next token begins a part, or 0: int64[B, P]."""
    return F.pad(opens, (0, 1)).gather(1, picked + 1)


def missed(logs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted mean of -logs, [B, P]."""
    return -(logs * weights).sum() / weights.sum().clamp(min=1)


def sources(
    tokens: torch.Tensor,
    origins: torch.Tensor,
    branches: torch.Tensor,
    picked: torch.Tensor,
    others: torch.Tensor,
    hints: torch.Tensor,
    alone: torch.Tensor,
    eos: int,
) -> torch.Tensor:
    """Where what comes behind the picked places, int64[B, P], can be copied from: bool[B, P, T].

    That is where the same token can be had (origins, int64[B, T]: mostly of tokens, int64[B, T], itself),
    followed by the same two (or by any, behind an answer's end, and where alone, bool[B, P], says so); or one
    of the others, int64[B, P, A], which would be as right. Other branches, int64[B, T], are not seen. Where
    hints, int64[B, P, HINTS], name tokens, it is those or the next: what stands in front of them is known
    there.
    """
    length = tokens.shape[1]
    padded = F.pad(tokens, (0, 3), value=eos)
    mine = branches.gather(1, picked)[:, :, None]
    before = torch.arange(length, device=tokens.device) <= picked[:, :, None]
    before = before & visible(branches[:, None], mine)
    found = before
    ended = torch.zeros_like(alone)
    for ahead in range(3):
        wanted = padded.gather(1, picked + 1 + ahead)
        ended = ended | alone | (wanted == eos) if ahead else ended
        there = padded[:, ahead : ahead + length] if ahead else origins
        found = found & ((there[:, None] == wanted[:, :, None]) | ended[:, :, None])
    for other in others.unbind(2):
        same = (origins[:, None] == other[:, :, None]) & (other >= 0)[..., None]
        found = found | (before & same)
    behind = torch.arange(length, device=tokens.device) - hints[..., None]
    told = (((behind == 0) | (behind == 1)) & (hints >= 0)[..., None]).any(2)
    return torch.where((hints < 0).all(2)[..., None], found, told & before)
