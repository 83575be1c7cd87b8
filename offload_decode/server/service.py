"""All that a server does, without HTTP: messages and texts in, events out. Methods may take milliseconds, and
where a store is opened first, longer: an event loop calls them in a thread.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from offload_decode.server.catalog import Catalog
from offload_decode.server.chat_prompt import (
    Spellings,
    chat_tokens,
    completion_tokens,
    keep_answer,
    text_tokens,
)
from offload_decode.server.jobs import Jobs, Releases
from offload_decode.server.loaded_models import Resident, Residents
from offload_decode.server.matching import Matcher
from offload_decode.server.metrics import Metrics
from offload_decode.server.prefix_cache import Tails
from offload_decode.server.requests import (
    Delta,
    Done,
    Emit,
    Event,
    Generation,
    Request,
    Settings,
    TooLarge,
    WrongField,
)
from offload_decode.server.sampling import check_generation, check_top
from offload_decode.server.scheduler import Scheduler, Ticket
from offload_decode.server.tool_calls import Calling, as_sent, choice_of

LETTERS = 16
"""Characters of a prompt for each of the tokens that it may have, which are 4 or so as a rule: tokenizers
take hundreds of bytes of memory for each, before anybody can count the tokens.
"""


@dataclass(frozen=True)
class Asked:
    """What a chat and a completion have in common; see `Request`."""

    id: str
    model: str
    generation: Generation = field(default_factory=Generation)
    n: int = 1
    selector: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    deadline_s: float | None = None
    cite: bool = False


@dataclass(frozen=True)
class ChatAsked(Asked):
    """A conversation whose next message is asked for: `messages`, `tools` and `tool_choice` as OpenAI's API
    has them.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None


@dataclass(frozen=True)
class CompletionAsked(Asked):
    """A text, or ids of tokens, that is to go on. prompt_logprobs: as `Request` has them."""

    prompt: str | Sequence[int] = ""
    prompt_logprobs: int | None = None


