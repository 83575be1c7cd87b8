"""Answers held to a JSON schema, a regular expression or a grammar in Lark or GBNF, by llguidance: which
tokens may come next.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from offload_decode.models.loading import LoadedModel
from offload_decode.server.requests import WrongField

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BYTES = 128 * 1024
_MOST_GBNF = 16 * 1024
# As llguidance knows Lark, which takes a rule of GBNF called `start` for it.
_LARK = re.compile(r"^[ \t]*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
# A string, a set of characters, a comment, or the name of a rule that Lark keeps for itself. What is not
# closed goes to the end of the text, so that it is read once.
_START = re.compile(
    r'"(?:\\.?|[^"\\])*"?|\[(?:\\.?|[^\]\\])*\]?|#[^\n]*|(?<![\w-])(?i:start)(?![\w-])', re.DOTALL
)
_KEPT = 32  # compiled grammars of a tokenizer
_STATES = 20_000  # of a lexer, about 2 kB each
_STACK = 512 * 1024 * 1024
# A model that may write white space for ever sometimes does.
JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,16}"}


class Grammar:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, end: int):
        self._matcher = matcher
        self._end = end

    def allowed(self, vocabulary: int, ends: frozenset[int]) -> Tensor:
        """Which tokens may come next, `[vocabulary]` of bool on the host: `ends` only where the answer is
        complete. Raises `WrongField` where it takes too long to find out.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        known = np.unpackbits(bits, bitorder="little")
        # The library knows one end token.
        complete, known[self._end] = bool(known[self._end]), 0
        found = np.zeros(vocabulary, bool)
        found[: len(known)] = known[:vocabulary]
        found[[end for end in ends if end < vocabulary]] = complete
        return torch.from_numpy(found)

    def append(self, token: int) -> bool:
        """Take note of a token; whether the answer is complete, and nothing may follow. Raises `WrongField`
        for a token that is not allowed.
        """
        self._matcher.consume_token(token)
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = _sentence(self._matcher.get_error())
            raise WrongField(f"the grammar of this answer cannot be followed: {reason}")


def check_grammar(loaded: LoadedModel, grammar: Mapping[str, Any], param: str = "response_format") -> None:
    """Compile a grammar, which may take a second, so that `grammar_of` has it at once.

    Raises `WrongField` for one that is too long, that llguidance does not know, or that no answer can be held
    to with this model's tokenizer; `param` is the field that it came from.
    """
    try:
        _grammars(loaded).compiled(_written(grammar))
    except WrongField as error:
        raise WrongField(f"{param} cannot be used: {error}", param) from error


def grammar_of(loaded: LoadedModel, grammar: Mapping[str, Any]) -> Grammar:
    """A grammar at its beginning. Raises as `check_grammar`."""
    known = _grammars(loaded)
    return Grammar(known.compiled(_written(grammar)).deep_copy(), known.end)


class _Grammars:
    """Those of one tokenizer, the last ones that were used."""

    def __init__(self, tokenizer: Any):
        from llguidance import LLTokenizer

        ends = [tokenizer.eos_token_id, *tokenizer.all_special_ids]
        self.end = next((token for token in ends if token is not None), -1)
        if self.end < 0:
            raise WrongField("this model's tokenizer has no special token to end an answer with")
        try:
            of_this = LLTokenizer(_within(tokenizer), eos_token=self.end)
        except (AttributeError, ValueError) as error:
            raise WrongField("grammars cannot be followed with this model's tokenizer") from error
        self.compiled = lru_cache(_KEPT)(partial(_compiled, of_this))
        """What is given must not be advanced, only copied."""


_KNOWN: WeakKeyDictionary[Any, _Grammars] = WeakKeyDictionary()
_LOCK = threading.Lock()
_STACKS = threading.Lock()


def _grammars(loaded: LoadedModel) -> _Grammars:
    tokenizer = loaded.known_tokenizer
    with _LOCK:
        known = _KNOWN.get(tokenizer)
    if known is None:
        made = _Grammars(tokenizer)  # it takes a second, while others go on
        with _LOCK:
            known = _KNOWN.setdefault(tokenizer, made)
    return known


