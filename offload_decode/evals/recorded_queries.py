"""The queries that selectors are measured on, and putting them to a store as the engine would.

Live queries are those of a dense run, question and generated tokens: every selector is asked the very same,
in the order in which a model asks. They are caught on their way to the prefix: the engine's own code runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offload_decode.attention.index_queries import IndexQueries
from offload_decode.attention.pages_reference import page_tokens
from offload_decode.attention.queries import Queries, attend
from offload_decode.attention.rows import tensor_view
from offload_decode.common.errors import ConfigError
from offload_decode.engine.conversation import Conversation
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.hf.cache import CorpusCache
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import LoadedModel
from offload_decode.store.base import Store
from offload_decode.store.reader import KVStore
from offload_decode.types import AttentionState, PageSelection, Selection, StepStats

SAMPLE_SHARE = 0.1


@dataclass(frozen=True)
class Call:
    """What one layer asks of the stored prefix in one forward pass: `query [1, H, T, D]`, unscaled."""

    layer: int
    query: Tensor
    scaling: float
    softcap: float | None

    def queries(self, kv_heads: int) -> Queries:
        """The same in the selectors' form; the group's rows follow each other, tokens fastest."""
        _, heads, tokens, dim = self.query.shape
        rows = self.query.float().reshape(kv_heads, -1, dim)
        return Queries(rows, self.scaling, self.softcap, heads // kv_heads, tokens)


@dataclass(frozen=True)
class DenseRun:
    """A question answered with dense attention: its greedy `tokens [n]` (end tokens do not end it), the
    `logits [n, V]` that each was picked from, and every layer's calls in the engine's order.
    """

    question: str
    tokens: tuple[int, ...]
    logits: Tensor
    calls: tuple[Call, ...]


class Selections:
    """An `Observer` that keeps the rows that were asked for, and what was selected."""

    whole = False

    def __init__(self) -> None:
        self.seen: list[tuple[Queries, Selection | PageSelection]] = []

    def see(
        self,
        layer: int,
        rows: Tensor,
        queries: Queries,
        selection: Selection | PageSelection,
        state: AttentionState,
    ) -> None:
        self.seen.append((queries, selection))


FORCED = 256  # tokens whose logits are in memory at once


def alone(prefix: StoredPrefix) -> bool:
    """Whether each token is run by itself, as when it is generated: where those of a pass choose together, or
    are remembered, an earlier one would choose by a later one.
    """
    return prefix.chosen.one_question or prefix.chosen.selector.remembers


def forced_passes(conversation: Conversation, tokens: Sequence[int]) -> Iterator[Tensor]:
    """Runs tokens that are given, `alone` where need be: after each pass its logits `[t, V]`, one a token."""
    step = 1 if alone(conversation.prefix) else FORCED
    with conversation.step():
        for start in range(0, len(tokens), step):
            yield conversation.run(list(tokens[start : start + step]), every=True)


def run_dense(
    loaded: LoadedModel, store: KVStore, question: str, tokens: int, progress: Callable[[], None]
) -> DenseRun:
    """Answer with dense attention and keep what was asked; `progress` is called for each of the tokens.

    Raises `ConfigError` where the context has no room for so many.
    """
    prefix = AttentionDemand(StoredPrefix.over(HostKV(store, loaded.device), loaded.shape, "dense", {}))
    engine = Engine(loaded, store, prefix)
    logits = [engine.ask(question)]
    if (most := engine.most_new(tokens)) < tokens:
        raise ConfigError(
            f"{tokens:,} tokens do not fit behind store and question, where the context of this model ends "
            f"after {most:,}: take fewer"
        )
    progress()
    while len(logits) < tokens:
        logits.append(engine.extend([int(logits[-1].argmax())]))
        progress()
    picked = torch.stack(logits)
    calls = tuple(replace(call, query=call.query.detach().float()) for call, _ in prefix.calls)
    return DenseRun(question, tuple(picked.argmax(-1).tolist()), picked, calls)


def sampled_tokens(store: Store) -> npt.NDArray[np.int64]:
    """The tokens of `sampled_calls`: the samples `[tokens, G]`, one of each head of a group, that each
    is made of.

    At least one; none where the store keeps no query of some head.
    """
    heads, positions = store.query_heads, store.query_positions
    own = [np.flatnonzero(heads == head) for head in range(store.manifest.shape.group)]
    begin = (1 - SAMPLE_SHARE) * store.manifest.n_tokens
    late = min(int((positions[samples] >= begin).sum()) for samples in own)
    tokens = min(max(1, late), *map(len, own))
    return np.stack([samples[len(samples) - tokens :] for samples in own], axis=1)


def sampled_calls(host: HostKV, like: Sequence[Call]) -> tuple[Call, ...]:
    """The stored prefill queries of the last `SAMPLE_SHARE` of the positions: token by token, layer by layer.

    They are put to the whole store. A query of position p never saw the keys after it, so that only the last
    ones are near to what a decoding step asks: at most that share of the keys is younger. A store keeps one
    query head at a position: samples of each head of a group, near to each other, stand for one token. `like`
    gives the layers with their scaling.
    """
    shape = host.store.manifest.shape
    forms = {call.layer: call for call in like}
    stored = {
        layer: torch.stack([tensor_view(host.store.queries(layer, h)) for h in range(shape.kv_heads)])
        .to(host.device)
        .float()
        for layer in forms
    }
    return tuple(
        replace(form, query=stored[layer][:, torch.from_numpy(token)].reshape(1, -1, 1, shape.head_dim))
        for token in sampled_tokens(host.store)
        for layer, form in forms.items()
    )


def replay(
    prefix: StoredPrefix, calls: Iterable[Call]
) -> Iterator[tuple[Call, Tensor | None, Tensor, StepStats]]:
    """Put calls to a selector through `StoredPrefix.attend`, as one conversation that begins here: every call
    with the ids `[Hkv, R, k]` that were chosen (None for every token), the attention `[Hkv, R, D]` of the
    stored part, and what it cost.
    """
    prefix.selector.reset()
    watch = Selections()
    asked = StoredPrefix(prefix.host, prefix.chosen, prefix.tail)
    asked.watches = (watch,)
    for call in calls:
        state = asked.attend(call.layer, call.query, call.scaling, call.softcap)
        selections = [selected_ids(selection, rows, asked.length) for rows, selection in watch.seen]
        watch.seen.clear()
        out = state.out.reshape(prefix.selector.shape.kv_heads, -1, state.out.shape[-1])
        yield call, _joined(selections), out, asked.take_stats()


def selected_ids(selection: Selection | PageSelection, queries: Queries, n_tokens: int) -> Tensor | None:
    """The tokens `[Hkv, R, k]` that each row attends to, padded with -1; None is everything."""
    if isinstance(selection, Selection):
        return selection.ids
    ids = page_tokens(selection.pages, selection.page_size, n_tokens, selection.limit)
    return queries.by_query(ids.unsqueeze(2)) if selection.shared else ids


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts of the rows together; a long question is taken in parts."""
    ids = [part for part in parts if part is not None]
    if len(ids) < len(parts):
        assert not ids, "a layer is dense for all rows or for none"
        return None
    width = max(part.shape[2] for part in ids)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[2]), value=-1) for part in ids]
    return torch.cat(padded, dim=1)


