"""Load a model and its tokenizer, and run it: `LoadedModel` takes tokens behind a cache to logits, and
`Processors` change these as the model's `generation_config` says.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload_decode import demo_models
from offload_decode.attention.transfers import to_device
from offload_decode.common.errors import ConfigError, ModelError
from offload_decode.common.memory import give_back, lifted
from offload_decode.config import FULL, STREAMED
from offload_decode.hf.cache import CorpusCache
from offload_decode.hf.compat import DTYPES, cache_name, check_alone, check_dtype, pick_device, stored_dtype
from offload_decode.hf.hooks import activate
from offload_decode.hf.packed_batch import PackedCache, logits_after
from offload_decode.hf.positions import Lengths, Positions, lengths_of, rope_parameters
from offload_decode.hf.rope_scaling import Trained, trained_of
from offload_decode.hf.user_cache import cached_fingerprint, note
from offload_decode.hf.verify import check_equivalence, packs, shape_of
from offload_decode.models import adapters, checkpoint, quantization
from offload_decode.models.block_layers import quantize
from offload_decode.models.fingerprints import config_hash, tokenizer_hash, weights_hash
from offload_decode.models.gguf import SUFFIX
from offload_decode.models.gguf_cache import converted
from offload_decode.models.layer_streaming import check_card, stream
from offload_decode.models.prompt import Prompt, prompt_for
from offload_decode.models.quantized_loading import read_gguf, read_packed, whole_model
from offload_decode.selectors.budgets import pass_tokens
from offload_decode.store.format import FINGERPRINT_VERSION
from offload_decode.types import ModelShape

AnyCache = CorpusCache | PackedCache


class Padding(NamedTuple):
    """Of a padded batch `[B, T]`: a mask `[B, covered + T]`, which shows all stored tokens, and positions."""

    mask: Tensor
    positions: Tensor


@dataclass(frozen=True)
class LoadedModel:
    """A model that attends through the registered function, with what identifies it. `weights`: `auto` (the
    checkpoint's), or what they were quantized to as it was loaded. `streamed`: those of its layers come to
    the device as they run (`models.layer_streaming`), for passes without logits. `scaled`: how its RoPE was
    asked to be, empty as it is trained; `trained`: for texts of which length. `adapter`: the folder of
    the LoRA on it, or empty; one that is `activated` is on another model beside it (`models.adapters`).
    `loading`: seconds that `load` took, converting and hashing included.
    """

    model: Any
    tokenizer: Any | None
    model_id: str
    shape: ModelShape
    config_hash: str
    weights_hash: str
    tokenizer_hash: str
    rope: dict[str, Any]
    lengths: Lengths
    trained: Trained
    dtype: str
    device: torch.device
    weights: str = "auto"
    streamed: bool = False
    stated_ends: tuple[int, ...] = ()
    scaled: str = ""
    adapter: str = ""
    activated: "Activated | None" = None
    loading: float = 0.0

    @property
    def configured_ends(self) -> frozenset[int]:
        """The tokens by which `model.generate` ends: of the generation config, else of the config."""
        stated = (one.eos_token_id for one in (self.model.generation_config, self.model.config))
        found = next((one for one in stated if one is not None), ())
        return frozenset([found] if isinstance(found, int) else found)

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end an answer: those of the generation config, the config and the tokenizer, the
        `stated_ends` of a GGUF file, and that by which the chat template closes an answer.
        """
        holders = self.model.generation_config, self.model.config, self.tokenizer
        stated = [getattr(one, "eos_token_id", None) for one in holders]
        lists = [[one] if isinstance(one, int) else one for one in stated if one is not None]
        ends = frozenset([*chain(*lists), *self.stated_ends, *self._closing])
        return frozenset(end for end in ends if end >= 0)  # some state -1 for none

    @cached_property
    def _closing(self) -> tuple[int, ...]:
        closing = None
        with suppress(ModelError):  # a template that cannot be asked by, in a conversation of token ids
            closing = None if self.tokenizer is None else self.prompt.closing(self.tokenizer)
        return () if closing is None else (closing,)

    @cached_property
    def prompt(self) -> Prompt:
        """How questions are put after the corpus; raises `ModelError` without a tokenizer."""
        return prompt_for(self.known_tokenizer, self.tokenizer_hash)

    @cached_property
    def packs(self) -> bool:
        """Whether several conversations may run in one pass: checked at first use, then cached."""
        return packs(self.model.config)

    def stated(self, positions: Positions) -> dict[str, Any]:
        """What a store's manifest says of the model, where its tokens have these positions."""
        return {
            "model_id": self.model_id,
            "model_config_hash": self.config_hash,
            "weights_hash": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "dtype": self.dtype,
            "shape": self.shape,
            "rope": self.rope | positions.noted,
            "trained": self.trained._asdict(),
        }

    @property
    def identity(self) -> dict[str, Any]:
        """What tells whether a store is of this model: see `KVStore.check_model`."""
        return {
            "config_hash": self.config_hash,
            "weights_hash": self.weights_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "dtype": self.dtype,
            "shape": self.shape,
            "model_id": self.model_id,
            "adapter": self.adapter,
        }

    @property
    def known_tokenizer(self) -> Any:
        """The tokenizer; raises `ModelError` if the model came without one."""
        if self.tokenizer is None:
            raise ModelError("this model came without a tokenizer: open the store with a model id or folder")
        return self.tokenizer

    def forward(
        self, tokens: Tensor, cache: CorpusCache, padding: Padding | None = None, every: bool = False
    ) -> Tensor:
        """Run `tokens [B, T]` behind the cache; returns the last token's logits `[B, V]` in float32, or those
        of `every` one `[B, T, V]`. Raises `ConfigError` where weights are streamed.
        """
        logits: Tensor = self._run(self.model, tokens, cache, padding, logits_to_keep=int(not every)).logits
        return (logits if every else logits[:, -1]).float()

    def forward_rows(self, tokens: Tensor, cache: PackedCache, rows: Tensor) -> Tensor:
        """Run packed `tokens [1, total]`; returns the logits `[n, V]` after those of `rows` (int64 `[n]`, in
        order) in float32. Raises `ConfigError` where weights are streamed.
        """
        rows = rows.to(self.device)
        return logits_after(self._run(self.model, tokens, cache, logits_to_keep=rows).logits, rows).float()

    def encode(self, tokens: Tensor, cache: AnyCache, padding: Padding | None = None) -> Tensor:
        """Run `tokens [B, T]` for their keys and values: the last hidden state `[B, T, H]`, and no logits."""
        hidden: Tensor = self._run(self.model.base_model, tokens, cache, padding)[0]
        return hidden

    def _run(
        self, module: Any, tokens: Tensor, cache: AnyCache, padding: Padding | None = None, **more: Any
    ) -> Any:
        if self.streamed and module is self.model:
            raise ConfigError(
                "this model's weights are streamed for a prefill, and an answer would read all of them "
                "for every token: load it with other weights to ask it"
            )
        # A config may differ in the last two, so they are passed in every call.
        with torch.inference_mode():
            return module(
                input_ids=tokens if tokens.device == self.device else to_device(tokens, self.device),
                attention_mask=padding and padding.mask,
                position_ids=padding and padding.positions,
                use_cache=True,
                output_attentions=False,
                **{cache_name(type(module)): cache},  # type: ignore[arg-type]
                **more,
            )


class Activated(NamedTuple):
    """A model with an activated LoRA, which runs the tokens from the last `invocation` on, none before."""

    invocation: tuple[int, ...]
    loaded: LoadedModel


def load(
    model_id: str,
    device: str = "auto",
    dtype: str = "auto",
    weights: str = "auto",
    rope: str = "",
    adapter: str = "",
) -> LoadedModel:
    """Load a shipped model, such as `demo`, a folder, a .gguf file or a transformers id, with its tokenizer.

    `device` is `auto`, `cpu` or `cuda[:n]`; `dtype` is `auto` (the checkpoint's), `float16`, `bfloat16` or
    `float32`. `weights` is `auto` (in that dtype; of a GGUF file on a CPU in its own blocks), `full` (in that
    dtype), `streamed` (`models.layer_streaming`), `int8` or `int4` (`models.quantization`): the model's hash
    is that of the checkpoint, so that it opens the checkpoint's stores. Another quantized checkpoint is read
    as it is published, and takes no `weights`. On the CPU weights are memory-mapped, and copied only for
    another `dtype`. `rope`: how RoPE is scaled for longer texts, such as `yarn:4` (`hf.rope_scaling`).
    `adapter`: the folder of a LoRA, which is part of the model's hash unless it is activated
    (`models.adapters`). Raises `ModelError`, `UnsupportedModel` or `ConfigError`.
    """
    from transformers.utils import logging

    began = time.perf_counter()
    check_dtype(dtype)
    quantization.check_weights(weights)
    chosen_device = pick_device(device)
    quantization.check_quantizer(weights, chosen_device)
    if weights == STREAMED:
        check_card(chosen_device)
    config, shape = checkpoint.read_config(model_id, rope)
    lora = adapters.read_adapter(adapter) if adapter else None
    if lora is not None:
        adapters.check_activated(lora, shape, weights)
    source = checkpoint.source_of(model_id)
    if (stated := quantization.quantization_of(config)) is not None:
        quantization.check_weights_of(stated["quant_method"], weights)
        quantization.check_packages(stated["quant_method"])
    gguf = source.endswith(SUFFIX)
    with checkpoint.model_errors(f"cannot load the model '{model_id}'"):
        logging.disable_progress_bar()  # it would garble the caller's
        tokenizer, known, ends = _tokenizer(source)
        give_back()  # before weights come: parsing a large vocabulary leaves 200 MB
        found = checkpoint.weight_files(source)
        with lifted(lambda: sum(path.stat().st_size for path in found)):
            if gguf:
                first = chosen_device if weights in ("auto", FULL) else torch.device("cpu")
                model, fingerprint = read_gguf(found[0], config, dtype, weights, first)
            elif stated is not None:
                model, fingerprint = read_packed(source, found, config, stated, dtype, chosen_device)
            else:
                model, fingerprint = _read_weights(source, found, config, dtype)
            if weights == STREAMED:
                stream(model, chosen_device)
            elif weights in quantization.FEW_BITS and chosen_device.type == "cpu":
                model = quantize(model, weights)
            elif weights in quantization.FEW_BITS:
                model = quantization.quantize_on_gpu(model, weights, chosen_device)
            elif model.device != chosen_device:
                model = model.to(chosen_device)
        adapted = adapters.twin(model) if lora and lora.invocation else model
        if lora is not None:
            added = adapters.attach(adapted, lora, chosen_device)
            if adapted is model:
                fingerprint = adapters.adapted_hash(fingerprint, added)
    # A name by which a store finds its model from any folder.
    if gguf:
        model_id = str(Path(source).absolute())
    elif Path(model_id).is_dir() and model_id not in demo_models.NAMES:
        model_id = str(Path(model_id).resolve())
    loaded = wrap(model, tokenizer, model_id, fingerprint, known)
    activated = None
    if lora and lora.invocation:
        activate(adapted.eval())
        activated = Activated(lora.invocation, replace(loaded, model=adapted))
    numbers = "auto" if weights in (STREAMED, FULL) else weights
    return replace(
        loaded,
        streamed=weights == STREAMED,
        weights=numbers,
        stated_ends=ends,
        scaled=rope,
        adapter="" if lora is None else str(lora.folder),
        activated=activated,
        trained=trained_of(model.config, rope),
        loading=time.perf_counter() - began,
    )


def load_tokenizer(model_id: str) -> tuple[Any, str]:
    """The tokenizer that `load` would give, with its hash, and nothing of the model. Raises `ModelError`."""
    checkpoint.stated_config(model_id)  # its files are bounded before they are parsed
    with checkpoint.model_errors(f"cannot load the tokenizer of '{model_id}'"):
        return _tokenizer(checkpoint.source_of(model_id))[:2]


def _tokenizer(source: str) -> tuple[Any, str, tuple[int, ...]]:
    """A tokenizer, its hash, and the tokens that end an answer by a GGUF file."""
    from transformers import AutoTokenizer, __version__

    if source.endswith(SUFFIX):
        kept = converted(Path(source))
        return kept.tokenizer, kept.tokenizer_hash, kept.ends
    checkpoint.check_rules(source)
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = checkpoint.template_of(source)
    known = cached_fingerprint(
        checkpoint.small_files(source),
        f"tokenizer {FINGERPRINT_VERSION} {type(tokenizer).__name__} {__version__}",
        lambda: tokenizer_hash(tokenizer),
    )
    return tokenizer, known, ()


def wrap(
    model: Any,
    tokenizer: Any | None = None,
    model_id: str | None = None,
    fingerprint: str | None = None,
    tokenizer_fingerprint: str | None = None,
) -> LoadedModel:
    """Take a transformers model that is loaded already; its attention is switched to the registered function.

    `fingerprint` is the `weights_hash` of the checkpoint, where the model no longer holds its weights, and
    `tokenizer_fingerprint` the `tokenizer_hash`, where it is known.
    Raises `UnsupportedModel` for an architecture that is not served exactly, and for a multimodal model.
    """
    check_alone(model.config)
    shape = shape_of(model.config, model.dtype)
    activate(model.eval())
    dtype = stored_dtype(model.dtype)
    hashed = config_hash(model.config)
    note(hashed, check_equivalence(model.config).difference)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        model_id=model_id or model.config._name_or_path or model.config.model_type,
        shape=shape,
        config_hash=hashed,
        weights_hash=fingerprint or weights_hash(model),
        tokenizer_hash=tokenizer_fingerprint or tokenizer_hash(tokenizer),
        rope=rope_parameters(model.config),
        lengths=lengths_of(model.config, model.base_model),
        trained=trained_of(model.config),
        dtype=dtype,
        device=model.device,
    )


