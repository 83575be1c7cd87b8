"""Selectors, indexes and prefill methods that each break one promise: the module of a distribution."""

import copy

import numpy as np
import torch

from offload_decode.indexes.base import Costs, Hits
from offload_decode.indexes.flat import FlatIndex
from offload_decode.prefill_jobs.methods.base import Sparse
from offload_decode.selectors.base import Selector
from offload_decode.types import Selection


class First(Selector):
    """The first k tokens: nothing is wrong with it."""

    name, paper, reads, holds = "first", "none", "nothing", "nothing"

    def choose(self, layer, queries, k):
        return Selection(self.ids(k).expand(*queries.vectors.shape[:2], -1))

    def ids(self, k):
        return torch.arange(k)


def derived(base, name, **changed):
    return type(name, (base,), {"name": name, "__module__": __name__, **changed})


def selector(name, ids):
    """The first k tokens, but these."""
    return derived(First, name, ids=ids)


TooMany = selector("too-many", lambda self, k: torch.arange(min(k + 1, self.host.length)))
TooFew = selector("too-few", lambda self, k: torch.arange(k // 2))
Repeats = selector("repeats", lambda self, k: torch.arange(k) // 2)
Beyond = selector("beyond", lambda self, k: torch.arange(k) + self.host.length - k + 1)
Below = selector("below", lambda self, k: torch.arange(k) - 2)
LeavesOneOut = selector("leaves-one-out", lambda self, k: torch.arange(min(k, self.host.length - 1)))
Drawn = selector("drawn", lambda self, k: torch.randperm(self.host.length)[:k])


class MadeUpScores(First):
    name = "made-up-scores"

    def choose(self, layer, queries, k):
        chosen = super().choose(layer, queries, k)
        return Selection(chosen.ids, torch.zeros(chosen.ids.shape))


class Turns(First):
    """Moves on by a token in every step."""

    name = "turns"
    one_question = True

    def __init__(self, *given):
        super().__init__(*given)
        self.steps = 0

    def ids(self, k):
        self.steps += 1
        return (torch.arange(k) + self.steps) % self.host.length

    def reset(self):
        self.steps = 0

    def fork(self):
        return copy.copy(self)


class ReadsTheDevice(First):
    """On a host nothing is wrong with it."""

    name = "reads-the-device"

    def choose(self, layer, queries, k):
        queries.vectors.numpy()
        return super().choose(layer, queries, k)


class ForgetsFork(Turns):
    name = "forgets-fork"

    def fork(self):
        forked = copy.copy(self)
        forked.reset()
        return forked


NeverResets = derived(Turns, "never-resets", reset=lambda self: None)
SharesFork = derived(Turns, "shares-fork", fork=lambda self: self)


class ChoosesTogether(First):
    """Says that a row chooses by itself."""

    name = "chooses-together"

    def choose(self, layer, queries, k):
        last = int(queries.vectors.sum(1).abs().sum() * 1000) % self.host.length
        return Selection(((torch.arange(k) + last) % self.host.length).expand(*queries.vectors.shape[:2], -1))


def index(name, changed):
    """A flat index that tells other ids than it found."""

    def search(self, queries, k):
        hits = FlatIndex._search(self, queries, k)
        return Hits(changed(self, hits.ids), hits.scores)

    return derived(FlatIndex, name, _search=search)


IndexRepeats = index("repeats", lambda _, ids: np.where(np.arange(ids.shape[1]) == 1, ids[:, :1], ids))
IndexBeyond = index("beyond", lambda _, ids: ids + 1)
IndexNotAll = index("not-all", lambda self, ids: np.where(ids == len(self) - 1, -1, ids))


class IndexEstimates(FlatIndex):
    """Says that its estimates are exact."""

    name = "estimates"

    def _search(self, queries, k):
        hits = super()._search(queries, k)
        return Hits(hits.ids, hits.scores * np.float32(1.001))


class IndexGuesses(FlatIndex):
    """The first k keys, with their scores in order."""

    name = "guesses"

    def _search(self, queries, k):
        scores = queries @ np.asarray(self.keys[:k], np.float32).T
        order = np.argsort(-scores, axis=1)
        return Hits(order.astype(np.int64), np.take_along_axis(scores, order, axis=1))


class IndexDrawn(FlatIndex):
    """A search that is not the same twice."""

    name = "drawn"

    def _search(self, queries, k):
        hits = super()._search(queries, k)
        if k == len(self):
            return hits
        every = np.tile(np.arange(len(self)), (len(queries), 1))
        return Hits(np.random.default_rng().permuted(every, axis=1)[:, :k], hits.scores)


class IndexTrusts(FlatIndex):
    """Whatever lies there is its own."""

    name = "trusts"

    @classmethod
    def load(cls, path, keys, *, digest=None):
        return cls(keys, digest or "")


class IndexBoasts(FlatIndex):
    """States other bytes than it takes."""

    name = "boasts"

    @classmethod
    def costs(cls, n, dim, dtype, k, rows=1):
        return Costs(memory=0, file=10 * n, read=0)


class WrongMethod(Sparse):
    paper = "none"

    def choose(self, layer, queries, earlier, k):
        return self.ids(earlier.length, k).expand(self.shape.kv_heads, -1)


def method(name, ids):
    return derived(WrongMethod, name, ids=staticmethod(ids))


MethodRepeats = method("repeats", lambda length, k: torch.zeros(k, dtype=torch.int64))
MethodBeyond = method("beyond", lambda length, k: torch.arange(k) + length)
MethodTooMany = method("too-many", lambda length, k: torch.arange(min(k + 1, length)))
MethodDrawn = method("drawn", lambda length, k: torch.randperm(length)[:k])


class MethodRemembers(WrongMethod):
    """Goes by the chunks that it has seen, of which one that resumes has seen none."""

    name = "remembers"

    def ids(self, length, k):
        self.seen = getattr(self, "seen", 0) + 1
        return (torch.arange(k) + self.seen) % length


class MethodLeavesOneOut(WrongMethod):
    """Even where everything is asked for."""

    name = "leaves-one-out"

    def select(self, layer, queries, earlier):
        k = min(self._budget(earlier.length)[layer], earlier.length - 1)
        return torch.arange(max(0, k)).expand(2, -1)

    def ids(self, length, k):
        raise NotImplementedError
