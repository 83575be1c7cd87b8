"""Quest's pages where they lie: CUDA tensors go to the device's kernels, all others to those of the host."""

import torch
from torch import Tensor

from offload_decode.attention import pages_host
from offload_decode.attention.pages_reference import PageBounds
from offload_decode.attention.queries import empty_state
from offload_decode.attention.rows import HeadRows
from offload_decode.attention.transfers import to_device, to_host
from offload_decode.types import AttentionState


def page_scores(query: Tensor, bounds: PageBounds, corner: float = 1.0) -> Tensor:
    """As `pages_reference.page_scores`, on the device of the query and the bounds."""
    if query.device.type != "cuda":
        return pages_host.page_scores(query, bounds, corner)
    from offload_decode.attention import pages_device

    return pages_device.page_scores(query, bounds, corner)


def top_pages(scores: Tensor, k: int) -> Tensor:
    """As `pages_reference.top_pages`, on the device of the scores."""
    if scores.device.type != "cuda":
        return pages_host.top_pages(scores, k)
    from offload_decode.attention import pages_device

    return pages_device.top_pages(scores, k)


def attend_pages(
    query: Tensor,
    keys: HeadRows | Tensor,
    values: HeadRows | Tensor,
    pages: Tensor,
    page_size: int,
    limit: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> AttentionState:
    """As `pages_reference.attend_pages`. `keys` and `values` are either one tensor on the device, which is
    read where it lies, or the stored rows of each KV head, of which a device gets the pages that any list
    names, once for each KV head.
    """
    if query.device.type != "cuda":
        return pages_host.attend_pages(query, keys, values, pages, page_size, limit, scaling, softcap)
    from offload_decode.attention import pages_device

    if isinstance(keys, Tensor) or isinstance(values, Tensor):
        assert isinstance(keys, Tensor)
        assert isinstance(values, Tensor)
        return pages_device.attend_pages(query, keys, values, pages, page_size, limit, scaling, softcap)
    (pages,) = to_host(pages)
    if not bool((pages >= 0).any()):
        return empty_state(query, values[0].dim)
    staged = gather_pages(keys, values, pages, page_size, query.device)
    limit = to_device(limit, query.device)
    return pages_device.attend_pages(query, *staged, page_size, limit, scaling, softcap)


def loaded_tokens(pages: Tensor, page_size: int, n_tokens: int) -> int:
    """Tokens in the pages that any list of `pages [Hkv, Q, K]` names, once for each KV head."""
    named = pages.flatten(1).sort(dim=1).values
    # Padding is -1 and sorts first.
    new = named.diff(dim=1, prepend=named.new_full((len(named), 1), -1)) > 0
    return int((n_tokens - named[new] * page_size).clamp(max=page_size).sum())


def gather_pages(
    keys: HeadRows, values: HeadRows, pages: Tensor, page_size: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies the pages that any list names to `device`, as they are stored, and makes floats of them there:
    keys `[Hkv, M, D]` and values `[Hkv, M, Dv]`, and `pages` as they are numbered there.

    Every KV head has room for as many whole pages as the one that needs most; a ragged last page comes after
    that room, so that the end of the copy cuts it as the end of the store did.
    """
    whole, rest = divmod(len(keys[0]), page_size)
    named = pages.cpu()
    unions = [torch.unique(own[own >= 0]) for own in named]
    room = max(int((union < whole).sum()) for union in unions)
    shape, pinned = (len(keys), room * page_size + rest), device.type == "cuda"
    parts = (keys,) if keys[0] is values[0] else (keys, values)
    staged = [
        torch.empty(*shape, part[0].raw.shape[1], dtype=part[0].raw.dtype, pin_memory=pinned)
        for part in parts
    ]
    renumbered = torch.empty_like(named, pin_memory=pinned)
    for head, (union, own) in enumerate(zip(unions, named, strict=True)):
        fetch = union[union < whole]
        for part, copy in zip((side[head].raw for side in parts), staged, strict=True):
            chosen = copy[head, : len(fetch) * page_size].view(len(fetch), page_size, part.shape[1])
            stored = part[: whole * page_size].view(whole, page_size, part.shape[1])
            torch.index_select(stored, 0, fetch, out=chosen)
            copy[head, len(fetch) * page_size : room * page_size] = 0  # no garbage that is NaN
            copy[head, room * page_size :] = part[whole * page_size :]
        place = torch.where(own == whole, room, torch.searchsorted(union, own))
        renumbered[head] = torch.where(own < 0, -1, place)
    *raw, numbers = (part.to(device, non_blocking=True) for part in (*staged, renumbered))
    copied = [part[0].floats(own) for part, own in zip(parts, raw, strict=True)]
    return copied[0], copied[-1], numbers
