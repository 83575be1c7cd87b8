"""How corpus, question and answer stand in a prompt, so that the corpus can be prefilled before any
question.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload_decode.errors import ModelError

_CORPUS, _QUESTION, _ANSWER, _NEXT = "\x02corpus\x03", "\x02question\x03", "\x02answer\x03", "\x02next\x03"
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Prompt:
    """`before corpus between question after answer turn question …`; `template` is `chat` or `plain`."""

    template: str
    before: str
    between: str
    after: str
    turn: str

    def first(self, tokenizer: Any, question: str) -> list[int]:
        """Token ids of what follows the corpus."""
        return _encode_around(tokenizer, self.between, question, self.after)

    def next(self, tokenizer: Any, question: str) -> list[int]:
        """Token ids of what follows an answer."""
        return _encode_around(tokenizer, self.turn, question, self.after)


def prompt_for(tokenizer: Any) -> Prompt:
    """The tokenizer's chat template split around the corpus, or a plain form for models without one."""
    from jinja2 import TemplateError

    if not getattr(tokenizer, "chat_template", None):
        between = f"{_BETWEEN}Question: "
        return Prompt("plain", tokenizer.bos_token or "", between, "\nAnswer:", between)
    user = {"role": "user", "content": _CORPUS + _BETWEEN + _QUESTION}
    turns = [user, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _NEXT}]
    try:
        one = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        two = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before, rest = one.split(_CORPUS)
        between, after = rest.split(_QUESTION)
        turn = two.split(_ANSWER)[1].split(_NEXT)[0]
    except (ValueError, IndexError, TemplateError) as error:
        raise ModelError(
            "the chat template of this tokenizer fails or changes the user's text, so the corpus cannot "
            "be prefilled before the question; use a tokenizer without a chat template or with another one"
        ) from error
    return Prompt("chat", before, between, after, turn)


def encode(tokenizer: Any, template: str) -> list[int]:
    """Token ids of a piece of a template; special tokens in it are recognised, none are added."""
    return list(tokenizer.encode(template, add_special_tokens=False))


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's text: a special token in it (`</s>`) is its letters, not the token."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True, verbose=False))


def _encode_around(tokenizer: Any, before: str, text: str, after: str) -> list[int]:
    # In one piece where that is safe: white space at the seams is then split as the model knows it.
    if not any(token in text for token in tokenizer.get_added_vocab()):
        return encode(tokenizer, before + text + after)
    return encode(tokenizer, before) + encode_text(tokenizer, text) + encode(tokenizer, after)
