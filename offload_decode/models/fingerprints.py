"""The fingerprints by which a store knows its model: of the config, of the weights and of the tokenizer.

The first two begin with their version and a colon: a store of a release that hashed less is told apart from
a store of another model.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offload_decode.common.rows import threads
from offload_decode.common.slow_work import SlowWork
from offload_decode.hf.positions import DEPENDENT, depends_on_length, rope_parameters, rotations
from offload_decode.store.format import FINGERPRINT_VERSION

_BLOCK = 64 << 20  # bytes that one thread hashes at a time, and that a device's weights are copied in

_CANNOT_MATTER = frozenset(
    [
        # Names, and what the file was written with. The dtype is compared by itself.
        "_name_or_path", "architectures", "transformers_version", "auto_map", "dtype", "torch_dtype",
        "problem_type", "id2label", "label2id", "num_labels",
        # How the weights are kept: they are hashed with it.
        "quantization_config",
        # How a model is called, and what it returns beside the logits.
        "use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits",
        "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "_experts_implementation", "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp",
        # Where an answer ends, and how a batch is padded.
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
        # Training.
        "initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout",
        "router_aux_loss_coef", "router_jitter_noise",
        # Counted below for RoPE that depends on a length.
        "max_position_embeddings",
    ]
)  # fmt: skip

# Values that releases of transformers without these fields use.
_BEFORE_THE_FIELD: dict[str, dict[str, Any]] = {"gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}}

# Fields of the served architectures in transformers 5.5 to 5.24. One that a later release adds counts where
# it differs from that release's default.
_KNOWN = frozenset(
    [
        "_sliding_window_pattern", "attention_bias", "attention_multiplier", "attn_logit_softcapping",
        "decoder_sparse_step", "embedding_multiplier", "final_logit_softcapping", "head_dim", "hidden_act",
        "hidden_activation", "hidden_size", "intermediate_size", "layer_norm_eps", "layer_types",
        "logit_scale", "logits_scaling", "max_window_layers", "mlp_bias", "mlp_only_layers", "model_type",
        "moe_intermediate_size", "no_rope_layer_interval", "no_rope_layers", "norm_topk_prob",
        "num_attention_heads", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
        "num_local_experts", "original_max_position_embeddings", "partial_rotary_factor",
        "query_pre_attn_scalar", "residual_multiplier", "rms_norm_eps", "rope_parameters", "sliding_window",
        "swiglu_alpha", "swiglu_limit", "tie_word_embeddings", "use_bidirectional_attention",
        "use_sliding_window", "vocab_size",
    ]
)  # fmt: skip


def config_hash(config: Any) -> str:
    """SHA-256 of the fields of a text config that can change numbers: the same in every release."""
    return f"{FINGERPRINT_VERSION}:{hashlib.sha256(_json(_neutral(config)).encode()).hexdigest()}"


def weights_hash(model: Any) -> str:
    """SHA-256 of every byte of every weight, with its name, shape and dtype; and of rotary frequencies, where
    they are not those of the config.

    Two weights that share their memory are read once. Tells apart models of which one number differs.
    """
    whole = _hashed(sorted(_plain_tensors(model.state_dict())))
    for name, rotation in _rotations(model):
        whole.update(f"{name} {rotation.dtype}\n".encode() + rotation.float().numpy().tobytes())
    return f"{FINGERPRINT_VERSION}:{whole.hexdigest()}"


def files_hash(files: Sequence[Path], quantization: dict[str, Any]) -> str:
    """SHA-256 of a quantized checkpoint's safetensors (bytes, names, shapes, dtypes) and quantization."""
    from safetensors import safe_open

    with ExitStack() as stack:
        paths = (path for path in files if path.suffix == ".safetensors")
        opened = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        whole = _hashed(sorted((name, file.get_tensor(name)) for file in opened for name in file.keys()))  # noqa: SIM118
    whole.update(_json(quantization).encode())
    return f"{FINGERPRINT_VERSION}:{whole.hexdigest()}"


def hash_of(named: Sequence[tuple[str, Tensor]]) -> str:
    """SHA-256 of tensors: bytes, names, shapes, dtypes."""
    return str(_hashed(named).hexdigest())


