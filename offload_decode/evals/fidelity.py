"""How close selectors come to exact attention, all with the same budget in tokens.

Three questions, each answered by the engine's own path (`StoredPrefix.attend`, `Engine.extend`): how near is
the attention of the stored prefill queries, how near is that of live decode queries, and how near are the
next tokens' probabilities to those of dense attention. `evals.closeness` has the reference.
"""

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_decode.common.errors import ConfigError, OffloadDecodeError
from offload_decode.config import parse_options
from offload_decode.engine.engine import Engine
from offload_decode.engine.step import StoredPrefix
from offload_decode.evals import recorded_queries as recorded
from offload_decode.evals.closeness import MEASURES, Exact, Fidelity, summarize
from offload_decode.evals.contender import DENSE, Contender
from offload_decode.evals.runs import grouped, now
from offload_decode.kv.host_cache import HostKV
from offload_decode.models.loading import LoadedModel
from offload_decode.models.made_with import made_with
from offload_decode.selectors.base import SelectorOptions
from offload_decode.store.reader import KVStore
from offload_decode.types import StepStats


@dataclass(frozen=True)
class Agreement:
    """Over so many generated tokens: KL(dense ‖ selector) in nats, how often the first choice agrees, and how
    many nats more the dense answer's tokens take, a token.
    """

    tokens: int
    kl_mean: float
    kl_p95: float
    kl_max: float
    top1: float
    nats: float


def forced(engine: Engine, run: recorded.DenseRun, progress: Callable[[], None]) -> Tensor:
    """Logits `[n, V]` of an engine that is given a dense run's tokens, whatever it would say."""
    logits = [engine.ask(run.question)[None]]
    progress()
    for more in recorded.forced_passes(engine, run.tokens[:-1]):
        logits.append(more)
        for _ in more:
            progress()
    return torch.cat(logits)


def divergence(dense: Tensor, other: Tensor) -> Tensor:
    """KL(dense ‖ other) in nats, float64 `[n]`, of logits `[n, V]`."""
    expected, given = (torch.log_softmax(logits.double(), dim=-1) for logits in (dense, other))
    # A token that dense attention rules out (-inf) adds nothing.
    terms = torch.where(torch.isneginf(expected), 0.0, expected.exp() * (expected - given))
    return terms.sum(-1).clamp(min=0.0)


def agreement(pairs: Sequence[tuple[Tensor, Tensor]]) -> Agreement:
    """Over the logits `(dense, other)` of all runs."""
    divergences = torch.cat([divergence(dense, other) for dense, other in pairs]).cpu().numpy()
    same = torch.cat([dense.argmax(-1) == other.argmax(-1) for dense, other in pairs])
    more = torch.cat([_likeliest(dense, dense) - _likeliest(dense, other) for dense, other in pairs])
    return Agreement(
        tokens=len(same),
        kl_mean=float(divergences.mean()),
        kl_p95=float(np.percentile(divergences, 95)),
        kl_max=float(divergences.max()),
        top1=float(same.double().mean()),
        nats=float(more.mean()),
    )


def _likeliest(dense: Tensor, logits: Tensor) -> Tensor:
    """Log-probabilities, float64 `[n]`, that `logits [n, V]` give what is likeliest by `dense`."""
    picked = dense.argmax(-1, keepdim=True)
    return torch.log_softmax(logits.double(), dim=-1).gather(-1, picked)[:, 0]


@dataclass(frozen=True)
class FidelityPlan:
    """What is measured: every contender at every budget (a count or a share), with the options that all have
    in common, on `tokens` generated tokens for each question.
    """

    contenders: tuple[Contender, ...]
    budgets: tuple[str, ...]
    questions: tuple[str, ...]
    tokens: int = 64
    common: Mapping[str, str] = field(default_factory=dict)

    @property
    def jobs(self) -> list[tuple[Contender, str]]:
        """Every contender with every budget, or with all tokens where it has no budget or one of its own."""
        return [
            (contender, budget)
            for contender in self.contenders
            for budget in ((EVERYTHING,) if _has_own(contender) else self.budgets)
        ]


@dataclass(frozen=True)
class Entry:
    """One contender at one budget.

    `attended` stored tokens a query of a searched layer and `bytes_moved` to the device a token, over all
    layers: both measured on the live decode steps. `stored` is None where the store keeps too few queries.
    """

    label: str
    selector: str
    options: dict[str, str]
    budget: str
    budget_tokens: float
    attended: float
    bytes_moved: float
    stored: Fidelity | None
    live: Fidelity
    agreement: Agreement


