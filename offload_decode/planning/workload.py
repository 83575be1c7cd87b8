"""What is to be planned: a number of tokens and the settings that sizes follow from, and how many bytes it
takes to ask such a store.
"""

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, Self

from offload_decode.attention import dense, host_dense
from offload_decode.attention.host_tokens import ENTRIES
from offload_decode.attention.transfers import power_of_two
from offload_decode.common.errors import ConfigError
from offload_decode.config import AUTO, FULL, STREAMED
from offload_decode.indexes import registry
from offload_decode.kv.host_cache import BLOCK_TOKENS, SCORES
from offload_decode.kv.indexes import DEFAULT
from offload_decode.models.size_estimate import SizeEstimate
from offload_decode.planning.sizes import (
    generated_bytes,
    itemsize,
    layer_bytes,
    mask_bytes,
    pair_dim,
    row_bytes,
)
from offload_decode.selectors import unselected
from offload_decode.selectors.budgets import PASS_TOKENS, SELECTED_IDS, Budget, ErrorBound, pass_tokens
from offload_decode.selectors.error_bound import RUNGS, rungs_of
from offload_decode.store.format import KV_KINDS
from offload_decode.types import PAGE_METADATA, ModelShape

KV = tuple(KV_KINDS)
WEIGHTS = ("auto", FULL, "fp16", "int8", "int4")
OWN = "own"
SELECTORS = (AUTO, "topk", "quest", "dense", OWN)
QUESTION_TOKENS = PASS_TOKENS  # a question and its answer are planned with twice as many in all


