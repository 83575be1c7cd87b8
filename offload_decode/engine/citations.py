"""Which documents and passages an answer attended to: docs/methods.md §8."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.attention.host_tokens import score_tokens
from offload_decode.attention.notable import add_notable
from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries
from offload_decode.common.errors import ConfigError, StoreDamaged
from offload_decode.kv.host_cache import BLOCK_TOKENS, HostKV
from offload_decode.store.base import Store
from offload_decode.store.reader import KVStore
from offload_decode.types import (
    AttentionState,
    CitedDocument,
    CitedSpan,
    Document,
    PageSelection,
    Passage,
    Selection,
)

NOTABLE = 0.05
"""The least share of a row's attention to stored tokens that counts: most heads spread theirs thinly over the
whole corpus, and the sum of that would drown what a few look for.
"""
OPENING = 4
"""First tokens of a store, which models attend to where there is nothing to attend to (StreamingLLM, arXiv
2309.17453, §3.1): these are cited of no document.
"""
PLAIN_QUESTION, PLAIN_TOKENS = "What?", 8
"""What a question without content, and so many tokens of its answer, attend to is taken off: all questions
attend to it.
"""
PLAIN_TIMES = 4
"""Of a whole question so many times that: most of its tokens are its form, and attend as in any question."""
DOCUMENTS, SPANS = 8, 3
WINDOW = 48  # tokens that one passage gathers around a peak
REACH = 48  # tokens beyond these in which a sentence or a line may begin and end

LEAST = 0.01  # of the whole: a document or a passage with less is not worth a reader's while

# As texts, as SentencePiece and as bytes spell them.
_NEWLINE = r"(?:[\nĊ]|<0x0A>)"
_LINE = re.compile(_NEWLINE)
_PARAGRAPH = re.compile(rf"{_NEWLINE}[ ▁Ġ]*{_NEWLINE}[ ▁Ġ]*$")
_SENTENCE = re.compile(r"[.!?。！？][\"'”’)\]]*$")
_BLANK = re.compile(r"[\s▁ĠĊ]|<0x0A>")

Array = npt.NDArray[Any]
AnySelection = Selection | PageSelection


class Observer(Protocol):
    """Sees what each layer attends to: from the last token of every pass, or from a `whole` one."""

    whole: bool

    def see(
        self, layer: int, rows: Tensor, queries: Queries, selection: AnySelection, state: AttentionState
    ) -> None:
        """Take note of some rows, int64 `[n]`, of what was selected for `queries` of one layer: those of this
        conversation's tokens that count. `state [Hkv, R]` is that of all stored tokens, estimated ones too.
        """


class Watch:
    """Sums the attention that one conversation pays to each stored token while it is watched.

    mass: float32 `[N]`, the sum over all rows that were seen of a row's softmax over the stored tokens, where
    that is at least `least`. It takes 4 bytes a token at most: the system commits pages that are written to.
    rows: how many were seen. whole: all tokens of a pass count, and not its last one alone.
    """

    def __init__(self, host: HostKV, least: float = NOTABLE, whole: bool = False):
        self.host, self.least, self.whole = host, least, whole
        self.mass = np.zeros(host.length, np.float32)
        self.rows = 0

    def see(
        self, layer: int, rows: Tensor, queries: Queries, selection: AnySelection, state: AttentionState
    ) -> None:
        if not len(rows):
            return
        own = replace(queries, vectors=queries.on_host()[:, rows], group=1, tokens=1, copy=None)
        self.rows += own.vectors.shape[:2].numel()
        lse = state.lse.cpu()[:, rows]
        scores = None
        if isinstance(selection, PageSelection):
            pages, limit = selection.pages.cpu(), selection.limit.cpu()
            tokens = page_tokens(pages, selection.page_size, self.host.length, limit)
            ids = (queries.by_query(tokens.unsqueeze(2)) if selection.shared else tokens)[:, rows]
        elif selection.ids is None:
            self._see_all(layer, own, lse)
            return
        else:
            ids = selection.ids.cpu()[:, rows]
            scores = None if selection.scores is None else selection.scores.cpu()[:, rows]
        if scores is None:
            scores = score_tokens(own.vectors, self.host.layer_keys(layer), ids)
        self._add(ids, own.logits(scores), lse)

    def fork(self) -> Watch:
        """The same so far, for a conversation that goes on by itself."""
        forked = copy(self)
        forked.mass = self.mass.copy()
        return forked

    def shares(self) -> dict[int, float]:
        """The mean share of a row's attention, by token: of those that got any."""
        tokens = np.flatnonzero(self.mass)
        return dict(zip(tokens.tolist(), (self.mass[tokens] / max(1, self.rows)).tolist(), strict=True))

    def beyond(self, plain: Mapping[int, float], opening: int) -> tuple[Array, Array]:
        """The tokens from `opening` on whose mean share is more than their `plain` one, and by how much."""
        shares = self.mass / max(1, self.rows)
        shares[list(plain)] -= list(plain.values())
        tokens = np.flatnonzero(shares[opening:] > 0) + opening
        return tokens, shares[tokens].astype(np.float64)

    def _see_all(self, layer: int, queries: Queries, lse: Tensor) -> None:
        """Block by block, so that no row of a million scores is held."""
        for head, keys in enumerate(self.host.layer_keys(layer)):
            for start in range(0, self.host.length, BLOCK_TOKENS):
                key = keys.read(slice(start, start + BLOCK_TOKENS), torch.device("cpu"))
                ids = torch.arange(start, start + len(key))
                logits = queries.logits(queries.vectors[head] @ key.T)
                self._add(ids.expand_as(logits)[None], logits[None], lse[head : head + 1])

    def _add(self, ids: Tensor, logits: Tensor, lse: Tensor) -> None:
        least = math.log(self.least) if self.least else -math.inf
        given, found, whole = (one.contiguous().numpy() for one in (ids, logits, lse))
        add_notable(self.mass, given, found, whole, least)