@dataclass(frozen=True)
class Failure:
    """A contender that could not be measured to the end at a budget, and why."""

    label: str
    budget: str
    error: str


@dataclass(frozen=True)
class FidelityReport:
    """The configuration, the entries in the plan's order, budget by budget, and what failed."""

    configuration: dict[str, Any]
    entries: tuple[Entry, ...]
    failures: tuple[Failure, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


CONTROLS = ("random", "streaming")
EVERYTHING = "100%"
# What can befall one selector and leaves the others' results true; anything else is a mistake in the code.
FAILURES = (OffloadDecodeError, MemoryError, torch.OutOfMemoryError)


def measure(
    loaded: LoadedModel,
    store: KVStore,
    plan: FidelityPlan,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FidelityReport:
    """Measure a plan; `progress` counts tokens, generated, put to a selector, or forced through the engine.

    Raises `ConfigError` before anything is measured where a contender cannot run with its options. One that
    fails later loses its own entry alone: it is in the report's `failures`.
    """
    budgets = check(store, plan)
    host = HostKV(store, loaded.device)
    jobs = plan.jobs
    asked = plan.tokens * len(plan.questions)
    total = 2 * asked + len(jobs) * (2 * asked + len(recorded.sampled_tokens(store)))
    counted = itertools.count(1)

    def step() -> None:
        progress(next(counted), total)

    runs = [recorded.run_dense(loaded, store, question, plan.tokens, step) for question in plan.questions]
    # A pass of many tokens rounds otherwise than one token does: selectors are compared with their like, and
    # dense attention in passes with that of one token, which shows what the rounding alone makes.
    dense = StoredPrefix.over(host, loaded.shape, DENSE, {})
    together = [forced(Engine(loaded, store, dense), run, step) for run in runs]
    ks = {k for per_layer in budgets.values() for k in per_layer.values() if k is not None}
    live = Source(host, [run.calls for run in runs], ks)
    stored = Source(host, [recorded.sampled_calls(host, runs[0].calls)], ks)

    entries, failures = [], []
    for contender, budget in jobs:
        per_layer = budgets[DENSE if _has_own(contender) else budget]
        amounts = [k for k in per_layer.values() if k is not None]
        try:
            prefix = _create(host, plan, contender, budget)
            sampled, _, _ = stored.judge(prefix, per_layer, step)
            decoded, searched, whole = live.judge(prefix, per_layer, step)
            assert decoded is not None, "a dense run has calls"
            one_by_one = recorded.alone(prefix) or contender.selector == DENSE
            expected = [run.logits for run in runs] if one_by_one else together
            given = [forced(Engine(loaded, store, prefix), run, step) for run in runs]
            agreed = agreement(list(zip(expected, given, strict=True)))
        except FAILURES as error:
            failures.append(Failure(contender.label, budget, " ".join(str(error).split())))
            continue
        entries.append(
            Entry(
                label=contender.label,
                selector=contender.selector,
                options=dict(contender.options),
                budget=budget,
                budget_tokens=sum(amounts) / len(amounts),
                attended=searched.selected / searched.rows,
                bytes_moved=whole.bytes_moved / sum(len(run.tokens) - 1 for run in runs),
                stored=sampled,
                live=decoded,
                agreement=agreed,
            )
        )
    entries.sort(key=lambda entry: (EVERYTHING, *plan.budgets).index(entry.budget))
    configuration = {
        "store": str(store.path),
        "store_digest": store.store_digest,
        "stored_tokens": store.manifest.n_tokens,
        "searched_layers": list(loaded.shape.full_layers),
        "query_heads": loaded.shape.query_heads,
        "kv_heads": loaded.shape.kv_heads,
        **made_with(loaded),
        **asdict(plan),
        "sampled_query_tokens": stored.tokens,
        "sample_share": recorded.SAMPLE_SHARE,
        "live_query_tokens": live.tokens,
        "date": now(),
    }
    return FidelityReport(configuration, tuple(entries), tuple(failures))


class Source:
    """Conversations of calls, and the exact attention of all their rows."""

    def __init__(self, host: HostKV, conversations: Sequence[Sequence[recorded.Call]], ks: Collection[int]):
        self.host = host
        self.conversations = [calls for calls in conversations if calls]
        kv_heads = host.store.manifest.shape.kv_heads
        by_layer = grouped(itertools.chain.from_iterable(self.conversations), lambda call: call.layer)
        self.tokens = sum(call.query.shape[2] for call in next(iter(by_layer.values()), []))
        self.exact = {}
        for layer, calls in by_layer.items():
            queries = [call.queries(kv_heads) for call in calls]
            rows = torch.cat([one.vectors for one in queries], dim=1)
            # Each row stands for itself.
            self.exact[layer] = Exact(host, layer, replace(queries[0], vectors=rows, group=1, tokens=1), ks)

    def judge(
        self, prefix: StoredPrefix, per_layer: Mapping[int, int | None], step: Callable[[], None]
    ) -> tuple[Fidelity | None, StepStats, StepStats]:
        """How near a selector comes on the searched layers, and what its one-token calls cost there and in
        all layers.
        """
        begin = dict.fromkeys(per_layer, 0)
        measured: dict[int, list[Tensor]] = {layer: [] for layer, k in per_layer.items() if k is not None}
        searched, whole = StepStats(), StepStats()
        last = max(per_layer)
        for calls in self.conversations:
            for call, ids, out, stats in recorded.replay(prefix, calls):
                layer, k, (_, heads, tokens, _) = call.layer, per_layer[call.layer], call.query.shape
                rows = slice(begin[layer], begin[layer] + out.shape[1])
                begin[layer] = rows.stop
                if k is not None:
                    judged = self.exact[layer].judge(rows, ids, out, k)
                    measured[layer].append(judged.reshape(len(MEASURES), heads, tokens))
                if tokens == 1:
                    whole.add(stats)
                    if k is not None:
                        searched.add(stats)
                if layer == last:
                    step()
        if not self.conversations:
            return None, searched, whole
        joined = {layer: torch.cat(parts, dim=2).cpu().double() for layer, parts in measured.items()}
        return summarize(joined), searched, whole


def check(store: KVStore, plan: FidelityPlan) -> dict[str, dict[int, int | None]]:
    """Tokens for each layer at each budget and for `DENSE`; raises `ConfigError` for what cannot be run."""
    host = HostKV(store, torch.device("cpu"))
    if "budget" in plan.common or any("budget" in contender.options for contender in plan.contenders):
        raise ConfigError("all selectors have the same budget: give it as --budgets, not as an option")
    for contender in plan.contenders:
        if shared := [name for name in ("schedule", "dense_layers") if name in contender.options]:
            raise ConfigError(
                f"'{contender.label}': all selectors have the same {shared[0]}: give it as -o {shared[0]}=…"
            )
    parse_options(SelectorOptions, plan.common, "what all selectors share")
    budgets: dict[str, dict[int, int | None]] = {}
    for amount in plan.budgets:
        if not re.fullmatch(r"\d+|\d*\.?\d+%", amount):
            raise ConfigError(f"budget '{amount}' is neither a count like 1024 nor a share like 2%")
        per_layer = _largest(_create(host, plan, Contender(DENSE), amount))
        if not any(per_layer.values()):
            raise ConfigError(
                f"budget '{amount}' leaves nothing to measure in {host.length:,} stored tokens: it is 0, "
                "or every layer is dense"
            )
        budgets[amount] = per_layer
    for contender in plan.contenders:
        _create(host, plan, contender, plan.budgets[0])
    return {**budgets, DENSE: _largest(_create(host, plan, Contender(DENSE), EVERYTHING))}


def _largest(prefix: StoredPrefix) -> dict[int, int | None]:
    return {layer: own.largest if own else None for layer, own in prefix.selector.budgets.items()}


def _has_own(contender: Contender) -> bool:
    """It attends to as many tokens as there are, or as the error that it keeps to asks for."""
    return contender.selector == DENSE or "error" in contender.options


def _create(host: HostKV, plan: FidelityPlan, contender: Contender, budget: str) -> StoredPrefix:
    # What a selector has as its own default must not set it apart.
    same = {"schedule": SelectorOptions.schedule, "dense_layers": SelectorOptions.dense_layers, **plan.common}
    options = {**same, **contender.options, **({} if "error" in contender.options else {"budget": budget})}
    return StoredPrefix.over(host, host.store.manifest.shape, contender.selector, options)
