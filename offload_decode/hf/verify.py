"""The equivalence check: a tiny model made from a model's config, run plain and behind a stored prefix.

There is no list of families: models are served whose tiny model passes. The prefix is prefilled in two
unequal chunks, longer than any window; behind it come one token, a question, a second turn and a padded
batch, as the engine runs them. Their logits must be those of one plain pass over everything, which must
depend on the prefix. `PackedTrial` compares packed batches in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload_decode.attention.dense import attend_dense
from offload_decode.common.errors import OffloadDecodeError, UnsupportedModel
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import with_cache
from offload_decode.hf.hooks import activate
from offload_decode.hf.packed_batch import PackedCache, Segment, logits_after
from offload_decode.hf.positions import lengths_of
from offload_decode.hf.shape import claimed_shape, observed_shape, text_config
from offload_decode.hf.tiny_model import NoTinyModel, tiny_config_of, tiny_model_of
from offload_decode.hf.user_cache import cached
from offload_decode.types import AttentionState, LayerShape, ModelShape

CLOSE = 1e-4
"""The largest difference of logits that counts as rounding, in standard deviations of the logits."""
_APART = 1e-3  # the least difference of logits behind another prefix
_PART = 1e-2  # of that difference may be rounding: a prefix with little effect must be exact nonetheless

_CHUNKS = (41, 28)
PREFIX, _QUESTION, _SHORT, _TURN = sum(_CHUNKS), 9, 2, 4
_SEEDS = (0, 1)  # a tie between two experts may fall either way once
# Of four conversations in packed passes: the sequence of the plain pass, and how many tokens of it each pass
# runs. The first two stand behind one prefix, the third behind another, and the last behind nothing.
_PACKED_SEQUENCES = (0, 1, 2, 0)
_PACKED_PASSES = ((9, 2, 1, 5), (1, 1, 8, 1), (1, 1, 1, 1), (2, 1, 3, 12))

Finish = Callable[[], AttentionState]


@dataclass(frozen=True)
class EquivalenceCheck:
    """Whether a model is served: the largest difference of its tiny model's logits, in their standard
    deviations, and the reason why it is not served, with the layer and the call that failed; else empty.
    """

    difference: float
    reason: str = ""

    @property
    def served(self) -> bool:
        return not self.reason


def shape_of(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """The shape of a text model in `dtype` (None: the checkpoint's) from its transformers config, after the
    equivalence check; raises `UnsupportedModel` with the reason.
    """
    shape, check = claimed_shape(config, dtype), check_equivalence(config)
    if not check.served:
        raise UnsupportedModel(
            f"this '{config.model_type}' model is not served, because it failed the equivalence check "
            f"with plain generation behind a stored prefix: {check.reason}; use a newer release of "
            "transformers, or another model"
        )
    return shape


def packs(config: Any) -> bool:
    """Whether the packed passes of a transformers config's model passed the check."""
    return check_equivalence(config, PackedTrial).served


def check_equivalence(config: Any, trial: type[Trial] | None = None) -> EquivalenceCheck:
    """The equivalence check of a transformers config by a trial (None: `Trial`): once for each tiny config,
    then cached for the libraries and the code that it ran through.
    """
    trial = trial or Trial
    return _once("config", text_config(config), trial, lambda: _of_tiny(config, trial))


def _of_tiny(config: Any, trial: type[Trial]) -> EquivalenceCheck:
    try:
        tiny = tiny_config_of(config)
    except NoTinyModel as error:
        return EquivalenceCheck(math.inf, f"no tiny model of it can be built ({error})")

    def check() -> EquivalenceCheck:
        checks = (_tried(tiny, seed, trial) for seed in _SEEDS)
        first = next(checks)
        return first if first.served else next((other for other in checks if other.served), first)

    return _once("tiny config", tiny, trial, check)


def _once(of: str, config: Any, trial: type[Trial], run: Callable[[], EquivalenceCheck]) -> EquivalenceCheck:
    fields = type(config).__name__, config.to_dict()
    return cached(["equivalence check", of, trial.__name__, _code(), *fields], run, asdict, _parsed)


def _parsed(fields: Any) -> EquivalenceCheck:
    check = EquivalenceCheck(**fields)
    if type(check.difference) is not float or type(check.reason) is not str:
        raise TypeError("not an equivalence check")
    return check


@cache
def _code() -> str:
    """SHA-256 of the code that a check runs through, for which it is valid."""
    code = sha256()
    for room in ("attention", "hf", "kv"):
        for path in sorted((Path(__file__).parents[1] / room).glob("*.py")):
            code.update(path.read_bytes())
    return code.hexdigest()


def _tried(tiny: Any, seed: int, trial_class: type[Trial]) -> EquivalenceCheck:
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        try:
            trial = trial_class(tiny, seed)
        except UnsupportedModel as error:
            return EquivalenceCheck(math.inf, str(error))
        try:
            return EquivalenceCheck(trial.run())
        except _Differs as found:
            return EquivalenceCheck(found.difference, f"in {trial.step}, {found}")
        except Exception as error:  # noqa: BLE001  # any failure is the check's result
            kind = "" if isinstance(error, OffloadDecodeError) else f"{type(error).__name__}: "
            within = f", {trial.mixer}" if trial.mixer else ""
            reason = " ".join(f"{kind}{error}".split())[:300].rstrip(".")
            return EquivalenceCheck(math.inf, f"in {trial.step}{within}: {reason}")


class _Differs(Exception):
    """Logits that are not those of the plain pass."""

    def __init__(self, difference: float, where: str):
        super().__init__(where)
        self.difference = difference


class _MemoryPrefix:
    """A stored prefix (`kv.generated.Prefix`) in memory: all of it, and of the generated KV, is seen."""

    remembers = by_token = False
    whole_generated = math.inf

    def __init__(self, shape: ModelShape) -> None:
        self.length = 0
        self._kv = {index: _no_kv(shape.layers[index]) for index in shape.full_layers}

    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        if layer in self._kv:
            before = self._kv[layer]
            self._kv[layer] = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)

    def begin(
        self, layer: int, query: Tensor, scaling: float, softcap: float | None, index: object = None
    ) -> Finish:
        keys, values = (part.expand(len(query), -1, -1, -1) for part in self._kv[layer])
        return partial(attend_dense, query, keys, values, scaling, None, softcap)

    def attend_generated(self, *_: object) -> None:
        """Never called: see `whole_generated`."""


