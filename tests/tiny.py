"""Tiny models with random weights, one for each family, and a byte-level tokenizer: all built offline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def text_model(seed: int = 0, family: str = "llama", **changes: Any) -> Any:
    """A tiny model whose vocabulary is that of `tiny_tokenizer`."""
    return tiny_model(family, seed, vocab_size=259, **changes)


def saved_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """A checkpoint of `text_model` with its tokenizer."""
    text_model(seed, family).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def text_store(folder: Path, text: str, family: str = "llama", chunk: int = 64, **settings: Any) -> Path:
    """`folder`, with a checkpoint in `model`, a text in `corpus.txt` and its `store`."""
    from offload_decode.prefill_jobs.job import Settings, prefill

    (folder / "corpus.txt").write_text(text)
    model, how = saved_model(folder / "model", family), Settings(options={"chunk": chunk}, **settings)
    prefill(str(folder / "corpus.txt"), model=str(model), out=folder / "store", settings=how)
    return folder
