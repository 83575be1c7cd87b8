"""Tiny models with random weights, one for each family, and a byte-level tokenizer: all built offline."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from offload_decode.testing.tiny import with_random_weights
from tests.families import config_of, model_class


def tiny_model(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A float32 model of a family with random weights, sinks and norms included; `changes` go to its
    config.
    """
    config = config_of(family, **changes)
    return with_random_weights(model_class(config), config, seed)


def tiny_tokenizer() -> Any:
    """Byte-level BPE without merges: every byte is one of 256 tokens, after three special ones. A text begins
    with `<s>`.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def let_models_write(monkeypatch: Any, text: str) -> None:
    """Every answer is this text, in the tokens of `tiny_tokenizer`, whatever is asked."""
    import torch

    from offload_decode.models.loading import Processors

    tokens = tiny_tokenizer().encode(text, add_special_tokens=False)

    def forced(self: Processors, logits: Any) -> Any:
        turns = self.__dict__.setdefault("turns", iter(tokens))
        return torch.full_like(logits, -torch.inf).index_fill(0, torch.tensor(next(turns)), 0.0)

    monkeypatch.setattr(Processors, "__call__", forced)


def text_model(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    """A tiny model whose vocabulary is that of `tiny_tokenizer`."""
    return tiny_model(family, seed, vocab_size=259, **changes)


def eager(model: Any) -> Any:
    """The same model, attending as transformers alone does."""
    model.set_attn_implementation("eager")
    return model


def saved(model: Any, folder: Path, **settings: Any) -> Path:
    """A checkpoint of a model with `tiny_tokenizer`."""
    model.save_pretrained(folder, **settings)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """A checkpoint of `text_model` with its tokenizer."""
    return saved(text_model(seed, family), folder)


def served_model(family: str = "llama", device: str = "cpu", **changes: Any) -> Any:
    """`text_model` with its tokenizer, as an engine takes them."""
    from offload_decode.models.loading import wrap

    return wrap(text_model(family=family, **changes).to(device), tiny_tokenizer())


def random_ids(count: int, seed: int = 0) -> Any:
    """Ids `[count]` of the tokenizer's letters, int32."""
    return np.random.default_rng(seed).integers(3, 250, count).astype(np.int32)


def token_store(folder: Path, loaded: Any, ids: Any, chunk: int | None = None, **settings: Any) -> Path:
    """`folder`, a store of ids that are one document's."""
    from offload_decode.prefill_jobs.job import Settings, prefill_tokens
    from offload_decode.types import Document

    options = {"chunk": chunk, "budget": settings.pop("budget", None)}
    how = Settings(options={name: own for name, own in options.items() if own is not None}, **settings)
    prefill_tokens(loaded, np.asarray(ids, np.int32), [Document("all", 0, len(ids))], folder, how)
    return folder


def text_store(folder: Path, text: str, family: str = "llama", chunk: int = 64, **settings: Any) -> Path:
    """`folder`, with a checkpoint in `model`, a text in `corpus.txt` and its `store`."""
    from offload_decode.prefill_jobs.job import Settings, prefill

    (folder / "corpus.txt").write_text(text)
    model, how = saved_model(folder / "model", family), Settings(options={"chunk": chunk}, **settings)
    prefill(str(folder / "corpus.txt"), model=str(model), out=folder / "store", settings=how)
    return folder


ADAPTED = "base_model.model.model.layers.0.self_attn.q_proj"


def plain_lora(folder: Path, config: dict[str, Any] | None = None, **weights: Any) -> Path:
    """A LoRA for `saved_model` as PEFT writes it: of rank 2 on one module, where nothing else is given."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    own = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], **(config or {})}
    (folder / "adapter_config.json").write_text(json.dumps(own))
    out, width = text_model().base_model.layers[0].self_attn.q_proj.weight.shape
    made = {f"{ADAPTED}.lora_A.weight": torch.ones(2, width), f"{ADAPTED}.lora_B.weight": torch.ones(out, 2)}
    save_file(weights or made, folder / "adapter_model.safetensors")
    return folder
