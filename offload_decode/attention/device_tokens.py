"""Attention of queries to chosen tokens on a device: the rows fetched for all of them lie there, or in pinned
memory of the host, and each query names its places.

One program gathers and attends for all KV heads, split over the card as Flash-Decoding splits it
(https://pytorch.org/blog/flash-decoding); a second one merges. All arithmetic is float32.
"""

import torch
from torch import Tensor

from offload_decode.attention.queries import Queries, empty_state, softmax
from offload_decode.attention.transfers import to_device
from offload_decode.common.errors import ConfigError
from offload_decode.types import AttentionState

TILE = 8192  # numbers of keys, and of values, that a program holds at once
PROGRAMS = 256  # that an attention is split into where it has fewer rows: a few for each multiprocessor


def attend_rows(
    queries: Queries, keys: Tensor | None, values: Tensor, places: Tensor, scores: Tensor | None
) -> AttentionState:
    """Attend from R queries to rows of `keys [M, D]` and `values [M, Dv]`: of all KV heads, of which `places
    [Hkv, R, k]` int64 name those of each query, -1 for none. `out [Hkv, R, Dv]`, `lse [Hkv, R]`.

    `scores [Hkv, R, k]` float32 are the inner products q·k where they are known, with -inf for no token: then
    there need be no keys. Keys and values may lie in pinned memory, where a CUDA device reads them itself;
    all else is of the query's device.
    """
    assert keys is not None or scores is not None
    if not places.numel():
        return empty_state(queries.vectors, values.shape[1])
    attend = _by_program if queries.vectors.device.type == "cuda" else reference
    return attend(queries, keys, values, places, scores)


def reference(
    queries: Queries, keys: Tensor | None, values: Tensor, places: Tensor, scores: Tensor | None
) -> AttentionState:
    """The same in plain torch: a head's queries are scored with all rows that any of them names."""
    query = queries.vectors
    state = empty_state(query, values.shape[1])
    values = to_device(values, query.device)
    keys = values if keys is None else to_device(keys, query.device)
    for head, own in enumerate(query):
        # One column more takes the padding.
        product = own.new_full((len(own), len(values) + 1), -torch.inf)
        place = places[head].where(places[head] >= 0, len(values))
        product.scatter_(1, place, 0.0 if scores is None else scores[head])
        product = product[:, :-1]
        nothing = torch.isneginf(product)
        if scores is None:
            product = own @ keys.float().T
        logits = queries.logits(product).masked_fill(nothing, -torch.inf)
        weights, state.lse[head] = softmax(logits)
        state.out[head] = weights @ values.float()
    return state


def _by_program(
    queries: Queries, keys: Tensor | None, values: Tensor, places: Tensor, scores: Tensor | None
) -> AttentionState:
    try:
        import triton

        from offload_decode.attention.device_programs import attend_rows_program
    except ModuleNotFoundError as error:
        raise ConfigError(
            "attention to tokens on a CUDA device needs triton, which CUDA builds of torch bring along: "
            "`pip install triton`, or attend=host."
        ) from error
    query, (heads, rows, k), softcap = queries.vectors, places.shape, queries.softcap
    dim, value_dim = query.shape[2], values.shape[1]
    padded, value_padded = triton.next_power_of_2(dim), triton.next_power_of_2(value_dim)
    block = max(16, TILE // max(padded, value_padded))
    span = triton.cdiv(triton.cdiv(k, triton.cdiv(PROGRAMS, heads * rows)), block) * block
    splits = triton.cdiv(k, span)
    out = torch.empty(heads, rows, splits, value_dim, device=query.device)
    lse = torch.empty(heads, rows, splits, device=query.device)
    with torch.cuda.device(query.get_device()):
        attend_rows_program[(heads * rows * splits,)](
            query.contiguous(),
            values if keys is None else keys,
            values,
            places.contiguous(),
            query if scores is None else scores.contiguous(),
            out,
            lse,
            splits,
            span,
            k,
            queries.scaling,
            1.0 if softcap is None else softcap,
            0 if keys is None else keys.stride(0),
            values.stride(0),
            SCORED=scores is not None,
            CAPPED=softcap is not None,
            DIM=dim,
            DIM_PADDED=padded,
            VALUE_DIM=value_dim,
            VALUE_DIM_PADDED=value_padded,
            BLOCK=block,
        )
    state = merge_splits(out.unsqueeze(3), lse.unsqueeze(3))
    return AttentionState(state.out.squeeze(2), state.lse.squeeze(2))


def merge_splits(out: Tensor, lse: Tensor) -> AttentionState:
    """One state of `out [Hkv, Q, splits, G, Dv]` and `lse [Hkv, Q, splits, G]`, as programs wrote them."""
    import triton

    from offload_decode.attention.device_programs import merge_program

    heads, lists, splits, group, dim = out.shape
    if splits == 1:
        return AttentionState(out.squeeze(2), lse.squeeze(2))
    merged = AttentionState(torch.empty_like(out[:, :, 0]), torch.empty_like(lse[:, :, 0]))
    sizes = {"DIM_PADDED": triton.next_power_of_2(dim), "SPLITS_PADDED": triton.next_power_of_2(splits)}
    with torch.cuda.device(out.get_device()):
        merge_program[(heads * lists * group,)](out, lse, *merged, splits, GROUP=group, DIM=dim, **sizes)
    return merged