@dataclass(frozen=True)
class Workload:
    """A store of `tokens` and how it is to be asked.

    `kv`: how keys and values are stored, `auto` in the model's dtype. `weights`: `auto` is the checkpoint's
    dtype. `selector` (`auto`: what that is for the model) with `budget` or `error` (topk), `dense_layers`
    (None: the selector's own), `tail`, `index` (topk), `page_size` and `metadata` (quest). `clusters`: they
    are built, even if another index is searched. `streamed`: a prefill has its weights come to a GPU layer by
    layer, in the model's dtype whatever `weights` are asked with. `chunk`: tokens of its forward pass;
    `chunk_chosen`: those that fit, which `plan` finds. `generated`: tokens of question and answer, in each of
    `batch` conversations at once, of whose questions a forward pass takes `pass_tokens`. `device_cache`:
    bytes of a GPU that keep stored rows.
    """

    tokens: int
    kv: str = "auto"
    weights: str = "auto"
    selector: str = "topk"
    budget: str = "1024"
    error: str = ""
    dense_layers: str | None = None
    tail: str = AUTO
    index: str = DEFAULT
    clusters: bool = False
    page_size: int = 16
    metadata: str = "fp16"
    streamed: bool = False
    chunk: int = 512
    chunk_chosen: bool = False
    generated: int = 2 * QUESTION_TOKENS
    batch: int = 1
    pass_tokens: int = PASS_TOKENS
    device_cache: int = 0

    def __post_init__(self) -> None:
        for what, given, known in (
            ("kv", self.kv, KV),
            ("weights", self.weights, WEIGHTS),
            ("selector", self.selector, SELECTORS),
            ("index", self.index, registry.kinds()),
            ("metadata", self.metadata, PAGE_METADATA),
        ):
            if given not in known:
                raise ConfigError(f"{what} '{given}' cannot be planned; choose one of: {', '.join(known)}")
        if self.error:
            ErrorBound.parse(self.error)
        unselected.parse(self.tail)
        for what, number in (("tokens", self.tokens), ("page_size", self.page_size), ("chunk", self.chunk)):
            if number < 1:
                raise ConfigError(f"{what} must be 1 or more, not {number}")

    @property
    def estimated(self) -> bool:
        """Whether what is not selected is, by what may have to be made in memory."""
        return unselected.parse(self.tail)[0] not in (unselected.OFF, AUTO)

    @property
    def question(self) -> int:
        """Tokens of questions that run together: of all but room for an answer, those of a pass."""
        wanted = self.batch * max(1, self.generated - QUESTION_TOKENS)
        return min(wanted, self.batch * pass_tokens(self.pass_tokens, self.batch))

    def resolved(self, shape: ModelShape) -> Self:
        """With the selector that `auto` is for a model. Raises `ConfigError` for `own` where it has none."""
        if self.selector == OWN and shape.index is None:
            raise ConfigError("selector 'own' needs a model with an indexer of its own: choose another")
        chosen = "topk" if shape.index is None else OWN
        return replace(self, selector=chosen) if self.selector == AUTO else self

    def budgets(self, shape: ModelShape) -> dict[int, int | None]:
        """Tokens for each query of every searched layer; None is all of them."""
        if self.selector == "dense":
            return dict.fromkeys(shape.full_layers)
        if self.selector == OWN and shape.index is not None:
            return dict.fromkeys(
                shape.full_layers, shape.index.topk if shape.index.topk < self.tokens else None
            )
        own = "first:2" if self.selector == "quest" else ""
        amount = str(RUNGS[-1].best) if self.error else self.budget
        budget = Budget(amount, dense_layers=own if self.dense_layers is None else self.dense_layers)
        found = budget.per_layer(self.tokens, shape.full_layers, shape.kv_heads)
        counts = {layer: self.tokens if own is None else own.largest for layer, own in found.items()}
        return {layer: count if count < self.tokens else None for layer, count in counts.items()}

    def largest(self, shape: ModelShape) -> int:
        """The most tokens that a query chooses; 0 where all layers are dense."""
        return max((k for k in self.budgets(shape).values() if k is not None), default=0)

    def searched(self, shape: ModelShape) -> int:
        """Queries of a KV head that are searched for together."""
        held = SELECTED_IDS // (self.largest(shape) * shape.kv_heads)
        return min(shape.group * self.question, max(shape.group, held))

    def fetched(self, shape: ModelShape) -> tuple[int, int]:
        """Queries that fetch together for a GPU, and the most tokens that they name."""
        each = isqrt(SCORES // self.largest(shape))
        rows = min(max(1, SCORES // self.tokens, each), self.searched(shape))
        return rows, min(self.tokens, rows * self.largest(shape))


def weights_given(weights: str) -> dict[str, Any]:
    """What `--weights` of a prefill says of a `Workload`. Raises `ConfigError`."""
    if weights not in (*WEIGHTS, STREAMED):
        known = ", ".join((*WEIGHTS, STREAMED))
        raise ConfigError(f"weights '{weights}' cannot be planned; choose one of: {known}")
    return {"weights": "auto", "streamed": True} if weights == STREAMED else {"weights": weights}


def in_dtype(estimate: SizeEstimate, weights: str) -> SizeEstimate:
    """The estimate with the dtype that the model will run in: `fp16` halves float32."""
    halved = weights == "fp16" and estimate.dtype == "float32"
    return replace(estimate, dtype="float16") if halved else estimate


_PAGE_SCORES = 1 << 24  # of Quest, in memory at once


def ask_bytes(estimate: SizeEstimate, request: Workload, on_gpu: bool) -> int:
    """Beyond weights and pages, on the device: generated KV, and what a question needs in a layer."""
    shape, n = estimate.shape, request.tokens
    question, largest = request.question, request.largest(shape)
    total = request.batch * generated_bytes(shape, request.generated, estimate.dtype) + layer_bytes(
        estimate, question
    )
    total += mask_bytes(question, request.generated)
    # The layer that attends widens its part of it. Of latents a model makes keys and values for every
    # query head, which have no more numbers than a latent.
    attended = (shape.query_heads if shape.latent else shape.kv_heads) * pair_dim(shape)
    total += request.batch * 4 * attended * request.generated
    fetched = block = 0
    if largest and request.selector == "quest":
        fetched = 8 * min(_PAGE_SCORES, shape.kv_heads * question * (n // request.page_size))
        if on_gpu:
            fetched += shape.kv_heads * largest * pair_dim(shape) * (4 + itemsize(estimate.dtype))
    elif largest and on_gpu:
        fetched = _copied_bytes(estimate, request)
    if None in request.budgets(shape).values():
        rows = shape.group * question
        if on_gpu:
            length = min(BLOCK_TOKENS, n)
            block = length * pair_dim(shape) * (4 + itemsize(estimate.dtype))
            block += 4 * 4 * min(rows * length, dense.DEVICE_SCORES)
        else:
            block = host_dense.state_bytes(n, shape.kv_heads, rows, shape.value_dim)
    return total + max(fetched, block)


def search_bytes(estimate: SizeEstimate, request: Workload, threads: int) -> int:
    """On the host, while a question is searched for: ids and scores, which are held twice when the heads are
    joined, else beside the candidates of the search or the pairs of a query and a token that are attended to.
    """
    shape, k = estimate.shape, request.largest(estimate.shape)
    if request.selector != "topk" or not k:
        return 0
    rows = request.searched(shape)
    ids = 12 * shape.kv_heads * rows * k
    pairs = 20 * min(max(ENTRIES, k), rows * k) + request.tokens // 8  # and a bit for each token
    searching = registry.stated(request.index).search_bytes(request.tokens, k, shape.kv_heads, rows)
    # Copies of what is drawn where an error is bounded.
    drawn = sum(rung.drawn for rung in rungs_of(request.tokens)) if request.error else 0
    layers = sum(k is not None for k in request.budgets(shape).values())
    copied = drawn * layers * shape.kv_heads * sum(row_bytes(shape, request.kv, estimate.dtype))
    return ids + max(ids, threads * pairs, searching) + copied


def unselected_bytes(estimate: SizeEstimate, request: Workload) -> int:
    """In memory, for the tokens that are not selected: what their estimate keeps of every searched layer, and
    takes while it is made for the queries that are searched for together.
    """
    shape, n, k = estimate.shape, request.tokens, request.largest(estimate.shape)
    if not k or not request.estimated:
        return 0
    layers = sum(own is not None for own in request.budgets(shape).values())
    # Of the selectors topk alone has them in the index already.
    built = request.clusters or (request.selector == "topk" and request.index == DEFAULT)
    rows = request.searched(shape)
    kept = unselected.held_bytes(request.tail, n, shape.head_dim, built)
    stored = sum(row_bytes(shape, request.kv, estimate.dtype))
    dims = shape.head_dim, shape.value_dim
    takes = unselected.working_bytes(request.tail, n, dims, stored, rows, k)
    if request.selector == "quest":
        takes += 3 * 8 * shape.kv_heads * rows * k  # pages become lists of tokens
    return layers * shape.kv_heads * kept + takes


def staged_bytes(estimate: SizeEstimate, request: Workload) -> int:
    """On the host of a GPU: two buffers for values on their way there, and the bookkeeping of its cache."""
    shape = estimate.shape
    if request.selector != "topk" or not request.largest(shape):
        return 0
    key, value = row_bytes(shape, request.kv, estimate.dtype)
    _, union = request.fetched(shape)
    kept = request.device_cache // max(key, value)
    # A kept row has its number and two neighbours, in a table that is at most half full.
    return 2 * power_of_two(shape.kv_heads * union * value) + 16 * kept + 4 * power_of_two(2 * kept)


def _copied_bytes(estimate: SizeEstimate, request: Workload) -> int:
    """On a GPU: the values that some queries share, as they are stored and as floats, and their scores."""
    shape = estimate.shape
    rows, union = request.fetched(shape)
    _, value = row_bytes(shape, request.kv, estimate.dtype)
    stored = value * (2 if request.device_cache else 1)  # what is kept is copied once more
    # Floats at most three times: of the queries before, of codes, and of codes and their scales.
    floats = 3 * 4 * shape.value_dim
    # Seven tensors from scores to weights, and of each selected token its place.
    places = 8 * rows * request.largest(shape)
    return shape.kv_heads * (union * (stored + floats) + places) + 7 * 4 * rows * union
