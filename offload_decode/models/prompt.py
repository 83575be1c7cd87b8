"""How corpus, question and answer form a prompt, so that the corpus can be prefilled before any question.

Their tokens are those of one encoding of the whole: documents and questions meet at a gap of white space, and
the join between the stored tokens and those that follow lies before or after it, where this tokenizer ends a
token whatever follows. Tokenizers treat the start of a text in their own way (SentencePiece puts a space
before it), so a piece is encoded behind an anchor, a letter whose tokens are then removed.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, Self

from offload_decode.common.errors import ConfigError, ModelError, TextRefused
from offload_decode.common.files import without_surrogates
from offload_decode.common.memory import is_out_of_memory
from offload_decode.hf.user_cache import cached

LONGEST_TEMPLATE = 1 << 20
"""Characters of a chat template: those of models have some tens of thousands at most."""
LONGEST_WRITTEN = 1 << 16
"""Characters that a template may write beside the messages."""
ANCHORS = ("a", ".", "0")

# With characters that a template might change in a text.
_CORPUS = "\x02Corpus\n\n & 'it'\x03"
_QUESTION, _ANSWER, _NEXT = "\x02question\x03", "\x02answer\x03", "\x02next\x03"

_PLAIN_ASK = "Question:"  # where there is no chat template

_BLANK = r"\s▁ĠĊĉčċČ"  # as texts, as SentencePiece and as bytes spell white space
_ENDS = ("end", "end.", "End)", "3", "é", "字", "“…”", "🙂", "x_", "}")
_STARTS = ("Who", "who", "Question: Who", "Document: a", "12", "(a)", "“it”", "é", "字", "🙂", "_x", "- a")


class TemplateRefuses(Exception):
    """The error that a template, or Jinja, raised for messages."""


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
    """The text of messages, as `tokenizer.apply_chat_template` writes it.

    A template is a program that came with a checkpoint. It runs in Jinja's sandbox, which keeps it from files
    and from Python and bounds its ranges, but not its time: take models from people you trust. Raises
    `TemplateRefuses`, and `ModelError` where the template is, or writes, too much.
    """
    if len(str(tokenizer.chat_template)) > LONGEST_TEMPLATE:
        raise ModelError(
            f"the chat template of this model has more than {LONGEST_TEMPLATE:,} characters: mend it, or "
            "fetch the checkpoint again"
        )
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False, **more))
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and raises what it likes
        raise TemplateRefuses(str(error)[:LONGEST_WRITTEN]) from error
    # Some put a message there twice, or escaped.
    own = len(text) - LONGEST_WRITTEN
    if own > 0 and own > 4 * len(json.dumps([list(messages), more])):
        raise ModelError(
            f"the chat template of this model writes more than {LONGEST_WRITTEN:,} characters of its own: "
            "mend it, or fetch the checkpoint again"
        )
    return text


class Piece(NamedTuple):
    """Text of a template, or of the user: special tokens in a user's text are plain letters."""

    text: str
    users: bool = False


def encode(tokenizer: Any, text: str, letters: bool = False) -> list[int]:
    """Token ids of a text; special tokens in it are recognised, or plain `letters`, and none are added. Half
    a surrogate pair is U+FFFD. Raises `TextRefused`.
    """
    # A tokenizer's defaults may differ, so they are passed each time.
    options = {"add_special_tokens": False, "split_special_tokens": letters, "verbose": False}
    try:
        return list(tokenizer.encode(without_surrogates(text), **options))
    except BaseException as error:
        if not is_failure(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise TextRefused(
            f"the tokenizer fails on the text ({reason}): change the text, or fetch the checkpoint again"
        ) from error


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a user's text: a special token in it (`</s>`) is its letters, not the token."""
    special = special_tokens(tokenizer)
    ids = encode(tokenizer, text, letters=True)
    if special is None or not special.search(text):
        return ids
    added = tokenizer.added_tokens_decoder.items()
    special_ids = {number for number, token in added if token.special} - {tokenizer.unk_token_id}
    if special_ids.isdisjoint(ids):
        return ids
    # The tokenizer's model has the special token as a word: it must not see it whole.
    cuts = [0, *(found.start() + 1 for found in special.finditer(text)), len(text)]
    parts = (text[start:end] for start, end in pairwise(cuts))
    return [token for part in parts for token in encode(tokenizer, part, letters=True)]


def is_failure(error: BaseException) -> bool:
    """Whether a library failed, other than for want of memory. The error of a panic in Rust is recognised by
    its name, and is no `Exception`.
    """
    failed = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return failed and not is_out_of_memory(error)


def encode_first(tokenizer: Any, pieces: Sequence[Piece], anchor: str = "") -> list[int]:
    """Token ids of an anchor and pieces with which a text begins: in one encoding, unless a user spells a
    special token.
    """
    special = special_tokens(tokenizer)
    parts = [Piece(anchor), *pieces]
    whole = "".join(piece.text for piece in parts)
    if special is None or _places(special, [Piece(whole)]) == _places(special, parts):
        return encode(tokenizer, whole)
    ids: list[int] = []
    for text, token in _runs(tokenizer, special, parts):
        if token is not None:
            ids.append(token)
        elif text:
            ids += _behind_a_special(tokenizer, ids[-1], text) if ids else encode_text(tokenizer, text)
    return ids


def encode_after(tokenizer: Any, before: str, pieces: Sequence[Piece]) -> list[int]:
    """Token ids of pieces in a text that went on until `before`, the last of what was encoded ahead of them.

    Where the tokens of `before` depend on what follows, they are those of the pieces alone.
    """
    for anchor in ANCHORS:
        head = encode(tokenizer, anchor + before)
        ids = encode_first(tokenizer, pieces, anchor + before)
        if ids[: len(head)] == head and tokenizer.unk_token_id not in head:
            return ids[len(head) :]
    return encode_first(tokenizer, pieces)


def special_tokens(tokenizer: Any) -> re.Pattern[str] | None:
    """Matches the special tokens, None where there are none; the longest first, as tokenizers do."""
    known = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    texts = sorted({text for text in known if text}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, texts))) if texts else None