def queries_of(queries: Queries, sequence: int, tokens: range) -> Tensor:
    """The queries of some tokens of a sequence, int64 `[group * tokens]`: one a head and token."""
    members = sequence * queries.group + torch.arange(queries.group)
    return (members[:, None] * queries.tokens + torch.tensor(tokens)).flatten()


def cite(
    watch: Watch,
    store: Store,
    tokenizer: Any,
    most_documents: int = DOCUMENTS,
    most_spans: int = SPANS,
    opening: int = 0,
    plain: Mapping[int, float] | None = None,
) -> tuple[CitedDocument, ...]:
    """The documents that were attended to and their passages, most attended first; none where attention was
    spread thinly. `opening`: first tokens that are no document's; of the first `OPENING`, attention to them
    does not count. `plain`: what a question without content attends to (`Watch.shares`), which is taken off.
    Raises `ConfigError` for a store that has no tokens.
    """
    if not isinstance(store, KVStore):
        raise ConfigError("a store in memory has no documents to cite: open one from disk")
    tokens, mass = watch.beyond(plain or {}, max(OPENING, opening))
    mass /= mass.sum() or 1.0
    cited = []
    for one in store.documents:
        begin, end = np.searchsorted(tokens, [one.start, one.end]).tolist()
        if (share := float(mass[begin:end].sum())) >= LEAST:
            cited.append((share, replace(one, start=max(one.start, opening)), slice(begin, end)))
    cited.sort(key=lambda found: -found[0])
    top = cited[:most_documents]
    spans = [_passages(one, tokens[own], mass[own], store, tokenizer, most_spans) for _, one, own in top]
    return tuple(CitedDocument(one.name, share, own) for (share, one, _), own in zip(top, spans, strict=True))


def passages(
    watch: Watch, store: Store, tokenizer: Any, most: int, opening: int, plain: Mapping[int, float]
) -> tuple[Passage, ...]:
    """The passages of all documents that were attended to, so many at `most`, most attended first. Raises as
    `cite`.
    """
    attended = float(watch.beyond(plain, max(OPENING, opening))[1].sum())
    cited = cite(watch, store, tokenizer, most, most, opening, plain)
    spans = [(document.name, span) for document in cited for span in document.spans]
    spans.sort(key=lambda found: -found[1].share)
    return tuple(
        Passage(name, span.start, span.end, span.text, span.share * attended) for name, span in spans[:most]
    )


def template_length(store: KVStore, begun: Sequence[int]) -> int:
    """How many first tokens of a store are the prompt's own, which begins as `begun`: a chat template."""
    there = store.tokens[: len(begun)]
    same = there == np.array(begun[: len(there)])
    return len(same) if same.all() else int(same.argmin())


def _passages(
    document: Document, tokens: Array, mass: Array, store: KVStore, tokenizer: Any, most: int
) -> tuple[CitedSpan, ...]:
    """Windows around peaks, widened to whole sentences or lines; none overlaps another."""
    taken: list[tuple[int, int]] = []
    found: list[CitedSpan] = []
    while len(taken) < most and len(tokens):
        sums = np.concatenate([[0.0], mass.cumsum()])
        ends = np.searchsorted(tokens, tokens + WINDOW)
        first = int((sums[ends] - sums[:-1]).argmax())
        low = max([document.start, *(end for _, end in taken if end <= tokens[first])])
        high = min([document.end, *(start for start, _ in taken if start > tokens[first])])
        last = min(int(tokens[ends[first] - 1]) + 1, high)
        start, end = _widened(store, tokenizer, int(tokens[first]), last, low, high)
        inside = (tokens >= start) & (tokens < end)
        text = tokenizer.decode(
            text_ids(store, tokenizer, start, end),
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
        found.append(CitedSpan(start, end, str(text).strip(), float(mass[inside].sum())))
        taken.append((start, end))
        tokens, mass = tokens[~inside], mass[~inside]
    return tuple(sorted((span for span in found if span.share >= LEAST), key=lambda span: -span.share))


def _widened(store: KVStore, tokenizer: Any, start: int, end: int, low: int, high: int) -> tuple[int, int]:
    """Tokens `start:end` widened to whole sentences, or else lines, within `low:high` and `REACH`."""
    low, high = max(low, start - REACH), min(high, end + REACH)
    pieces = tokenizer.convert_ids_to_tokens(text_ids(store, tokenizer, low, high))
    before = _nearest(pieces, range(start - low, 0, -1))
    after = _nearest(pieces, range(end - low, high - low))
    return low if before is None else low + before, high if after is None else low + after


def text_ids(store: KVStore, tokenizer: Any, start: int, end: int) -> list[int]:
    """Tokens of the text. A store from elsewhere may hold any number in their place: `StoreDamaged`."""
    ids: list[int] = store.tokens[start:end].tolist()
    if not all(0 <= one < len(tokenizer) for one in ids):
        raise StoreDamaged(
            f"{store.path} holds tokens that its model does not have: restore a copy, or prefill again."
        )
    return ids


def _nearest(pieces: Sequence[str], places: range) -> int | None:
    """The first of `places` before which a sentence or a paragraph ends; else the first after a line."""

    def whole(at: int) -> bool:
        sentence = _SENTENCE.search(pieces[at - 1]) and _BLANK.match(pieces[at])
        return bool(sentence or _PARAGRAPH.search("".join(pieces[max(0, at - 2) : at])))

    def line(at: int) -> bool:
        return bool(_LINE.search(pieces[at - 1]))

    return next((at for ends in (whole, line) for at in places if ends(at)), None)
