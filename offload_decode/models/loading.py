"""Loading a model and its tokenizer, and the fingerprints by which a store knows them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload_decode.errors import ConfigError, ModelError, OffloadDecodeError
from offload_decode.memory import lifted
from offload_decode.models.architectures import rope_parameters, shape_of
from offload_decode.models.attention import activate
from offload_decode.models.cache import PrefixCache
from offload_decode.models.prompt import Prompt, prompt_for
from offload_decode.models.quantised import check_weights, quantise
from offload_decode.types import ModelShape

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# Config fields that shape keys and values and that the weights do not show. A list of what counts, not of
# what does not: releases of transformers differ in the defaults that they write into a config.
_SHAPING = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "hidden_act",
    "layer_types",
    "no_rope_layers",
    "sliding_window",
    "rms_norm_eps",
    "layer_norm_eps",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "num_experts_per_tok",
    "norm_topk_prob",
)
_ROPE = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class LoadedModel:
    """A model that attends through the registered function, with what identifies it."""

    model: Any
    tokenizer: Any | None
    model_id: str
    shape: ModelShape
    config_hash: str
    weights_hash: str
    tokenizer_hash: str
    rope: dict[str, Any]
    dtype: str
    device: torch.device

    @cached_property
    def prompt(self) -> Prompt:
        """How questions are put after the corpus; raises `ModelError` without a tokenizer."""
        return prompt_for(self.known_tokenizer)

    @property
    def known_tokenizer(self) -> Any:
        """The tokenizer; raises `ModelError` if the model came without one."""
        if self.tokenizer is None:
            raise ModelError("this model came without a tokenizer: open the store with a model id or folder")
        return self.tokenizer

    def forward(
        self,
        tokens: Tensor,
        cache: PrefixCache,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run `tokens [B, T]` behind the cache; returns the last token's logits `[B, V]` in float32."""
        with torch.inference_mode():
            output = self.model(
                input_ids=tokens.to(self.device),
                past_key_values=cache,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=1,
            )
        cache.check_attended()
        return output.logits[:, -1].float()  # type: ignore[no-any-return]

    def encode(
        self,
        tokens: Tensor,
        cache: PrefixCache,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> None:
        """Run `tokens [B, T]` for their keys and values alone: no logits are computed."""
        with torch.inference_mode():
            self.model.base_model(
                input_ids=tokens.to(self.device),
                past_key_values=cache,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=True,
            )
        cache.check_attended()


def load(model_id: str, device: str = "auto", dtype: str = "auto", weights: str = "auto") -> LoadedModel:
    """Load `demo` (the shipped model), a folder, or a transformers id, with its tokenizer.

    `device` is `auto`, `cpu` or `cuda[:n]`; `dtype` is `auto` (the checkpoint's), `float16`, `bfloat16` or
    `float32`. `weights` is `auto` (in that dtype), `int8` or `int4` (`models.quantised`): the model's hash is
    that of the checkpoint, so that it opens what the checkpoint prefilled. On the CPU the checkpoint is a map
    of its files while it is read, copied only where `dtype` is another. Raises `ModelError`,
    `UnsupportedModel` or `ConfigError`.
    """
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'; choose one of: auto, {', '.join(DTYPES)}")
    check_weights(weights)
    chosen_device = pick_device(device)
    source = source_of(model_id)
    if (model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1) and not Path(source).is_dir():
        raise ModelError(f"there is no folder {model_id}: give 'demo', a folder, or a transformers id")
    try:
        config = AutoConfig.from_pretrained(source)
        shape_of(config)
        tokenizer = AutoTokenizer.from_pretrained(source)
        logging.disable_progress_bar()  # a bar of its own would tear the one that the caller shows
        with lifted(lambda: _checkpoint_bytes(config)):
            model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES.get(dtype, "auto"))
            fingerprint = weights_hash(model)
            model = model.to(chosen_device) if weights == "auto" else quantise(model, weights, chosen_device)
    except OffloadDecodeError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ModelError(
            f"cannot load the model '{model_id}': {reason}; give 'demo', a folder, or a transformers id"
        ) from error
    # A store must find its model again from any folder.
    known_as = str(Path(model_id).resolve()) if model_id != "demo" and Path(model_id).is_dir() else model_id
    return wrap(model, tokenizer, known_as, fingerprint)


def wrap(
    model: Any, tokenizer: Any | None = None, model_id: str | None = None, fingerprint: str | None = None
) -> LoadedModel:
    """Take a transformers model that is loaded already; its attention is switched to the registered function.

    `fingerprint` is the `weights_hash` of the checkpoint, where the model no longer holds its weights.
    Raises `UnsupportedModel` for an architecture that is not served exactly.
    """
    shape = shape_of(model.config)
    activate(model.eval())
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"a model in {dtype} cannot be stored; load it as one of: {', '.join(DTYPES)}")
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        model_id=model_id or model.config._name_or_path or model.config.model_type,
        shape=shape,
        config_hash=config_hash(model.config),
        weights_hash=fingerprint or weights_hash(model),
        tokenizer_hash=tokenizer_hash(tokenizer),
        rope=rope_parameters(model.config),
        dtype=dtype,
        device=model.device,
    )


def pick_device(device: str) -> torch.device:
    """`auto` is a CUDA device where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"unknown device '{device}'; choose one of: auto, cpu, cuda, cuda:0") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ConfigError(f"device '{device}' is not served; choose one of: auto, cpu, cuda, cuda:0")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device '{device}' is not there: torch finds no such CUDA device; use --device cpu"
        )
    return chosen


def config_hash(config: Any) -> str:
    """SHA-256 of what in the config shapes keys and values; the weights have a hash of their own."""
    fields = {name: getattr(config, name, None) for name in _SHAPING}
    rope = rope_parameters(config)
    sets = {name: value for name, value in rope.items() if isinstance(value, dict)} or {"": rope}
    fields["rope"] = {kind: {name: one.get(name) for name in _ROPE} for kind, one in sets.items()}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def weights_hash(model: Any) -> str:
    """SHA-256 over 32 evenly spread elements of every weight: tells a fine-tuned model from its base."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = weight.detach().reshape(-1)
        if not flat.numel():
            continue
        # In integers: float32 cannot tell neighbours apart beyond 2**24 elements.
        picked = torch.arange(32, device=flat.device) * (flat.numel() - 1) // 31
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        digest.update(flat[picked].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def tokenizer_hash(tokenizer: Any | None) -> str:
    """SHA-256 of the vocabulary, the special tokens and the chat template; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    parts = [tokenizer.get_vocab(), tokenizer.special_tokens_map, tokenizer.chat_template]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # Left over from the last call, and no part of what the tokenizer is.
        parts.append({name: rule for name, rule in rules.items() if name not in ("truncation", "padding")})
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def source_of(model_id: str) -> str:
    """What transformers is to load: the shipped model's folder for `demo`."""
    return str(files("offload_decode") / "demo_model") if model_id == "demo" else model_id


def _checkpoint_bytes(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return sum(
            weight.numel() * weight.element_size()
            for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