def _no_kv(layer: LayerShape) -> tuple[Tensor, Tensor]:
    keys, values = (torch.zeros(1, layer.kv_heads, 0, dim) for dim in (layer.key_dim, layer.value_dim))
    return keys, values


class Trial:
    """One tiny model with one set of weights, run both ways."""

    def __init__(self, tiny: Any, seed: int) -> None:
        self.step, self.mixer = "a plain pass", ""  # the mixer that runs, or ran last
        self.worst, self.close = 0.0, CLOSE
        self.shape = observed_shape(tiny, torch.float32)
        self.plain, self.model = tiny_model_of(tiny, seed), tiny_model_of(tiny, seed)
        self.lengths = lengths_of(tiny, self.model.base_model)
        self.seen: dict[str, Tensor] = {}
        self.expected: dict[str, Tensor] = {}

    def run(self) -> float:
        """The largest difference; raises `_Differs` where it is too large, and whatever else fails."""
        self._watch(self.plain)
        ids = self._ids()
        self.want = self.plain(input_ids=ids).logits
        self.expected, self.seen = self.seen, {}
        self.spread = float(self.want.std())
        self._check_control()
        self.step, self.mixer = "chunks of a prefix", ""
        activate(self.model)
        self._watch(self.model)
        self.run_behind(ids)
        return self.worst

    def run_behind(self, ids: Tensor) -> None:
        """Run the passes that are compared."""
        behind = self.prefilled(ids[:1, :PREFIX])
        self._turn("one token", behind.fork(behind.prefix), ids, PREFIX, 1)
        talk = behind.fork(behind.prefix)
        self._turn("a question of several tokens", talk, ids, PREFIX, _QUESTION)
        self._turn("a second turn", talk, ids, PREFIX + _QUESTION, _TURN)
        self.step = "a padded batch"
        self._batch(behind.fork(behind.prefix), ids)

    def _ids(self) -> Tensor:
        """`[3, N]`: a prefix, question and second turn; another question; another prefix."""
        known = self.plain.get_input_embeddings().num_embeddings
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, known, (3, PREFIX + _QUESTION + _TURN), generator=generator)
        ids[1, :PREFIX] = ids[0, :PREFIX]
        ids[2, PREFIX:] = ids[0, PREFIX:]
        return ids

    def _check_control(self) -> None:
        asked = self.want[:, PREFIX:]
        apart = float((asked[0] - asked[2]).abs().max()) / self.spread
        self.close = min(CLOSE, _PART * apart)
        if not apart > _APART:
            raise _Differs(apart, "the logits of a question do not depend on the tokens before it")

    def prefilled(self, prefix: Tensor) -> CorpusCache:
        """Prefilled in chunks, and then opened as the engine does; `prefix` may be empty."""
        stored = _MemoryPrefix(self.shape)
        windows = {layer: _no_kv(self.shape.layers[layer]) for layer in self.shape.local_layers}
        positions = self.lengths.chosen(PREFIX, _QUESTION + _TURN)
        cache = CorpusCache.over(stored, self.shape, windows, positions=positions)
        for part in torch.split(prefix, list(_CHUNKS), dim=1) if prefix.numel() else ():
            self.model.base_model(input_ids=part, use_cache=True, **with_cache(self.model.base_model, cache))
            for layer in cache.generated_layers:
                stored.append(layer.index, *layer.generated.view())
            stored.length += part.shape[1]
            cache.rebase()
        windows = {layer: cache.layers[layer].seed for layer in self.shape.local_layers}
        states = {layer: cache.states(layer) for layer in self.shape.state_layers}
        decoder, dtype = self.model.base_model, torch.float32
        return CorpusCache.over(stored, self.shape, windows, decoder, dtype, states, positions)

    def _turn(self, step: str, cache: CorpusCache, ids: Tensor, start: int, tokens: int) -> None:
        self.step = step
        self._compare(cache, ids[:1, start : start + tokens], [(0, start, tokens)])

    def _batch(self, cache: CorpusCache, ids: Tensor) -> None:
        lengths = torch.tensor([_QUESTION, _SHORT])
        asked = torch.zeros(2, _QUESTION, dtype=torch.long)
        for row, length in enumerate(lengths.tolist()):
            asked[row, _QUESTION - length :] = ids[row, PREFIX : PREFIX + length]
        places = [(row, PREFIX, length) for row, length in enumerate(lengths.tolist())]
        shown = torch.arange(_QUESTION) >= _QUESTION - lengths[:, None]
        mask = torch.cat([torch.ones(2, PREFIX, dtype=torch.bool), shown], dim=1)
        self._compare(cache, asked, places, mask)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.bool)], dim=1)
        further = ids[torch.arange(2), PREFIX + lengths][:, None]
        self._compare(cache, further, [(row, start + length, 1) for row, start, length in places], mask)

    def _compare(
        self, cache: CorpusCache, ids: Tensor, places: list[tuple[int, int, int]], mask: Tensor | None = None
    ) -> None:
        positions = None if mask is None else (mask.long().cumsum(-1) - 1)[:, -ids.shape[1] :]
        logits = self._logits(ids, cache, attention_mask=mask, position_ids=positions)
        self.check([logits[row, -tokens:] for row, (_, _, tokens) in enumerate(places)], places)

    def _logits(self, ids: Tensor, cache: Any, **more: Any) -> Any:
        return self.model(input_ids=ids, use_cache=True, **with_cache(self.model, cache), **more).logits

    def check(self, found: Sequence[Tensor], places: Sequence[tuple[int, int, int]]) -> None:
        """Raise `_Differs` unless each `found [T, V]` are the plain pass's logits of a row from a start."""
        worst = max(
            float((logits - self.want[row, start : start + tokens]).abs().max())
            for logits, (row, start, tokens) in zip(found, places, strict=True)
        )
        self.worst = max(self.worst, worst / self.spread)
        if not worst / self.spread <= self.close:
            raise _Differs(worst / self.spread, self.where(places))

    def where(self, places: Sequence[tuple[int, int, int]]) -> str:
        """The first mixer whose outputs are not those of the plain pass."""
        for path, whole in self.expected.items():
            found = self.seen.get(path)
            for row, (plain, start, tokens) in enumerate(places):
                if found is None or found.shape[1] < tokens:
                    continue
                expected = whole[plain, start : start + tokens]
                if not (found[row, -tokens:] - expected).abs().max() <= CLOSE * expected.std():
                    return f"{path} gives other numbers than in one plain pass"
        return "the logits are other numbers than in one plain pass"

    def _watch(self, model: Any) -> None:
        for module in model.base_model.modules():
            within = [part for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)]
            if within == [module]:
                name = f"{type(module).__name__} of layer {module.layer_idx}"
                module.register_forward_pre_hook(partial(self._enter, name))
                module.register_forward_hook(partial(self._note, name))

    def _enter(self, name: str, *_: Any) -> None:
        self.mixer = name

    def _note(self, name: str, module: Any, args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.ndim == 3 and first.is_floating_point():
            self.seen[name] = first


class PackedTrial(Trial):
    """Several conversations in packed passes, with the logits of the last tokens, as the engine runs them."""

    def run_behind(self, ids: Tensor) -> None:
        self.expected.clear()  # of mixers, which are not compared: their outputs are packed
        first, other = (self.prefilled(ids[row : row + 1, :PREFIX]) for row in (0, 2))
        talks = [first.fork(first.prefix), first.fork(first.prefix), other, self.prefilled(ids[:1, :0])]
        starts = [talk.prefix_length for talk in talks]
        for number, lengths in enumerate(_PACKED_PASSES):
            self.step = f"packed pass {number + 1} of several conversations"
            cache = PackedCache([Segment(*one) for one in zip(talks, lengths, strict=True)])
            places = list(zip(_PACKED_SEQUENCES, starts, lengths, strict=True))
            packed = [ids[row, start : start + length] for row, start, length in places]
            last = torch.tensor(lengths).cumsum(0) - 1
            logits = logits_after(self._logits(torch.cat(packed)[None], cache, logits_to_keep=last), last)
            self.check(list(logits[:, None]), [(row, start + n - 1, 1) for row, start, n in places])
            starts = [start + length for start, length in zip(starts, lengths, strict=True)]