def _within(tokenizer: Any) -> str:
    """The tokenizer as it treats what stands within a text: it puts no space before it."""
    known = json.loads(tokenizer.backend_tokenizer.to_str())
    known["padding"] = known["truncation"] = None
    before = known["pre_tokenizer"] or {}
    for part in before.get("pretokenizers", [before]):
        if "add_prefix_space" in part:
            part["add_prefix_space"] = False
    return json.dumps(known)


def _written(grammar: Mapping[str, Any]) -> str:
    from llguidance import LLMatcher

    match dict(grammar):
        case {"json_object": True}:
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=JSON_OPTIONS)
        case {"json_schema": Mapping() as schema}:
            try:
                text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise WrongField("the schema is not JSON") from error
            try:
                return LLMatcher.grammar_from_json_schema(_short(text), defaults=JSON_OPTIONS)
            except ValueError as error:
                raise WrongField("the schema is nested too deeply") from error
        case {"regex": str(regex)}:
            return LLMatcher.grammar_from_regex(_short(regex))
        case {"lark": str(lark)}:
            return LLMatcher.grammar_from_lark(_short(lark))
        case {"gbnf": str(gbnf)}:
            return LLMatcher.grammar_from_lark(_lark(_short(gbnf)))
    raise WrongField("it must be a JSON schema, a JSON object, a regular expression or a grammar")


def _lark(gbnf: str) -> str:
    """A grammar in Lark as it is, one in llama.cpp's GBNF as Lark. Raises `WrongField`."""
    from llguidance.gbnf_to_lark import any_to_lark

    # Empty lines and rules cost that function the square of their number.
    if len(gbnf) > _MOST_GBNF:
        raise WrongField(f"the grammar is longer than {_MOST_GBNF // 1024} KiB")
    try:
        return any_to_lark(re.sub(r"\n(?:[ \t\r]*\n)+", "\n", _without_start(gbnf)))
    except RecursionError as error:
        raise WrongField("the grammar is nested too deeply") from error
    except Exception as error:  # bare ones, with a reason
        raise WrongField(f"the grammar is not GBNF: {_sentence(str(error))}") from error


def _without_start(gbnf: str) -> str:
    """GBNF in which no rule is called `start`, in no case of letters: Lark calls the first one so."""
    if _LARK.search(gbnf):
        return gbnf
    taken, named = gbnf.lower().replace("_", "-"), dict[str, str]()
    free = (name for number in count() if (name := f"start-{number}") not in taken)

    def renamed(found: re.Match[str]) -> str:
        name = found[0]
        if name.lower() != "start":
            return name
        if name not in named:
            named[name] = next(free)
        return named[name]

    return _START.sub(renamed, gbnf)


def _short(text: str) -> str:
    if len(text.encode(errors="replace")) > MOST_BYTES:
        raise WrongField(f"it is longer than {MOST_BYTES // 1024} KiB")
    return text


def _compiled(tokenizer: Any, written: str) -> LLMatcher:
    """Compiled on a stack that the longest chain of references in `MOST_BYTES` does not fill: llguidance
    follows them by recursion, and ends the process where it has no room left. Raises `WrongField`.
    """
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
    with ThreadPoolExecutor(1) as pool:
        with _STACKS:
            before = threading.stack_size(_STACK)
            try:
                running = pool.submit(LLMatcher, tokenizer, written, limits=limits, log_level=0)
            finally:
                threading.stack_size(before)
        matcher = running.result()
    trial = matcher.deep_copy()
    if not trial.is_error():
        trial.compute_bitmask()  # some lead nowhere
    if trial.is_error():
        raise WrongField(_sentence(trial.get_error()))
    return matcher


def _sentence(error: str) -> str:
    """What llguidance says, on one line and without the lines that point into the text."""
    lines = [line for line in error.splitlines() if line.strip(" ^") and "|" not in line[:8]]
    reason = " ".join(" ".join(lines).replace("<non-verbose/>", "").split())[:300].rstrip(".")
    return reason if " " in reason else f"no text fits it ({reason})"
