"""The server without HTTP: messages and texts in, events out. Methods may take milliseconds, and where a
store is opened first, longer: an event loop calls them in a thread.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from offload_decode.engine.reading import DRAFT_TOKENS
from offload_decode.engine.text import decode
from offload_decode.planning.sizes import generated_bytes
from offload_decode.server.catalog import Catalog
from offload_decode.server.chat_prompt import (
    chat_tokens,
    completion_tokens,
    keep_answer,
    prompt_with,
    text_ids,
)
from offload_decode.server.jobs import Jobs
from offload_decode.server.joint_request import Joining
from offload_decode.server.loaded_models import LoadedModels, Releases, Target
from offload_decode.server.matching import Matcher
from offload_decode.server.messages import answer_object, read_messages
from offload_decode.server.metrics import Metrics
from offload_decode.server.prefix_cache import AnswerTokens, PrefixCache
from offload_decode.server.reasoning import marks_reasoning, reasoning_apart
from offload_decode.server.requests import (
    AnsweredRequest,
    AskOptions,
    Done,
    Emit,
    Event,
    Generation,
    Request,
    Settings,
    TooLarge,
    WrongField,
)
from offload_decode.server.sampling import check_generation
from offload_decode.server.scheduler import Scheduler, Ticket
from offload_decode.server.together import Reading, Together
from offload_decode.server.tool_calls import calls_apart, choice_of

LETTERS = 16
"""Characters of a prompt for each of the tokens that it may have, which are 4 or so as a rule: tokenizers
take hundreds of bytes of memory for each, before anybody can count the tokens.
"""


@dataclass(frozen=True)
class ChatRequest(AskOptions):
    """A conversation whose next message is asked for, in the fields of OpenAI's API. parallel_calls: an
    answer that must be calls may have several. template_options: of the chat template, its variables.
    separate_reasoning: tell a model's reasoning apart from its answer.
    """

    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    parallel_calls: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    separate_reasoning: bool = False


@dataclass(frozen=True)
class CompletionRequest(AskOptions):
    """A text, or ids of tokens, to be continued. prompt_logprobs: as `Request` has them."""

    prompt: str | Sequence[int] = ""
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class SearchRequest(AskOptions):
    """The passages of a store that a question attends to, so many at `most`, in place of an answer."""

    question: str = ""
    most: int = 5


class Service:
    """Answers from the stores of a catalog. Thread-safe."""

    def __init__(self, catalog: Catalog, settings: Settings, metrics: Metrics | None = None):
        self.catalog = catalog
        self.settings = settings
        self.metrics = metrics or Metrics()
        self.prefix_cache = PrefixCache(settings.generated_bytes)
        self.loaded_models = LoadedModels(settings, lambda key: self.prefix_cache.drop(key=key))
        self.scheduler = Scheduler(settings, self.prefix_cache, self.metrics)
        self.together = Together(catalog, self.loaded_models, settings)
        self.answer_tokens = AnswerTokens()
        self.matcher = Matcher()
        self.releases = Releases(self.scheduler.uses, self._close)
        self.jobs = Jobs(
            catalog,
            self.releases.released,
            settings.config.device,
            settings.read_only,
            settings.store_disk,
            self.scheduler.uses,
        )
        catalog.subscribe(lambda names: [*map(self._close, names)])
        self._tell_metrics()

    def preload(self) -> None:
        """Begin to load the model of the first entry there is."""
        if entries := self.catalog.entries():
            self.loaded_models.preload(entries[0])

    def chat(self, asked: ChatRequest, emit: Emit) -> Ticket:
        """Ask for the next message of a conversation; its events go to `emit`.

        Raises `NoSuchName`, `Loading`, `Busy`, `TooLarge`, `WrongField`, and what opening a store raises.
        """
        asked = self._matched(asked)
        named = asked.together if isinstance(asked.together, tuple) else ()
        with self.releases.asking(asked.model, *named):
            questions = _questions(asked)
            joining = self.together.joining(asked, questions[0], questions[-1])
            for one in () if joining is None else joining.targets:
                self.jobs.kept.use(one.entry)
            target = self._target(asked) if joining is None else joining.targets[0]
            scope = target.entry.model_id
            loaded, stored = target.loaded, target.stored
            grammar, parallel = asked.generation.grammar, asked.parallel_calls
            choice = choice_of(loaded, asked.tools, asked.tool_choice, grammar, parallel)
            tools = asked.tools if choice else None
            self._check_letters(_letters(asked.messages) + _letters(tools or ()))
            options = asked.template_options
            tokens = chat_tokens(loaded, stored, asked.messages, tools, self.answer_tokens, scope, options)
            keep = partial(keep_answer, loaded, asked.messages, answer_tokens=self.answer_tokens, scope=scope)
            emit = _recorded(emit, keep)
            more: dict[str, Any] = {"question": questions[-1]}
            if choice is not None:
                emit, more["shown"] = calls_apart(emit, choice.form, choice.names), choice.shown
                if choice.grammar is not None:
                    asked = replace(asked, generation=replace(asked.generation, grammar=choice.grammar))
            free = asked.generation.grammar is None and asked.messages[-1]["role"] != "assistant"
            if asked.separate_reasoning and free and marks_reasoning(loaded):
                emit = reasoning_apart(emit, prompt_with(loaded, stored, options))
            if joining is None:
                return self._submit(asked, target, tokens, emit, **more)
            return self._submit_together(asked, joining, tokens, emit, more)

    def stored_tokens(self, asked: ChatRequest) -> list[int]:
        """Tokens of each store that a conversation is put to, with the model's 0 where it is none. Raises as
        `chat`.
        """
        entry, together = self.catalog.entry(asked.model), asked.together
        if isinstance(together, tuple):
            return [self.catalog.entry(name).tokens for name in together]
        if not entry.collection:
            return [entry.tokens]
        _, found = self.together.documents(entry, together, asked.join or "mixture", _questions(asked)[0])
        return [document.tokens for document in found]

    def complete(self, asked: CompletionRequest, emit: Emit) -> Ticket:
        """Ask for the continuation of a text; its events go to `emit`. Raises as `chat`."""
        with self.releases.asking(asked.model):
            target = self._target(asked)
            if isinstance(asked.prompt, str):
                self._check_letters(len(asked.prompt))
            tokens = completion_tokens(target.loaded, target.stored, asked.prompt)
            top, prompt = asked.prompt_logprobs, asked.prompt
            text = prompt if isinstance(prompt, str) else decode(target.loaded.known_tokenizer, prompt)
            return self._submit(asked, target, tokens, emit, question=text, prompt_logprobs=top, raw=True)

    def search(self, asked: SearchRequest, emit: Emit) -> Ticket:
        """Ask for the passages that a question attends to: the last event has them. Raises as `chat`."""
        with self.releases.asking(asked.model):
            target = self._target(asked)
            if not target.stored:
                raise WrongField(f"'{target.entry.name}' has no corpus to search: name a store", "model")
            self._check_letters(len(asked.question))
            tokens = target.start.question_tokens(asked.question)
            target.start.check_room(len(tokens))
            asked = replace(asked, generation=replace(asked.generation, max_tokens=0))
            return self._submit(asked, target, tokens, emit, passages=asked.most)

    def tokenize(
        self,
        model: str,
        text: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of a text, or of the prompt that messages and tools become. Raises `NoSuchName`, `Loading`,
        `TooLarge` or `WrongField`.
        """
        entry = self.catalog.entry(model)
        loaded = self.loaded_models.model(entry)
        written = len(text or "") if messages is None else _letters(messages) + _letters(tools or ())
        self._check_letters(written)
        if messages is not None:
            return chat_tokens(loaded, entry.path is not None, messages, tools)
        return text_ids(loaded, text or "", add_special)

    def detokenize(self, model: str, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones too. Raises as `tokenize`."""
        loaded = self.loaded_models.model(self.catalog.entry(model))
        completion_tokens(loaded, True, tokens)  # which checks them
        return str(loaded.known_tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def pieces(self, model: str, tokens: Sequence[int]) -> list[str]:
        """Each token as a text of its own; as the vocabulary spells it where it is a part of a character."""
        tokenizer = self.loaded_models.model(self.catalog.entry(model)).known_tokenizer
        texts = [str(tokenizer.decode([one], clean_up_tokenization_spaces=False)) for one in tokens]
        return [
            str(tokenizer.convert_ids_to_tokens(one)) if "\ufffd" in text else text
            for one, text in zip(tokens, texts, strict=True)
        ]

    def close(self, grace_s: float = 0.0) -> None:
        """Take no more requests; answers that are being written have so many seconds to end."""
        self.scheduler.close(grace_s)
        self.together.close()
        self.jobs.close()  # an append may have waited for answers to end
        self.loaded_models.close()
        self.catalog.close()

    def _tell_metrics(self) -> None:
        most = max(self.settings.generated_bytes, 1)
        self.metrics.read(
            "kv_cache_usage_perc",
            "Share of the memory for turns that is in use, 0 to 1.",
            lambda: self.prefix_cache.nbytes / most,
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

    def _target(self, asked: AskOptions) -> Target:
        entry = self.catalog.entry(asked.model)
        if entry.collection or asked.together is not None or asked.join is not None:
            message = "documents answer a chat together, and nothing else: ask a chat, or one store"
            raise WrongField(message, "model" if entry.collection else "together")
        if entry.path is None and (asked.selector or asked.options):
            message = f"'{entry.name}' has no corpus to select from: leave selector and options out"
            raise WrongField(message, "selector")
        self.jobs.kept.use(entry)
        return self.loaded_models.get(entry, asked.selector, asked.options)

    def _matched(self, asked: ChatRequest) -> ChatRequest:
        """A chat with a model alone that begins with a stored text is one with its store."""
        entry = self.catalog.entry(asked.model)
        if entry.path is not None or asked.together is not None:
            return asked
        stores = [one for one in self.catalog.entries() if one.is_store and one.model_id == entry.model_id]
        found = self.matcher.match(self.loaded_models.model(entry), asked.messages, stores)
        return replace(asked, model=found[0].name, messages=found[1]) if found else asked

    def _check_letters(self, letters: int) -> None:
        most = LETTERS * self.settings.max_prompt
        if letters > most:
            limits = f"{self.settings.max_prompt:,} tokens, of at most {most:,} characters"
            raise TooLarge(f"the prompt has {letters:,} characters, and this server takes {limits}")

    def _submit_together(
        self,
        asked: ChatRequest,
        joining: Joining,
        tokens: Sequence[int],
        emit: Emit,
        more: Mapping[str, Any],
    ) -> Ticket:
        if joining.join == "exact":
            whole = self.together.whole(asked, joining)
            told = replace(joining, targets=(whole,))

            def tell(event: Event) -> None:
                if isinstance(event, Done):
                    notes = tuple(filter(None, (*told.notes(), whole.entry.note)))
                    event = replace(event, joined=told.joined(), notes=notes)
                emit(event)

            return self._submit(asked, whole, tokens, tell, **more)
        if joining.join != "read":
            return self._submit(asked, joining, tokens, emit, **more)
        # A model without a corpus, loaded as for these stores, stands behind the passages.
        name, wanted = f"{joining.name}/passages", joining.targets[0]
        first = replace(wanted.entry, name=name, path=None, digest="", identity=None)
        model = self.loaded_models.get(first)
        if model.loaded is not wanted.loaded:  # of other stores, or as the model was before
            self._close(name)
            model = self.loaded_models.get(first)
        draft = replace(asked, generation=Generation(max_tokens=DRAFT_TOKENS), cite=True)
        most, began = self._deadline(asked), time.monotonic()

        def answer(target: Target, put: Sequence[int], hear: Emit) -> Ticket:
            left = replace(asked, deadline_s=max(most - (time.monotonic() - began), 0.001))
            return self._submit(left, target, put, hear, **more)

        reading = Reading(joining, model, tokens, answer, emit)
        question = more["question"]
        return reading.begin(lambda own, hear: self._submit(draft, own, tokens, hear, question=question))

    def _submit(
        self, asked: AskOptions, target: Target | Joining, tokens: Sequence[int], emit: Emit, **more: Any
    ) -> Ticket:
        if asked.check and asked.n > 1:
            raise WrongField("one answer is checked, and here are several: leave n or check out", "check")
        targets = target.targets if isinstance(target, Joining) else (target,)
        width = target.width if isinstance(target, Joining) else asked.n + asked.check  # which is one more
        wanted = replace(asked.generation, max_tokens=self._room(targets, width, len(tokens), asked))
        check_generation(targets[0].loaded, wanted)
        shared = {one.name: getattr(asked, one.name) for one in fields(AskOptions)}
        shared["deadline_s"] = self._deadline(asked)
        request = Request(**{**shared, "generation": wanted}, tokens=tuple(tokens), **more)
        return self.scheduler.submit(request, target, emit)

    def _deadline(self, asked: AskOptions) -> float:
        """Seconds in which a request must be answered."""
        return min(asked.deadline_s or self.settings.deadline_s, self.settings.deadline_s)

    def _room(self, targets: Sequence[Target], width: int, prompt: int, asked: AskOptions) -> int:
        """How many tokens an answer of `width` conversations may have: what was asked for, as far as the
        contexts and the memory for answers go. Raises `ContextEnds` where a context ends in the prompt.
        """
        loaded, wanted = targets[0].loaded, asked.generation.max_tokens
        if wanted is None:
            wanted = self.settings.max_tokens
        if wanted:
            for target in targets:
                target.start.check_room(prompt)
        limit = sys.maxsize if wanted < 0 else wanted
        most = min(target.start.most_new(limit, prompt) for target in targets)
        room = self.settings.running_bytes
        while most > 1 and width * generated_bytes(loaded.shape, prompt + most, loaded.dtype) > room:
            most //= 2
        return most

    def _close(self, name: str) -> None:
        self.loaded_models.forget(name)
        self.prefix_cache.drop(model=name)


def _questions(asked: ChatRequest) -> list[str]:
    """What a chat's user says; it may begin with what came of a call, and ask nothing."""
    return [one.text for one in read_messages(asked.messages) if one.role == "user"] or [""]


def _letters(parts: Sequence[Mapping[str, Any]]) -> int:
    """Characters of messages or tools, as they are written in a request."""
    try:
        return len(json.dumps(parts, ensure_ascii=False))
    except RecursionError as error:
        raise WrongField("the messages or tools are nested too deeply") from error


def _recorded(emit: Emit, keep: Callable[..., None]) -> Emit:
    """`emit`, and in the end `keep` with each answer's message and tokens, so that the client's next turn
    finds them in the prefix cache.
    """
    answered = AnsweredRequest()

    def record(event: Event) -> None:
        answered.add(event)
        if isinstance(event, Done):
            for one in answered.answers.values():
                keep(answer_object(one.text, one.calls), [scored.token for scored in one.tokens])
        emit(event)

    return record
