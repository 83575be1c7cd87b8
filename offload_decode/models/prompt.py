"""How corpus, question and answer stand in a prompt, so that the corpus can be prefilled before any
question.

Their tokens are those of one encoding of the whole: documents and questions meet at a gap of white space, and
the seam between what is stored and what follows lies before or after it, where this tokenizer ends a token
whatever follows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from offload_decode.errors import ModelError
from offload_decode.models.pieces import Piece, encode, encode_after, encode_first
from offload_decode.models.rendered import TemplateRefuses, rendered

# With what a template might change in a text.
_CORPUS = "\x02Corpus\n\n & 'it'\x03"
_QUESTION, _ANSWER, _NEXT = "\x02question\x03", "\x02answer\x03", "\x02next\x03"

_BLANK = r"\s▁ĠĊĉčċČ"  # as texts, as SentencePiece and as bytes spell white space
_ENDS = ("end", "end.", "End)", "3", "é", "字", "“…”", "🙂", "x_", "}")
_STARTS = ("Who", "who", "Question: Who", "Document: a", "12", "(a)", "“it”", "é", "字", "🙂", "_x", "- a")


class Seam(NamedTuple):
    """What stands between documents, and before a question; whether it is stored with what precedes it."""

    gap: str
    stored: bool


@dataclass(frozen=True)
class Prompt:
    """`opening before document gap document gap ask question after answer turn question again answer …`.

    `template` is `chat` or `plain`; `opening` are token ids that the tokenizer puts before any text. White
    space at the end of a document and around a question is left out; `trims`: so is that at the start of the
    corpus, as the template does.
    """

    template: str
    opening: tuple[int, ...]
    before: str
    seam: Seam
    ask: str
    after: str
    turn: str
    again: str
    trims: bool

    def corpus(self, tokenizer: Any, documents: Iterable[str]) -> Iterator[list[int]]:
        """Token ids of what stands before any question, document by document."""
        stored, _ = self.gap
        rest = iter(documents)
        for text in itertools.islice(rest, 1):
            document = Piece(text.strip() if self.trims else text.rstrip(), users=True)
            first = encode_first(tokenizer, [Piece(self.before), document, Piece(stored)])
            yield [*self.opening, *first]
        yield from self.further(tokenizer, rest)

    def further(self, tokenizer: Any, documents: Iterable[str]) -> Iterator[list[int]]:
        """Token ids of documents that follow others."""
        stored, kept = self.gap
        for text in documents:
            document = Piece(text.rstrip(), users=True)
            yield encode_after(tokenizer, stored, [Piece(kept), document, Piece(stored)])

    def first(self, tokenizer: Any, question: str, begun: str = "") -> list[int]:
        """Token ids of what follows the corpus; `begun` is how the answer begins."""
        stored, kept = self.gap
        asked = [Piece(kept + self.ask), Piece(question.strip(), users=True), Piece(self.after)]
        return encode_after(tokenizer, stored, [*asked, *_begun(self.after, begun)])

    def next(self, tokenizer: Any, question: str, begun: str = "") -> list[int]:
        """Token ids of what follows an answer; `begun` is how the next one begins."""
        asked = [Piece(self.turn), Piece(question.strip(), users=True), Piece(self.again)]
        return encode_after(tokenizer, "", [*asked, *_begun(self.again, begun)])

    @property
    def gap(self) -> tuple[str, str]:
        """The gap where it is stored, and where it is not."""
        return (self.seam.gap, "") if self.seam.stored else ("", self.seam.gap)


def _begun(after: str, begun: str) -> list[Piece]:
    """How an answer begins, without a second space where the prompt ends in white space already."""
    text = begun.lstrip() if after[-1:].isspace() else begun
    return [Piece(text, users=True)] if text else []


def prompt_for(tokenizer: Any) -> Prompt:
    """The tokenizer's chat template split around the corpus, or a plain form for models without one."""
    seam = _seam(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        turn, after = f"{seam.gap}Question: ", "\nAnswer:"
        return Prompt("plain", opening_of(tokenizer), "", seam, "Question: ", after, turn, after, False)

    try:
        try:
            return _chat(tokenizer, seam, lambda text: text)
        except (TemplateRefuses, ValueError, IndexError):
            return _chat(tokenizer, seam, lambda text: [{"type": "text", "text": text}])
    except (TemplateRefuses, ValueError, IndexError) as error:
        raise ModelError(
            "the chat template of this tokenizer fails or changes the user's text, so the corpus cannot "
            "be prefilled before the question; use a tokenizer without a chat template or with another one"
        ) from error


def _chat(tokenizer: Any, seam: Seam, content: Callable[[str], Any]) -> Prompt:
    """A chat template split around the corpus, where `content` is how it takes a text."""

    def written(*texts: str) -> str:
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": content(text)} for role, text in zip(roles, texts, strict=False)]
        return rendered(tokenizer, turns, add_generation_prompt=True)

    asked = _CORPUS + seam.gap + _QUESTION
    before, after = written(asked).split(asked)
    turn, again = written(asked, _ANSWER, _NEXT).split(_ANSWER)[1].split(_NEXT)
    trims = f" \n{asked}" not in written(f" \n{asked}")
    return Prompt("chat", (), before, seam, "", after, turn, again, trims)


def opening_of(tokenizer: Any) -> tuple[int, ...]:
    """What this tokenizer puts before a text of its own accord: a tokenizer may define a first token and not
    use it.
    """
    plain, whole = encode(tokenizer, "a"), list(tokenizer.encode("a"))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return tuple(whole[:start])


def _seam(tokenizer: Any) -> Seam:
    """The first that holds. Where none does, tokens may differ from those of one encoding, at this seam."""
    natural = Seam("\n\n", stored=False)
    # Many put full stop and line breaks in one token, some whatever is not a space.
    candidates = (natural, Seam("\n\n", stored=True), Seam(" \n\n", stored=False))
    return next((seam for seam in candidates if _holds(tokenizer, seam)), natural)


def _holds(tokenizer: Any, seam: Seam) -> bool:
    """Whether no token of the vocabulary, and none of the tokenizer's rules, reaches across the seam."""
    gap = "[ ▁Ġ]" if seam.gap[0] == " " else "[\nĊ]"
    across = f"{gap}[^{_BLANK}]" if seam.stored else f"[^{_BLANK}]{gap}"
    if any(re.search(across, token) for token in tokenizer.get_vocab()):
        return False
    for start in _STARTS:
        following = []
        for end in _ENDS:
            head = encode(tokenizer, end + seam.gap if seam.stored else end)
            whole = encode(tokenizer, end + seam.gap + start)
            if whole[: len(head)] != head:
                return False
            following.append(whole[len(head) :])
        if any(ids != following[0] for ids in following):
            return False
    return True