def _read_weights(source: str, found: list[Path], config: Any, dtype: str) -> tuple[Any, str]:
    from transformers import __version__

    model = whole_model(source, config=config, dtype=DTYPES.get(dtype, "auto"))
    reading = f"weights {FINGERPRINT_VERSION} {config.model_type} {model.dtype} {__version__}"
    files = [*found, found[0].with_name(checkpoint.CONFIG)]
    return model, cached_fingerprint(files, reading, lambda: weights_hash(model))


def run_in_passes(
    loaded: LoadedModel,
    tokens: Tensor,
    cache: CorpusCache,
    limit: int,
    padding: Padding | None = None,
    every: bool = False,
) -> Tensor:
    """`LoadedModel.forward` for `tokens [B, T]`, about `limit` of them in a pass, in equal parts: the last
    token's logits `[B, V]`, or those of `every` one `[B, T, V]`. Each pass attends to those before it, so
    that memory grows with a pass and not with the square of the question. `padding` is that of one pass.
    """
    batch, length = tokens.shape
    passes = -(-length // pass_tokens(limit, batch))
    before, logits = cache.generated_length, []
    for start, end in pairwise(length * one // passes for one in range(passes + 1)):
        own = None
        if padding is not None:
            seen = cache.shows_prefix = padding.mask[:, : padding.mask.shape[1] - length + end]
            own = Padding(seen, padding.positions[:, start:end])
        if every or end == length:
            logits.append(loaded.forward(tokens[:, start:end], cache, own, every))
        else:
            loaded.encode(tokens[:, start:end], cache, own)
    cache.join(before)
    return torch.cat(logits, dim=1) if every else logits[-1]


_NOT_OBEYED = "the model's generation_config cannot be obeyed"


class Processors:
    """The logits processors of one answer, those that `model.generate` itself makes: penalties for
    repetition, forbidden and forced tokens, least lengths.

    They see `tokens`, the conversation after the stored ones, and what is generated; `ends` are the tokens
    that end the answer, which has at `most` so many. Sampling and beams are left out, unless `asked` has
    keyword arguments of `model.generate`: `samples` then says whether a token is to be drawn. Raises
    `ConfigError` for arguments that are none, and for beams.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        tokens: Sequence[int],
        ends: frozenset[int],
        most: int,
        asked: Mapping[str, Any] | None = None,
    ):
        if most < 1:
            raise ConfigError(f"an answer of {most} tokens is none: max_new_tokens must be 1 or more")
        if asked is None:
            config = copy.deepcopy(model.generation_config)
            config.do_sample = False
        else:
            config = _generation_config(model, asked)
        self.samples = bool(config.do_sample)
        self._ids = torch.tensor([list(tokens)], dtype=torch.long, device=model.device)
        self._stop = None
        with checkpoint.model_errors(_NOT_OBEYED):
            config.eos_token_id = sorted(ends) or None
            config.pad_token_id = 0  # nothing is padded, and without one there is a warning
            config.max_length = len(tokens) + most
            model._prepare_special_tokens(config, device=model.device)
            self._processors = model._get_logits_processor(
                config, len(tokens), self._ids, device=model.device, model_kwargs={}
            )
            if config.stop_strings:
                from transformers import StopStringCriteria

                self._stop = StopStringCriteria(tokenizer, config.stop_strings)

    def __call__(self, logits: Tensor) -> Tensor:
        """`logits [V]` of the next token, changed."""
        if not self._processors:
            return logits
        with checkpoint.model_errors(_NOT_OBEYED):  # some look at their tokens only now
            changed: Tensor = self._processors(self._ids, logits[None].clone())
        return changed[0]

    def append(self, token: int) -> bool:
        """Take note of a generated token; whether the answer ends with it."""
        if self._processors or self._stop is not None:
            self._ids = torch.cat([self._ids, self._ids.new_tensor([[token]])], dim=1)
        return self._stop is not None and bool(self._stop(self._ids, None)[0])


def _generation_config(model: Any, asked: Mapping[str, Any]) -> Any:
    """The `generation_config` of `model.generate(**asked)`."""
    try:
        config, unknown = model._prepare_generation_config(None, **asked)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"these arguments of a generation cannot be used: {error}") from error
    if unknown:
        raise ConfigError(f"a generation has no argument '{next(iter(unknown))}': leave it out")
    if (mode := config.get_generation_mode()) not in ("greedy_search", "sample"):
        raise ConfigError(f"{mode.value} is not done here: leave it out, for greedy decoding or sampling")
    return config
