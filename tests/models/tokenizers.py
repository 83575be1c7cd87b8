"""Tokenizers of the kinds that there are, trained offline on a few lines."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEXT = [
    "The keeper of the lighthouse wrote: the lamp burns low. (He said so.)\n\nWho wrote it? The keeper.\n",
    "Question: What burns?\nAnswer: the lamp, the lamp of 1907.\n\nDocument: log.txt\nthe sea was calm;\n\n",
    "  indented lines,\n\n\n    and more of them.\n\nWhat was calm? What is the sea? Who is who? é 字 🙂\n",
] * 3
LINES = [line for text in TEXT for line in text.split("\n")]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _trained(tokenizer: Tokenizer, texts: list[str], **more: Any) -> Tokenizer:
    kind = trainers.UnigramTrainer if isinstance(tokenizer.model, models.Unigram) else trainers.BpeTrainer
    if kind is trainers.UnigramTrainer:
        more["unk_token"] = "<unk>"
    trainer = kind(vocab_size=420, special_tokens=SPECIAL, show_progress=False, **more)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _metaspace(scheme: str, newlines: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _trained(tokenizer, TEXT if newlines else LINES, initial_alphabet=["\n"])


def _prepend() -> Tokenizer:
    """As Llama 2: a normalizer that puts a space before the text, no pre-tokenizer, bytes for the rest."""
    merges, vocabulary = _learnt()
    names = [*SPECIAL, *BYTES]
    names += [token for token in vocabulary if token not in names]
    ids = {token: number for number, token in enumerate(names)}
    how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, **how))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def _learnt() -> tuple[list[tuple[str, str]], list[str]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    _trained(tokenizer, LINES)
    held = json.loads(tokenizer.to_str())["model"]
    return [tuple(merge) for merge in held["merges"]], list(held["vocab"])


def _byte_level(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, TEXT, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))


def _llama_3() -> Tokenizer:
    """Full stop and line breaks in one token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _trained(tokenizer, TEXT, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    assert ".ĊĊ" in tokenizer.get_vocab()
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _trained(tokenizer, LINES, initial_alphabet=["\n"])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "metaspace always": lambda: _metaspace("always"),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace never": lambda: _metaspace("never"),
    "metaspace, tokens across lines": lambda: _metaspace("always", newlines=True),
    "prepend": _prepend,
    "byte level": lambda: _byte_level(False),
    "byte level, prefix space": lambda: _byte_level(True),
    "llama 3": _llama_3,
    "unigram": _unigram,
}
BEGINNINGS = {"defined": None, "added": "<s> $A", "added at both ends": "<s> $A </s>"}


@cache
def tokenizer_of(kind: str, beginning: str = "added", template: str | None = None) -> Any:
    """A tokenizer of a kind, that treats its first token in one of the ways, with a chat template or none."""
    backend = KINDS[kind]()
    if BEGINNINGS[beginning]:
        backend.post_processor = processors.TemplateProcessing(
            single=BEGINNINGS[beginning],
            special_tokens=[(token, backend.token_to_id(token)) for token in ("<s>", "</s>")],
        )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    how = {"clean_up_tokenization_spaces": False, **names}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **how)
    tokenizer.chat_template = template
    return tokenizer
