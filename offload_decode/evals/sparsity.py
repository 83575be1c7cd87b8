"""How sparse dense attention is as it answers, beside the scores of answers from few tokens.

docs/evaluation.md says what the records hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload_decode.engine.engine import Engine
from offload_decode.evals.answering import Answering, AnswerPlace
from offload_decode.evals.concentration import SHARES, Concentration, concentration
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.haystack import Strand
from offload_decode.evals.heard import Heard
from offload_decode.evals.live_queries import Call
from offload_decode.evals.results import Record
from offload_decode.evals.tasks import Question
from offload_decode.store.reader import KVStore

SPARSITY = "sparsity"
ASKING, ANSWERING = "question", "answer"
DECIMALS = 5


@dataclass(frozen=True)
class LayerAttention:
    """One layer's queries as a question was answered, and the share `[H, T]` of the attention of each that
    goes to stored tokens; from token `answers` on, an answer token is predicted from each.
    """

    call: Call
    stored_share: Tensor
    answers: int


class Sparsity(Answering):
    """`Answering`, with a record for each layer of what dense attention looked like."""

    def answers(
        self,
        place: AnswerPlace,
        strand: Strand,
        store: KVStore,
        way: Contender,
        questions: Sequence[tuple[int, Question]],
        control: bool,
    ) -> Iterator[Record]:
        """As `Answering.answers`."""
        yield from super().answers(place, strand, store, way, questions, control)
        if way.label != DENSE or control:
            return
        engine = Engine.open(store, self.loaded, selector=DENSE)
        for number, question in questions:
            begun = question.answer_prefix if self.plan.begins else ""
            about = {
                "record": SPARSITY,
                "question": number,
                "task": place.task.name,
                "length": place.length,
                "seed": place.seed,
                "stored_tokens": store.manifest.n_tokens,
            }
            most = place.task.most_tokens(question, strand)
            for layer in listen(engine, question.text, most, begun):
                yield from _records(engine, layer, about)


def listen(engine: Engine, question: str, max_new_tokens: int, begun: str = "") -> list[LayerAttention]:
    """What every searched layer asks as `engine` answers greedily, as its own conversation stays as it is."""
    prefix = Heard(engine.prefix.fresh())
    asked = Engine(engine.loaded, engine.store, prefix)
    logits = asked.ask(question, begun)
    answers = asked.cache.tail_length - 1
    for _ in asked.generate(logits, max_new_tokens):
        pass
    passes = prefix.take(asked.cache)
    found = []
    for layer in dict.fromkeys(one.call.layer for one in passes):
        own = [one for one in passes if one.call.layer == layer]
        first = own[0].call
        query = torch.cat([one.call.query for one in own], dim=2)
        share = 1 - torch.cat([one.tail_share for one in own], dim=1)
        call = Call(layer, query, first.scaling, first.softcap)
        found.append(LayerAttention(call, share, answers))
    return found


def _records(engine: Engine, layer: LayerAttention, about: Mapping[str, Any]) -> Iterator[Record]:
    """One for each part of the conversation that has tokens."""
    host, call = engine.prefix.host, layer.call
    _, heads, tokens, _ = call.query.shape
    found = concentration(host, call.layer, call.queries(engine.loaded.shape.kv_heads))
    by_head = Concentration(
        found.entropy.reshape(heads, tokens), found.keys.reshape(len(SHARES), heads, tokens)
    )
    parts = {ASKING: slice(0, layer.answers), ANSWERING: slice(layer.answers, tokens)}
    for part, rows in parts.items():
        if rows.stop == rows.start:
            continue
        yield {
            **about,
            "part": part,
            "layer": call.layer,
            "rows": rows.stop - rows.start,
            "stored_share": _rounded(layer.stored_share[:, rows].mean(-1)),
            "entropy": _spread(by_head.entropy[:, rows]),
            "keys": {
                f"{100 * share:.0f}": _spread(keys[:, rows].double())
                for share, keys in zip(SHARES, by_head.keys, strict=True)
            },
        }


def _spread(values: Tensor) -> dict[str, list[float]]:
    """Of `[H, T]`, over the tokens."""
    middle, late = torch.quantile(values, torch.tensor([0.5, 0.95], dtype=values.dtype), dim=-1)
    return {"mean": _rounded(values.mean(-1)), "median": _rounded(middle), "p95": _rounded(late)}


def _rounded(values: Tensor) -> list[float]:
    return [round(value, DECIMALS) for value in values.tolist()]