def _places(special: re.Pattern[str], parts: Sequence[Piece]) -> list[tuple[int, str]]:
    """Where templates, and not users, write special tokens, and which."""
    places, start = [], 0
    for part in parts:
        if not part.users:
            places += [(start + found.start(), found[0]) for found in special.finditer(part.text)]
        start += len(part.text)
    return places


def _runs(tokenizer: Any, special: re.Pattern[str], parts: list[Piece]) -> Iterator[tuple[str, int | None]]:
    """The text between the templates' special tokens, and these, in turn."""
    text, eats = "", False
    for part in parts:
        end = 0
        for found in special.finditer(part.text) if not part.users else ():
            token = tokenizer.convert_tokens_to_ids(found[0])
            flags = tokenizer.added_tokens_decoder[token]
            text += part.text[end : found.start()]
            text = text.lstrip() if eats else text
            yield (text.rstrip() if flags.lstrip else text), None
            yield "", token
            text, eats, end = "", flags.rstrip, found.end()
        text += part.text[end:]
    yield (text.lstrip() if eats else text), None


def _behind_a_special(tokenizer: Any, token: int, text: str) -> list[int]:
    """Token ids of a user's text as this tokenizer goes on behind a special token."""
    special = tokenizer.convert_ids_to_tokens(token)
    plain = [encode(tokenizer, special + probe)[1:] for probe in ("is", "\nis", " is")]
    for anchor in ("", *ANCHORS):
        head = encode_text(tokenizer, anchor)
        probed = [encode_text(tokenizer, f"{anchor}{probe}") for probe in ("is", "\nis", " is")]
        if plain == [ids[len(head) :] for ids in probed]:
            return encode_text(tokenizer, anchor + text)[len(head) :]
    return encode_text(tokenizer, text)


class Join(NamedTuple):
    """The text between documents and before a question; whether it is stored with the text before it."""

    gap: str
    stored: bool


# Many put full stop and line breaks in one token, some whatever is not a space.
_JOINS = (Join("\n\n", stored=False), Join("\n\n", stored=True), Join(" \n\n", stored=False))


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
    join: Join
    ask: str
    after: str
    turn: str
    again: str
    trims: bool

    def opened(self, before: object) -> Self:
        """The prompt of a store whose manifest has this `opening`, which may name another day."""
        return replace(self, before=before) if isinstance(before, str) else self

    def document(self, tokenizer: Any, text: str, first: bool) -> list[int]:
        """Token ids of a document: the `first` opens the prompt. Raises `TextRefused`."""
        stored, kept = self.gap
        if first:
            document = Piece(text.strip() if self.trims else text.rstrip(), users=True)
            return [*self.opening, *encode_first(tokenizer, [Piece(self.before), document, Piece(stored)])]
        return encode_after(tokenizer, stored, [Piece(kept), Piece(text.rstrip(), users=True), Piece(stored)])

    def first(self, tokenizer: Any, question: str, begun: str = "") -> list[int]:
        """Token ids of what follows the corpus; `begun` is how the answer begins."""
        stored, kept = self.gap
        asked = [Piece(kept + self.ask), Piece(question.strip(), users=True), Piece(self.after)]
        return encode_after(tokenizer, stored, [*asked, *_begun(self.after, begun)])

    def next(self, tokenizer: Any, question: str, begun: str = "") -> list[int]:
        """Token ids of what follows an answer; `begun` is how the next one begins."""
        asked = [Piece(self.turn), Piece(question.strip(), users=True), Piece(self.again)]
        return encode_after(tokenizer, "", [*asked, *_begun(self.again, begun)])

    def closing(self, tokenizer: Any) -> int | None:
        """The token of the tokenizer's own by which the template closes an answer, where it does: a special
        one, or one that was only added, as files of some checkpoints have it.
        """
        turn = self.turn.lstrip()
        added = ((str(token), number) for number, token in tokenizer.added_tokens_decoder.items())
        found = [(len(text), number) for text, number in added if text and turn.startswith(text)]
        return max(found)[1] if found else None

    @property
    def gap(self) -> tuple[str, str]:
        """The gap where it is stored, and where it is not."""
        return (self.join.gap, "") if self.join.stored else ("", self.join.gap)