class AttentionDemand(StoredPrefix):
    """A prefix like another, of one conversation that begins, which keeps what it is asked and answers.

    `calls`: since `take` was last called, every call with the log-sum-exp `[1, H, T]` of the stored tokens.
    """

    def __init__(self, like: StoredPrefix):
        super().__init__(like.host, like.chosen, like.tail)
        self.by_token = False  # what `begin` finishes is kept
        self.calls: list[tuple[Call, Tensor]] = []
        # Of the generated tokens, by layer, when what was taken last had been asked.
        self._ends: dict[int, int] = {}

    def begin(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        softcap: float | None,
        index: IndexQueries | None = None,
    ) -> Callable[[], AttentionState]:
        finish = super().begin(layer, query, scaling, softcap, index)

        def finished() -> AttentionState:
            state = finish()
            self.calls.append((Call(layer, query, scaling, softcap), state.lse))
            return state

        return finished

    def take(self, cache: CorpusCache) -> list[tuple[Call, Tensor]]:
        """The calls since this was last called, in their order, each with the share `[H, T]` (float64, on the
        CPU) of its attention that goes to the tokens behind the stored ones; `cache` is the conversation's.
        """
        generated = {layer.index: layer.generated for layer in cache.generated_layers}
        passes = []
        for call, stored in self.calls:
            keys, _ = generated[call.layer].view()
            start, asking = self._ends.get(call.layer, 0), call.query.shape[2]
            end = self._ends[call.layer] = start + asking
            seen = torch.ones(asking, end, dtype=torch.bool, device=keys.device).tril(start)
            keys = keys[:, :, :end]
            own = attend(call.query, keys, keys[..., :1], call.scaling, seen[None, None], call.softcap)
            share = torch.sigmoid(own.lse.double() - stored.to(own.lse.device).double())
            passes.append((call, share[0].cpu()))
        self.calls.clear()
        return passes
