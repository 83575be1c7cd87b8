"""What is to be planned: a model, a number of tokens, and the settings that sizes follow from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from offload_decode.config import STREAMED
from offload_decode.errors import ConfigError
from offload_decode.indexes import registry
from offload_decode.models.outline import Outline
from offload_decode.selection.budgets import PASS_TOKENS, Budget
from offload_decode.store.format import KV_KINDS
from offload_decode.types import PAGE_METADATA, ModelShape

KV = tuple(KV_KINDS)
WEIGHTS = ("auto", "fp16", "int8", "int4")
SELECTORS = ("topk", "quest", "dense")
QUESTION_TOKENS = PASS_TOKENS  # a question and its answer are planned with twice as many in all


@dataclass(frozen=True)
class Workload:
    """A store of `tokens` and how it is to be asked.

    `kv`: how keys and values are stored, `auto` in the model's dtype. `weights`: `auto` is the checkpoint's
    dtype. `selector` with `budget`, `dense_layers` (None: the selector's own), `index` (topk), `page_size`
    and `metadata` (quest). `streamed`: a prefill has its weights come to a GPU layer by layer, in the model's
    dtype whatever `weights` are asked with. `chunk`: tokens of its forward pass; `chunk_chosen`: those that
    fit, which `plan` finds. `tail`: tokens of question and answer, in each of `batch` conversations at once,
    of whose questions a forward pass takes `pass_tokens`. `device_cache`: bytes of a GPU that keep stored
    rows.
    """

    tokens: int
    kv: str = "auto"
    weights: str = "auto"
    selector: str = "topk"
    budget: str = "1024"
    dense_layers: str | None = None
    index: str = "clusters"
    page_size: int = 16
    metadata: str = "fp16"
    streamed: bool = False
    chunk: int = 512
    chunk_chosen: bool = False
    tail: int = 2 * QUESTION_TOKENS
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
        for what, number in (("tokens", self.tokens), ("page_size", self.page_size), ("chunk", self.chunk)):
            if number < 1:
                raise ConfigError(f"{what} must be 1 or more, not {number}")

    def budgets(self, shape: ModelShape) -> dict[int, int | None]:
        """Tokens for each query row of every searched layer; None is all of them."""
        if self.selector == "dense":
            return dict.fromkeys(shape.full_layers)
        own = "first:2" if self.selector == "quest" else ""
        dense = own if self.dense_layers is None else self.dense_layers
        layers = Budget(self.budget, dense_layers=dense).per_layer(
            self.tokens, shape.full_layers, shape.kv_heads
        )
        return {
            layer: None if budget is None or budget.largest >= self.tokens else budget.largest
            for layer, budget in layers.items()
        }


def weights_given(weights: str) -> dict[str, Any]:
    """What `--weights` of a prefill says of a `Workload`. Raises `ConfigError`."""
    if weights not in (*WEIGHTS, STREAMED):
        known = ", ".join((*WEIGHTS, STREAMED))
        raise ConfigError(f"weights '{weights}' cannot be planned; choose one of: {known}")
    return {"weights": "auto", "streamed": True} if weights == STREAMED else {"weights": weights}


def in_dtype(outline: Outline, weights: str) -> Outline:
    """The outline with the dtype that the model will run in: `fp16` halves float32."""
    halved = weights == "fp16" and outline.dtype == "float32"
    return replace(outline, dtype="float16") if halved else outline
