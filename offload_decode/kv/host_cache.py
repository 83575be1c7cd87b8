"""`HostKV`: the stored keys and values in host memory, and attention to chosen tokens of them."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from offload_decode.attention.dense import attend_blocks
from offload_decode.attention.device_tokens import attend_rows
from offload_decode.attention.host_dense import attend_all
from offload_decode.attention.host_tokens import attend_tokens
from offload_decode.attention.pages import attend_pages, loaded_tokens
from offload_decode.attention.queries import Queries, empty_state, joined
from offload_decode.attention.rows import HeadRows, Rows, tensor_view, unite
from offload_decode.attention.transfers import to_device, to_host
from offload_decode.kv.device_cache import DeviceRows
from offload_decode.kv.placement import DEVICE, HOST, PINNED, Placement, Request
from offload_decode.store.base import Store
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats

BLOCK_TOKENS = 8192
SCORES = 1 << 22  # of one part of the rows: a handful of float32 temporaries of this size are held


class HostKV:
    """The stored prefix in host memory, and attention to chosen rows of it: where they lie, or on a device to
    which they are copied, once for each KV head.

    attend: `host`, `device`, `pinned` (a device that reads them in the host's memory), or `auto`, which
    measures. cache_bytes: room on the device for the rows that were used there last.
    """

    def __init__(self, store: Store, device: torch.device, attend: str = "auto", cache_bytes: int = 0):
        self.store = store
        self.device = device
        self.placement = Placement(attend, device)
        self.cache_bytes = cache_bytes
        self._copied: DeviceRows | None = None
        self.length = store.manifest.n_tokens
        self._latent = store.manifest.shape.latent
        self._layers: dict[tuple[str, int], HeadRows] = {}
        # Indexes, rows on a device and what was measured are shared by all that read this store.
        self.lock = threading.RLock()

    def keys(self, layer: int, head: int) -> Rows:
        """The keys of one KV head, a view of the store's file."""
        return self.layer_keys(layer)[head]

    def values(self, layer: int, head: int) -> Rows:
        """The values of one KV head, a view of the store's file; those of latents are the keys themselves."""
        return self.layer_values(layer)[head]

    def layer_keys(self, layer: int) -> HeadRows:
        """The keys of every KV head of a layer."""
        return self._layers.get(("keys", layer)) or self._layer("keys", layer)

    def layer_values(self, layer: int) -> HeadRows:
        """The values of every KV head of a layer."""
        kind = "keys" if self._latent else "values"
        return self._layers.get((kind, layer)) or self._layer(kind, layer)

    def _layer(self, kind: str, layer: int) -> HeadRows:
        read, heads = getattr(self.store, kind), range(self.store.manifest.shape.kv_heads)
        self._layers[kind, layer] = HeadRows(Rows(read(layer, head)) for head in heads)
        return self._layers[kind, layer]

    def key_norms(self, layer: int, head: int) -> Tensor:
        """Lengths of the keys, float32 `[N]` on the host."""
        return tensor_view(self.store.key_norms(layer, head))

    def attend(
        self,
        layer: int,
        queries: Queries,
        selection: Selection | PageSelection,
        stats: StepStats,
        place: str | None = None,
        copied: DeviceRows | None = None,
    ) -> AttentionState:
        """Attend from R rows to the selected tokens of one layer: `out [Hkv, R, Dv]`, `lse [Hkv, R]`.

        place: where, as `placement` has it if it is left out. copied: the rows on the device, where these are
        not to be those that were used last.
        """
        place = place or self.placement.attend
        if place == "auto":
            place = self._fastest(layer, queries, selection)
        stats.attended[place] = stats.attended.get(place, 0) + 1
        away = place == HOST and self.device.type != "cpu"
        if away:
            queries, selection = replace(queries, vectors=queries.on_host(), copy=None), on_host(selection)
        began, gathered = time.perf_counter(), stats.gather_s
        keys, values = self.layer_keys(layer), self.layer_values(layer)
        if isinstance(selection, PageSelection):
            state = attend_selected(queries, keys, values, selection)
            tokens = loaded_tokens(selection.pages, selection.page_size, self.length)
            self._count(tokens, layer, queries, stats)
        elif selection.ids is None:
            if place == HOST:
                state = attend_all(queries.vectors, keys, values, queries.scaling, queries.softcap)
            else:
                state = self._attend_all(layer, queries)
            self._count(len(keys) * self.length, layer, queries, stats)
        elif place == HOST:
            state, read = attend_tokens(queries, keys, values, selection.ids, selection.scores)
            stats.bytes_moved += read
        else:
            own = copied or self._copied
            if own is None:
                row_bytes = max(keys[0].row_bytes, values[0].row_bytes)
                own = self._copied = DeviceRows(self.device, self.cache_bytes, row_bytes, len(keys))
            staged = place == PINNED and not (keys[0].encoded or values[0].encoded)
            state = self._attend_there(layer, queries, selection, stats, own, staged)
        stats.attend_s += time.perf_counter() - began - (stats.gather_s - gathered)
        if not away:
            return state
        stats.bus_bytes += sum(part.nbytes for part in (queries.vectors, *state))
        # Through one copy.
        both = to_device(torch.cat([state.out, state.lse[..., None]], dim=-1), self.device)
        return AttentionState(both[..., :-1].contiguous(), both[..., -1].contiguous())

    def _fastest(self, layer: int, queries: Queries, selection: Selection | PageSelection) -> str:
        """Where requests like this one are served fastest: measured with the first of them."""
        request = Request.of(queries.vectors.shape[1], selection)
        named = isinstance(selection, Selection) and selection.ids is not None
        if request not in self.placement.seconds:
            uncached = DeviceRows(self.device)  # a cache would answer every repetition after the first
            self.placement.measure(
                request,
                [HOST, DEVICE, PINNED] if named and not self.cache_bytes else [HOST, DEVICE],
                lambda place: self.attend(layer, queries, selection, StepStats(), place, uncached),
            )
        return self.placement.best(request)

    def _attend_there(
        self,
        layer: int,
        queries: Queries,
        selection: Selection,
        stats: StepStats,
        copied: DeviceRows,
        staged: bool,
    ) -> AttentionState:
        """On the device, with the rows copied there, or `staged` for it to read."""
        ids, scores = selection.ids, selection.scores
        assert ids is not None
        _, rows, k = ids.shape
        if not k or not rows:
            return empty_state(queries.vectors, self.values(layer, 0).dim)
        states = []
        scores = scores if scores is None else to_device(scores, self.device)
        # r rows meet a union of at most min(N, r·k) tokens of a head.
        step = max(1, SCORES // self.length, isqrt(SCORES // max(1, k)))
        for start in range(0, rows, step):
            part = slice(start, start + step)
            began = time.perf_counter()
            union, places = unite(ids[:, part].cpu(), self.length)
            values = copied.fetch(2 * layer + 1, self.layer_values(layer), union, stats, staged)
            keys = None if scores is not None else values
            if keys is not None and not self._latent:
                keys = copied.fetch(2 * layer, self.layer_keys(layer), union, stats, staged)
            stats.gather_s += time.perf_counter() - began
            there = to_device(places, self.device)
            known = None if scores is None else scores[:, part]
            states.append(attend_rows(queries.part(start, start + step), keys, values, there, known))
            if staged:
                copied.read()
        return joined(states, 1)

    def _attend_all(self, layer: int, queries: Queries) -> AttentionState:
        """On the device, to which the keys and values are sent block by block."""
        how = self.values(layer, 0).dim, queries.scaling, queries.softcap
        states = [
            attend_blocks(own[None, None], self._blocks(layer, head, own.device), *how)
            for head, own in enumerate(queries.vectors)
        ]
        return AttentionState(*(part[0] for part in joined(states, 1)))

    def _count(self, tokens: int, layer: int, queries: Queries, stats: StepStats) -> None:
        """Count the bytes of the keys and values of so many tokens."""
        values = 0 if self._latent else self.values(layer, 0).row_bytes
        moved = tokens * (self.keys(layer, 0).row_bytes + values)
        stats.bytes_moved += moved
        stats.bus_bytes += moved if queries.vectors.is_cuda else 0

    def _blocks(self, layer: int, head: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        keys, values = self.keys(layer, head), self.values(layer, head)
        for start in range(0, self.length, BLOCK_TOKENS):
            part = slice(start, start + BLOCK_TOKENS)
            key = keys.read(part, device)[None, None]
            yield key, key if values is keys else values.read(part, device)[None, None]


def on_host(selection: Selection | PageSelection) -> Selection | PageSelection:
    """The same in host memory, where keys and values are fetched."""
    if isinstance(selection, PageSelection):
        pages, limit = to_host(selection.pages, selection.limit)
        return replace(selection, pages=pages, limit=limit)
    there = {"ids": selection.ids, "scores": selection.scores}
    named = {name: part for name, part in there.items() if part is not None}
    if not any(part.is_cuda for part in named.values()):
        return selection
    here: dict[str, Any] = dict(zip(named, to_host(*named.values()), strict=True))
    return replace(selection, **here)


def attend_selected(
    queries: Queries, keys: HeadRows | Tensor, values: HeadRows | Tensor, selection: PageSelection
) -> AttentionState:
    """Attend from R rows to selected pages of `keys` and `values`, the stored rows of each KV head, or
    `[Hkv, N, D]` and `[Hkv, N, Dv]` on the queries' device: `out [Hkv, R, Dv]`, `lse [Hkv, R]`.
    """
    grouped = queries.by_list() if selection.shared else queries.vectors.unsqueeze(2)
    chosen = selection.pages, selection.page_size, selection.limit
    out, lse = attend_pages(grouped, keys, values, *chosen, queries.scaling, queries.softcap)
    if selection.shared:
        return AttentionState(queries.by_query(out), queries.by_query(lse))
    return AttentionState(out.squeeze(2), lse.squeeze(2))
