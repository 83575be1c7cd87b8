"""The demo models' own tokenizer: byte-level BPE that cuts numbers into groups of up to three digits.

A number of seven digits is three tokens, and its first one tells it from a thousand others: what is looked
up is found, and told from what was listed before, by one token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 5120
NUMBERS = 1000  # times that every group of digits is shown: each becomes a token
BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['content'] + '\nAnswer:' }}{% endif %}"
    "{% endfor %}"
)


def samples(texts: Mapping[str, str], chars: int = 4_000_000, piece: int = 2000, seed: int = 0) -> list[str]:
    """Pieces of every text, as much of each as there is, up to the same number."""
    rng = random.Random(seed)
    most = chars // max(1, len(texts))
    found = []
    for text in texts.values():
        for _ in range(min(most, len(text)) // piece):
            at = rng.randrange(max(1, len(text) - piece))
            found.append(text[at : at + piece])
    return found


def train(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Learn the merges from texts. Encoding adds `<|bos|>`; any bytes round-trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    groups = " ".join(f"{n:0{size}}" for size in (1, 2, 3) for n in range(10**size))
    tokenizer.train_from_iterator([*texts, *[groups] * NUMBERS], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write `tokenizer.json`, its settings and the chat template."""
    tokenizer.save_pretrained(str(folder))
    settings = folder / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    for local in ("backend", "is_local", "local_files_only"):
        kept.pop(local, None)
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every version of transformers knows
    settings.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n")