class Service:
    """Answers from the stores of a catalog. Thread-safe."""

    def __init__(self, catalog: Catalog, settings: Settings, metrics: Metrics | None = None):
        self.catalog = catalog
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.tails = Tails(settings.tail_bytes)
        self.residents = Residents(settings, self.tails.forget)
        self.scheduler = Scheduler(settings, self.tails, self.metrics)
        self.spellings = Spellings()
        self.matcher = Matcher()
        self.releases = Releases(self.scheduler.uses, self._close)
        self.jobs = Jobs(catalog, self.releases.released, settings.config.device, settings.read_only)
        catalog.subscribe(self._replaced)
        self._tell_metrics()

    def preload(self) -> None:
        """Begin to load the model of the first entry there is."""
        if entries := self.catalog.entries():
            self.residents.preload(entries[0])

    def chat(self, asked: ChatAsked, emit: Emit) -> Ticket:
        """Ask for the next message of a conversation; its events go to `emit`.

        Raises `NoSuchName`, `Loading`, `Busy`, `TooLarge`, `WrongField`, and what opening a store raises.
        """
        asked = self._matched(asked)
        with self.releases.asking(asked.model):
            resident = self._resident(asked)
            scope = resident.entry.model_id
            loaded, stored = resident.loaded, resident.stored
            choice = choice_of(loaded, asked.tools, asked.tool_choice, asked.generation.grammar)
            tools = asked.tools if choice else None
            self._check_letters(_letters(asked.messages) + _letters(tools or ()))
            tokens = chat_tokens(loaded, stored, asked.messages, tools, self.spellings, scope)
            keep = partial(keep_answer, loaded, asked.messages, spellings=self.spellings, scope=scope)
            emit = _Spelled(emit, keep)
            if choice is None:
                return self.scheduler.submit(self._request(asked, resident, tokens), resident, emit)
            if choice.grammar is not None:
                asked = replace(asked, generation=replace(asked.generation, grammar=choice.grammar))
            request = replace(self._request(asked, resident, tokens), shown=choice.shown)
            emit = Calling(emit, choice.form, choice.names)
            return self.scheduler.submit(request, resident, emit)

    def complete(self, asked: CompletionAsked, emit: Emit) -> Ticket:
        """Ask how a text goes on; its events go to `emit`. Raises as `chat`."""
        check_top(asked.prompt_logprobs, "logprobs")
        with self.releases.asking(asked.model):
            resident = self._resident(asked)
            if isinstance(asked.prompt, str):
                self._check_letters(len(asked.prompt))
            tokens = completion_tokens(resident.loaded, resident.stored, asked.prompt)
            request = self._request(asked, resident, tokens)
            request = replace(request, prompt_logprobs=asked.prompt_logprobs, raw=True)
            return self.scheduler.submit(request, resident, emit)

    def tokenize(
        self,
        model: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special: bool = True,
    ) -> list[int]:
        """Ids of a text, or of the prompt that messages become. Raises `NoSuchName`, `Loading`, `TooLarge`
        or `WrongField`.
        """
        entry = self.catalog.entry(model)
        loaded = self.residents.model(entry)
        self._check_letters(len(text or "") if messages is None else _letters(messages))
        if messages is not None:
            return chat_tokens(loaded, entry.path is not None, messages)
        return text_tokens(loaded, text or "", add_special)

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too. Raises as `tokenize`."""
        loaded = self.residents.model(self.catalog.entry(model))
        completion_tokens(loaded, True, tokens)  # which checks them
        return str(loaded.known_tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def pieces(self, model: str, tokens: Sequence[int]) -> list[str]:
        """Each token as a text of its own; as the vocabulary spells it where it is a part of a character."""
        tokenizer = self.residents.model(self.catalog.entry(model)).known_tokenizer
        texts = [str(tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in tokens]
        return [
            str(tokenizer.convert_ids_to_tokens(one)) if "\ufffd" in text else text
            for one, text in zip(tokens, texts, strict=True)
        ]

    def ready(self) -> bool:
        """Nothing is being loaded."""
        return not self.residents.loading()

    def close(self, grace_s: float = 0.0) -> None:
        """Answer nothing more; what is being written has so many seconds to end."""
        self.scheduler.close(grace_s)
        self.jobs.close()  # an append may have waited for answers to end
        self.residents.close()
        self.catalog.close()

    def _tell_metrics(self) -> None:
        """What can be looked up at any time."""
        most = max(self.settings.tail_bytes, 1)
        self.metrics.read(
            "kv_cache_usage_perc",
            "Share of the memory for turns that is in use, 0 to 1.",
            lambda: self.tails.stats.bytes / most,
        )
        self.metrics.read(
            "recall_at_build",
            "Recall that a store's indexes measured when they were built.",
            lambda: {one.name: one.recall for one in self.catalog.entries() if one.recall is not None},
        )
        self.metrics.read(
            "jobs",
            "Prefills and appends, by state.",
            lambda: Counter(j.state for j in self.jobs.jobs()),
            "state",
        )

    def _resident(self, asked: Asked) -> Resident:
        entry = self.catalog.entry(asked.model)
        if entry.path is None and (asked.selector or asked.options):
            raise WrongField(
                f"'{entry.name}' has no corpus of which tokens could be chosen: leave selector and options "
                "out",
                "selector",
            )
        return self.residents.get(entry, asked.selector, asked.options)

    def _matched(self, asked: ChatAsked) -> ChatAsked:
        """A chat with a model alone that begins with a stored text is one with its store."""
        entry = self.catalog.entry(asked.model)
        if entry.path is not None:
            return asked
        stores = [one for one in self.catalog.entries() if one.path and one.model_id == entry.model_id]
        found = self.matcher.match(self.residents.model(entry), asked.messages, stores)
        return replace(asked, model=found[0].name, messages=found[1]) if found else asked

    def _check_letters(self, letters: int) -> None:
        most = LETTERS * self.settings.max_prompt
        if letters > most:
            raise TooLarge(
                f"the prompt has {letters:,} characters, and this server takes {self.settings.max_prompt:,} "
                f"tokens, of at most {most:,} characters"
            )

    def _request(self, asked: Asked, resident: Resident, tokens: Sequence[int]) -> Request:
        wanted = asked.generation
        if wanted.max_tokens is None:
            wanted = replace(wanted, max_tokens=self.settings.max_tokens)
        check_generation(resident.loaded, wanted)
        return Request(
            id=asked.id,
            model=asked.model,
            tokens=tuple(tokens),
            generation=wanted,
            n=asked.n,
            deadline_s=min(asked.deadline_s or self.settings.deadline_s, self.settings.deadline_s),
            cite=asked.cite,
        )

    def _replaced(self, names: set[str]) -> None:
        for name in names:
            self._close(name)

    def _close(self, name: str) -> None:
        self.residents.forget(name)
        self.tails.drop(name)


def _letters(parts: Sequence[Mapping[str, Any]]) -> int:
    """Characters of messages or tools, as they are written in a request."""
    try:
        return len(json.dumps(parts, ensure_ascii=False))
    except RecursionError as error:
        raise WrongField("the messages or tools are nested too deeply") from error


class _Spelled:
    """Takes note of the tokens of answers, so that the client's next turn finds what was run for them."""

    def __init__(self, emit: Emit, keep: Callable[..., None]):
        self._emit = emit
        self._keep = keep
        self._written: dict[int, _Written] = defaultdict(_Written)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Delta):
            written = self._written[event.index]
            written.text += event.text
            written.tokens += (one.token for one in event.tokens)
            written.calls += map(as_sent, event.calls)
        elif isinstance(event, Done):
            for one in self._written.values():
                message = {"role": "assistant", "content": one.text}
                self._keep(message | ({"tool_calls": one.calls} if one.calls else {}), one.tokens)
        self._emit(event)


@dataclass
class _Written:
    """One answer so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