def _begun(after: str, begun: str) -> list[Piece]:
    """How an answer begins, without a second space where the prompt ends in white space already."""
    text = begun.lstrip() if after[-1:].isspace() else begun
    return [Piece(text, users=True)] if text else []


def next_turn(tokenizer: Any) -> str:
    """How a model goes on to write the next question itself, where no special token ends its answers."""
    return "" if getattr(tokenizer, "chat_template", None) else f"\n{_PLAIN_ASK}"


def prompt_for(tokenizer: Any, known: str = "", options: Mapping[str, Any] = MappingProxyType({})) -> Prompt:
    """The tokenizer's chat template split around the corpus, or a plain form for models without one.

    With `known`, the tokenizer's hash, how they are joined is kept in the user's cache. `options`: variables
    of the template, such as `enable_thinking`.
    """
    join = _known_join(tokenizer, known) if known else _join_of(tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        ask, after = f"{_PLAIN_ASK} ", "\nAnswer:"
        turn = join.gap + ask
        return Prompt("plain", opening_of(tokenizer), "", join, ask, after, turn, after, False)

    try:
        try:
            return _chat(tokenizer, join, str, options)
        except (TemplateRefuses, ValueError, IndexError):
            return _chat(tokenizer, join, _in_parts, options)
    except (TemplateRefuses, ValueError, IndexError) as error:
        raise ModelError(
            "the chat template of this tokenizer fails or changes the user's text, so the corpus cannot "
            "be prefilled before the question: use a tokenizer without a chat template, or with another "
            "one"
        ) from error


def _in_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _chat(
    tokenizer: Any,
    join: Join,
    content: Callable[[str], Any],
    options: Mapping[str, Any],
    system: str | None = None,
) -> Prompt:
    """A chat template split around the corpus, where `content` is how it takes a text; with a `system`
    message, or the template's own where it is None.
    """
    first = [] if system is None else [{"role": "system", "content": content(system)}]

    def written(*texts: str) -> str:
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": content(text)} for role, text in zip(roles, texts, strict=False)]
        return rendered(tokenizer, [*first, *turns], add_generation_prompt=True, **options)

    asked = _CORPUS + join.gap + _QUESTION
    before, after = written(asked).split(asked)
    turn, again = written(asked, _ANSWER, _NEXT).split(_ANSWER)[1].split(_NEXT)
    trims = f" \n{asked}" not in written(f" \n{asked}")
    return Prompt("chat", (), before, join, "", after, turn, again, trims)


def with_system(tokenizer: Any, prompt: Prompt, system: str) -> Prompt:
    """The prompt with a system message before the corpus, in place of the template's own. Raises
    `ConfigError` where the template has no place for one there.
    """
    found = None
    if prompt.template == "chat":
        for content in (str, _in_parts):
            with suppress(TemplateRefuses, ValueError, IndexError):
                found = found or _chat(tokenizer, prompt.join, content, {}, system)
    if found is None or system.strip() not in found.before or replace(found, before=prompt.before) != prompt:
        raise ConfigError(
            "this model's template has no place for a system message before the corpus: leave it out"
        )
    return found


def opening_of(tokenizer: Any) -> tuple[int, ...]:
    """Tokens that this tokenizer puts before any text: it may define a first token and not use it."""
    plain, whole = encode(tokenizer, "a"), list(tokenizer.encode("a"))
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return tuple(whole[:start])


def _known_join(tokenizer: Any, known: str) -> Join:
    def parse(given: Any) -> Join:
        return _JOINS[_JOINS.index(Join(*given))]

    of = ["join", version("tokenizers"), _JOINS, _ENDS, _STARTS, known]
    return cached(of, lambda: _join_of(tokenizer), list, parse)


def _join_of(tokenizer: Any) -> Join:
    """The first join that holds. Where none does, tokens may differ there from those of one encoding."""
    return next((join for join in _JOINS if _holds(tokenizer, join)), _JOINS[0])


def _holds(tokenizer: Any, join: Join) -> bool:
    """Whether no token of the vocabulary, and none of the tokenizer's rules, reaches across the join."""
    gap = "[ ▁Ġ]" if join.gap[0] == " " else "[\nĊ]"
    across = f"{gap}[^{_BLANK}]" if join.stored else f"[^{_BLANK}]{gap}"
    # All in one search, as they are some hundred thousand: a tab between two is blank, and no gap.
    if re.search(across, "\t".join(tokenizer.get_vocab())):
        return False
    for start in _STARTS:
        following = []
        for end in _ENDS:
            head = encode(tokenizer, end + join.gap if join.stored else end)
            whole = encode(tokenizer, end + join.gap + start)
            if whole[: len(head)] != head:
                return False
            following.append(whole[len(head) :])
        if any(ids != following[0] for ids in following):
            return False
    return True
