"""lm-eval's model interface: texts to tokens by the conventions of its `hf` model, answers from stores.

These are `lm_eval.models.huggingface.HFLM`'s: how a context and its continuation are separated, what stands
for an empty context, from which side a long one is cut, how stop strings end an answer. With dense attention,
or a budget of all tokens, every result is that model's to float rounding.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from offload_decode.common.errors import ConfigError
from offload_decode.config import EngineConfig, parse_options
from offload_decode.engine.conversation import Conversation
from offload_decode.indexes import registry
from offload_decode.kv.indexes import AUTO
from offload_decode.models.checkpoint import WAY_OUT, source_of
from offload_decode.models.fingerprints import find_tokenizer
from offload_decode.models.gguf import SUFFIX
from offload_decode.models.loading import load
from offload_decode.models.made_with import made_with
from offload_decode.models.prompt import TemplateRefuses, rendered
from offload_decode.prefill_jobs.job import Settings as Prefilling
from offload_decode.prefill_jobs.lm_eval.answers import (
    Scoring,
    Stores,
    Tokens,
    Writing,
    answers,
    groups,
    scores,
)
from offload_decode.selectors.registry import get

NAME = "offload-decode"
"""What `lm_eval --model` calls it."""
MAX_GEN_TOKS = 256
"""Tokens of an answer, where neither its task nor `--gen_kwargs` say."""

logger = logging.getLogger("lm_eval.offload_decode")  # only loggers below lm-eval's are shown

R = TypeVar("R", bound=Scoring | Writing)
T = TypeVar("T")
Run = Callable[[Conversation, int, Sequence[R], int], Iterator[tuple[int, T]]]

_PREFILL = "prefill_"
_NUMBERS = ("min_prefix", "question_tokens", "batch_size", "max_length", "prefix_token_id")


@dataclass(frozen=True)
class Settings:
    """`--model_args`, checked before the model is loaded.

    pretrained, device, dtype, weights: the model, as in `models.loading.load`. selector: which stored tokens
    a step attends to; every argument that is not named here is its option (`budget=64`). prefill: the method,
    with its options as `prefill_chunk=512`; kv: how keys and values are stored. stores: the folder that keeps
    stores for later runs (None: they are removed after use). min_prefix: the shortest stored prefix; a
    request with less is answered by the bare model, exactly. question_tokens: the last tokens of each context
    that are never stored, like a question's. batch_size: requests behind one prefix that share a pass.
    max_length, add_bos_token, prefix_token_id: as in lm-eval's `hf`.
    """

    pretrained: str
    selector: str = "topk"
    device: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    attend: str = "auto"
    prefill: str = "dense"
    kv: str = "auto"
    stores: str | None = None
    min_prefix: int = 1024
    question_tokens: int = 128
    batch_size: int = 1
    max_length: int | None = None
    add_bos_token: bool | None = None
    prefix_token_id: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    prefill_options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, pretrained: str, given: Mapping[str, Any]) -> Self:
        """From the arguments that lm-eval passes. Raises `ConfigError`."""
        own = {one.name for one in fields(cls)} - {"pretrained", "options", "prefill_options"}
        named = {name: value for name, value in given.items() if name in own}
        for name, value in named.items():  # --batch_size comes as text, and a folder named 1 as a number
            if name in _NUMBERS and str(value).isdecimal():
                named[name] = int(value)
            elif name not in _NUMBERS and type(value) is not bool and value is not None:
                named[name] = str(value)
        # lm-eval itself adds the last two; neither has a meaning here.
        known = {*own, "trust_remote_code", "max_batch_size"}
        options = {name: value for name, value in given.items() if name not in known}
        prefill = {name: options.pop(name) for name in list(options) if name.startswith(_PREFILL)}
        prefill = {name.removeprefix(_PREFILL): value for name, value in prefill.items()}
        settings = cls(pretrained, **named, options=options, prefill_options=prefill)
        settings._check()
        return settings

    @property
    def prefilling(self) -> Prefilling:
        return Prefilling(self.prefill, self.prefill_options, kv=self.kv)

    @property
    def asking(self) -> EngineConfig:
        return EngineConfig(selector=self.selector, options=self.options, attend=self.attend)

    def _check(self) -> None:
        if not isinstance(self.pretrained, str) or not self.pretrained:
            raise ConfigError(f"pretrained must name a model: {WAY_OUT}")
        for name in _NUMBERS:
            value, least = getattr(self, name), 0 if name == "prefix_token_id" else 1
            if value is not None and (type(value) is not int or value < least):
                raise ConfigError(f"{name} must be a whole number of {least} or more, not '{value}'")
        if self.stores is not None and Path(self.stores).exists() and not Path(self.stores).is_dir():
            way_out = "name one, which is made where there is none"
            raise ConfigError(f"stores={self.stores} is no folder: {way_out}")
        if self.add_bos_token not in (None, True, False):
            raise ConfigError(f"add_bos_token must be true or false, not '{self.add_bos_token}'")
        _ = self.prefilling, self.asking, EngineConfig(weights=self.weights)  # each checks itself
        parse_options(get(self.selector).options_type, self.options, f"selector '{self.selector}'")
        if (kind := str(self.options.get("index", AUTO))) != AUTO:
            registry.get(kind)


@register_model(NAME)
class OffloadDecodeLM(TemplateLM):
    """A model that answers lm-eval's requests from stores; its arguments are those of `Settings`."""

    def __init__(self, pretrained: str = "", **given: Any):
        super().__init__()
        self.settings = settings = Settings.of(pretrained, given)
        self.loaded = load(pretrained, settings.device, settings.dtype, settings.weights)
        self.tokenizer = self.loaded.known_tokenizer
        if settings.add_bos_token is not None:
            self.tokenizer.add_bos_token = settings.add_bos_token
        self._device = self.loaded.device
        folder = None if settings.stores is None else Path(settings.stores)
        self._stores = Stores(self.loaded, settings.prefilling, settings.asking, folder)
        self._counts = {"behind_stores": 0, "bare": 0, "stores": 0, "stored_tokens": 0, "following_tokens": 0}
        if pretrained.endswith(SUFFIX) or source_of(pretrained) != pretrained:
            find_tokenizer(pretrained, self.tokenizer)  # some tasks size their texts by it

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> Self:
        """From `--model_args`, which win, and lm-eval's own options."""
        more = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if more.get("device") == "cuda:0":  # lm-eval's default
            more["device"] = "auto"
        return cls(**{**more, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Self:
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands for an empty context."""
        if self.settings.prefix_token_id is not None:
            return self.settings.prefix_token_id
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def max_length(self) -> int:
        """Tokens of a context with its continuation; more are cut off on the left."""
        if self.settings.max_length is not None:
            return self.settings.max_length
        config = self.loaded.model.config.get_text_config()
        stated = (getattr(config, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
        return next((int(length) for length in stated if length is not None), 2048)

    @property
    def tokenizer_name(self) -> str:
        """Separates lm-eval's cached requests of one chat template from those of another."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A chat in the tokenizer's template; without its system message, if that fails."""
        how = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": not add_generation_prompt,
        }
        try:
            return rendered(self.tokenizer, chat_history, **how)
        except TemplateRefuses:
            logger.warning("The chat template fails: trying without the system message.")
            others = [message for message in chat_history if message["role"] != "system"]
            return rendered(self.tokenizer, others, **how)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; no begin token is added to a text that has one."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        return self._encoded(string, add_special_tokens)

    def _encoded(self, string: str, special: bool | None) -> list[int]:
        special = self.settings.add_bos_token if special is None else special
        how = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(string, verbose=False, **how))

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Scores of (text, tokens of the context, tokens of the continuation), in their order."""
        scorings = [Scoring(*self._cut(context, continuation)) for _, context, continuation in requests]
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for place, score in self._run("loglikelihood", scorings, scores, disable_tqdm):
            results[place] = score
            if (text := requests[place][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", text, results[place])
        return results

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[Tokens, list[int]]:
        if not continuation or len(continuation) > self.max_length:
            raise ConfigError(
                f"a continuation of {len(continuation):,} tokens cannot be scored: it must have one at "
                f"least, and no more than max_length, {self.max_length:,}"
            )
        whole, most = len(context) + len(continuation), self.max_length + 1
        if whole > most:
            logger.warning(
                "A context and its continuation have %s tokens, more than max_length (%s): "
                "the first %s are left out.",
                *(f"{number:,}" for number in (whole, self.max_length, whole - most)),
            )
        kept = context[max(0, whole - most) :]
        return np.array(kept, np.int32), continuation

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, in windows of `max_length`."""
        windows: list[tuple[tuple[str, str] | None, list[int], list[int]]] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            own = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            for context, continuation in map(make_disjoint_window, own):
                windows.append((None, context, continuation))
                owners.append(owner)
        totals = [0.0] * len(requests)
        found = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, found, strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        writings = [self._writing(*request.args) for request in requests]
        results = [""] * len(requests)
        for place, tokens in self._run("generate_until", writings, answers, disable_tqdm):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            results[place] = postprocess_generated_text(text, list(writings[place].stops), None)
            self.cache_hook.add_partial("generate_until", requests[place].args, results[place])
        return results

    def _writing(self, context: str, given: dict[str, Any]) -> Writing:
        options: dict[str, Any] = dict(normalize_gen_kwargs(given, MAX_GEN_TOKS))
        end = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        stops = handle_stop_sequences(options.pop("until"), eos=end)
        most = options.pop("max_gen_toks")
        if not options["do_sample"]:
            options.pop("temperature", None)
        room = self.max_length - most
        if most < 1 or room < 1:
            raise ConfigError(
                f"max_gen_toks is {most:,}: it must be 1 or more, and less than max_length, "
                f"which is {self.max_length:,}"
            )
        begins = has_bos_prefix(context, getattr(self.tokenizer, "bos_token", None))
        tokens = self._encoded(context, False if begins else None) or [self.prefix_token_id]
        if len(tokens) > room:
            logger.warning(
                "A context has %s tokens, and max_length (%s) leaves room for %s: the first are left out.",
                *(f"{number:,}" for number in (len(tokens), self.max_length, room)),
            )
        if "max_length" in options:
            most = options.pop("max_length") - min(len(tokens), room)
        return Writing(np.array(tokens[-room:], np.int32), most, [stop for stop in stops if stop], options)

    def _run(self, what: str, requests: Sequence[R], run: Run[R, T], quiet: bool) -> Iterator[tuple[int, T]]:
        """The number of each request with the result of `run`, prefix by prefix."""
        with tqdm(total=len(requests), desc=f"Running {what} requests", disable=quiet) as bar:
            for stored, places in self._groups(requests):
                own = [requests[place] for place in places]
                following = max(len(one.context) + one.most for one in own) - stored

                def show(done: int, total: int = stored) -> None:
                    bar.set_postfix_str(f"prefill {done:,} of {total:,} tokens" if done < total else "")

                with self._stores.behind(own[0].context[:stored], following, show) as start:
                    for number, result in run(start, stored, own, self.settings.batch_size):
                        yield places[number], result
                        bar.update()
                self._counts["behind_stores" if stored else "bare"] += len(own)
                if stored:
                    self._counts["stores"] += 1
                    self._counts["stored_tokens"] += stored * len(own)
                    self._counts["following_tokens"] += sum(len(one.context) - stored for one in own)
        logger.info(
            "%s of %s requests were answered from stores (%s of them), the others by the bare model.",
            self._counts["behind_stores"],
            self._counts["behind_stores"] + self._counts["bare"],
            self._counts["stores"],
        )

    def _groups(self, requests: Sequence[Scoring | Writing]) -> Iterator[tuple[int, list[int]]]:
        # Where rotations depend on the length of the whole text, only texts with the same ones share keys.
        alike: dict[Any, list[int]] = {}
        for place, one in enumerate(requests):
            length = len(one.context) + one.most
            alike.setdefault(self.loaded.lengths.chosen(0, length), []).append(place)
        for places in alike.values():
            own = [requests[place].context for place in places]
            for group in groups(own, self.settings.min_prefix, self.settings.question_tokens):
                yield group.stored, [places[member] for member in group.members]

    def get_model_info(self) -> dict[str, Any]:
        own = {"settings": asdict(self.settings), "requests": self._counts}
        return {"offload_decode": {**made_with(self.loaded), **own}}