def file_hash(path: Path) -> str:
    """SHA-256 of a GGUF file."""
    whole = _hashed([("", torch.from_numpy(np.memmap(path, np.uint8, "c")))])
    return f"{FINGERPRINT_VERSION}:{whole.hexdigest()}"


def _hashed(named: Sequence[tuple[str, Tensor]]) -> Any:
    weights = [(name, weight, _blocks(weight)) for name, weight in named]
    blocks = {_place(block): block for _, _, own in weights for block in own}
    digests: dict[tuple[Any, ...], bytes] = {}
    work = SlowWork("hashing the weights, once on this machine", sum(map(len, blocks.values())))

    def digest(place: tuple[Any, ...]) -> None:
        digests[place] = hashlib.sha256(blocks[place].cpu().numpy().data).digest()
        work.add(len(blocks[place]))

    if blocks:
        threads.run(digest, list(blocks))
    whole = hashlib.sha256()
    for name, weight, own in weights:
        whole.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for block in own:
            whole.update(digests[_place(block)])
    return whole


def _plain_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name, those that are made of others (torchao's) in their parts."""
    for name, weight in state.items():
        if hasattr(weight, "__tensor_flatten__"):
            parts, _ = weight.__tensor_flatten__()
            yield from _plain_tensors({f"{name}.{part}": getattr(weight, part) for part in parts})
        elif isinstance(weight, Tensor):
            yield name, weight


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


def _neutral(config: Any) -> dict[str, Any]:
    """The config as every release of transformers would state it."""
    stated = config.to_dict()
    usual = type(config)().to_dict()
    fields = {
        name: value
        for name, value in stated.items()
        if name not in _CANNOT_MATTER and (name in _KNOWN or name not in usual or value != usual[name])
    }
    fields = _BEFORE_THE_FIELD.get(config.model_type, {}) | fields
    sets = rotations(rope_parameters(config))
    if any(one.get("rope_type") in DEPENDENT for one in sets):
        fields["max_position_embeddings"] = config.max_position_embeddings
    # Some releases state it twice.
    if all(one.get("partial_rotary_factor") == fields.get("partial_rotary_factor") for one in sets):
        fields.pop("partial_rotary_factor", None)
    return fields


def _rotations(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Rotary frequencies that are not the config's: `model.to(bfloat16)` rounds them, loading does not."""
    for path, module in model.named_modules():
        # One that changes with the length of a text is known by what it changes back to.
        kind = "original_inv_freq" if depends_on_length(module) else "inv_freq"
        held = {name: own.cpu() for name, own in module.named_buffers(recurse=False) if kind in name}
        if not held:
            continue
        with torch.device("cpu"):
            usual = dict(type(module)(config=model.config).named_buffers())
        for name, own in sorted(held.items()):
            # Powers differ in their last bits between processors; a rounding to bfloat16 is 20 times as much.
            if own.dtype != torch.float32 or not torch.allclose(own, usual[name], rtol=1e-4, atol=0):
                yield f"{path}.{name}", own


def _json(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, default=str)


def _plain(value: Any) -> Any:
    """Without fields that are None, and whole numbers as integers: releases and files differ in both."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items() if one is not None}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _blocks(weight: Tensor) -> tuple[Tensor, ...]:
    """A weight's bytes, uint8 `[n]`, in pieces."""
    if not weight.numel():
        return ()
    return torch.split(weight.detach().contiguous().reshape(-1).view(torch.uint8), _BLOCK)


def _place(block: Tensor) -> tuple[Any, ...]:
    return block.device, block.data_ptr(), block.numel()


def find_tokenizer(name: str, tokenizer: Any) -> None:
    """Let `AutoTokenizer.from_pretrained(name)` find `tokenizer`, for libraries that go by names."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained

    def from_pretrained(cls: Any, wanted: Any, *args: Any, **options: Any) -> Any:
        return tokenizer if wanted == name else found(wanted, *args, **options)

    AutoTokenizer.from_pretrained = classmethod(from_pretrained)
