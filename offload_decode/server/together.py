"""Which stores answer a request together, and how: documents of a collection, or stores by their names.
Passages are found, and documents prefilled as one, before the request itself is put to one conversation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from offload_decode.collections.collection import Collection
from offload_decode.collections.journal import Entry as Document
from offload_decode.collections.together import distinct, weights
from offload_decode.common.errors import DoesNotFit
from offload_decode.engine.joint import behind_text
from offload_decode.engine.reading import text_of
from offload_decode.models.loading import LoadedModel
from offload_decode.prefill_jobs.joined import joined_store
from offload_decode.server.catalog import Catalog, Entry, document_entry
from offload_decode.server.joint_request import Joining
from offload_decode.server.loaded_models import LoadedModels, Target
from offload_decode.server.requests import (
    AskOptions,
    Busy,
    Done,
    Emit,
    Event,
    Failed,
    Join,
    Loading,
    ReadOnly,
    Settings,
    Usage,
    WrongField,
)
from offload_decode.server.scheduler import Ticket
from offload_decode.store.files import Progress

LOG = logging.getLogger("offload_decode.server")
DOCUMENTS = 4
"""Of a collection, where a request does not say how many."""
HELD = 8
"""Of these, so many stay while they are served, and so many wait to be made."""


class Together:
    """Finds the stores that answer a request together, and opens them."""

    def __init__(self, catalog: Catalog, loaded_models: LoadedModels, settings: Settings):
        self._catalog, self._loaded, self._settings = catalog, loaded_models, settings
        self._prefills = ThreadPoolExecutor(1, "joined")
        self._wholes: OrderedDict[tuple[str, ...], _Whole] = OrderedDict()
        self._closing = False
        self._lock = threading.Lock()

    def joining(self, asked: AskOptions, first: str, last: str) -> Joining | None:
        """The stores that answer a chat together, None where one does: `first` and `last` are its questions,
        by which documents are chosen, as `chat` keeps them, and weighed. Raises `WrongField`, `NoSuchName`,
        `Loading` and what opening a store raises.
        """
        entry = self._catalog.entry(asked.model)
        if not entry.collection and asked.together is None:
            if asked.join is not None:
                raise WrongField("join says how together joins: give together too, or leave it out", "join")
            return None
        if asked.n > 1:
            raise WrongField("stores that answer together give one answer: leave n out", "n")
        if asked.check:
            raise WrongField("an answer of several stores is not checked: leave check out", "check")
        join = asked.join or "mixture"
        if isinstance(asked.together, tuple):
            return self._named(asked, asked.together, entry)
        collection, found = self.documents(entry, asked.together, join, first)
        chosen = sorted(found) if join == "exact" else found
        each = [document_entry(f"{entry.name}/{one.store}", collection.store(one)) for one in chosen]
        return Joining(
            entry.name,
            frozenset([entry.name]),
            join,
            self._targets(asked, each),
            tuple(one.name for one in chosen),
            tuple(one.name for one in each),
            tuple(weights(collection, last, chosen)),
        )

    def documents(
        self, entry: Entry, together: int | None, join: Join, question: str
    ) -> tuple[Collection, list[Document]]:
        """Those of a collection that answer a question, the best first. Raises `WrongField`."""
        if not entry.collection or entry.path is None:
            raise WrongField(
                f"'{entry.name}' is no collection: give the names of several stores in together", "together"
            )
        collection = Collection(entry.path)
        room = self._settings.max_running - (join == "pced")  # one of its rows has no document
        most = together or max(1, min(DOCUMENTS, room))
        found = list(islice(distinct(one for one, _ in collection.scored(question)), most))
        if not found:
            raise WrongField("no document contains a word of the question: rephrase it", "messages")
        return collection, found

    def whole(self, asked: AskOptions, joining: Joining) -> Target:
        """The documents prefilled as one store. Raises `Loading` until it is there, `Busy` where too many
        others wait, and what a prefill raises.
        """
        if self._settings.read_only:
            raise ReadOnly("this server makes no stores, as join 'exact' does: give another join")
        loaded = joining.targets[0].loaded
        digests = tuple(target.entry.digest for target in joining.targets)
        paths = [target.entry.path for target in joining.targets if target.entry.path is not None]
        with self._lock:
            found = self._wholes.get(digests)
            if found is not None and found.gone:
                self._wholes.pop(digests).held.close()
                found = None
            if found is None or found.loaded is not loaded:
                if sum(not one.made.done() for one in self._wholes.values()) >= HELD:
                    raise Busy(f"{HELD} others wait to be prefilled as one: try again later", 30)
                found = _Whole(loaded, len(paths))
                found.made = self._prefills.submit(self._made, found, paths)
                self._wholes[digests] = found
            self._wholes.move_to_end(digests)
            done = [one for one in self._wholes if self._wholes[one].made.done()]
            for one in done[: max(0, len(done) - HELD)]:
                self._wholes.pop(one).held.close()
            if not found.made.done():
                raise Loading(f"{found.told()}: try again soon", 2)
            if found.made.exception() is not None:
                del self._wholes[digests]  # the next request tries again
        path = found.made.result()
        entry = document_entry(f"{joining.name}/{path.parent.name}", path)
        return self._loaded.get(entry, asked.selector, asked.options)

    def close(self) -> None:
        """Prefill nothing more."""
        self._closing = True
        self._prefills.shutdown(cancel_futures=True)
        for one in self._wholes.values():
            one.held.close()

    def _named(self, asked: AskOptions, names: Sequence[str], model: Entry) -> Joining:
        entries = [self._catalog.entry(name) for name in names]
        stores = [entry.name for entry in entries]
        if twice := next((name for name in stores if stores.count(name) > 1), None):
            raise WrongField(f"'{twice}' is given twice, and would count twice: give it once", "together")
        if other := next((entry for entry in entries if not entry.is_store), None):
            raise WrongField(f"'{other.name}' is no store: give the names of stores", "together")
        forms = {(one.model_id, one.dtype, one.weights, one.scaled, one.adapter) for one in entries}
        if len(forms) > 1:
            raise WrongField(
                "the stores are of several models, or of one that is loaded in several ways: give stores "
                "that were prefilled alike",
                "together",
            )
        of, made = (model.model_id, model.adapter), (entries[0].model_id, entries[0].adapter)
        if model.name not in stores and (model.path is not None or of != made):
            raise WrongField(
                f"'{model.name}' is none of the stores in together, nor their model: name one of them",
                "model",
            )
        targets, documents = self._targets(asked, entries), tuple(stores)
        joined = asked.join or "mixture"
        return Joining(model.name, frozenset(stores), joined, targets, documents, documents)

    def _targets(self, asked: AskOptions, entries: Sequence[Entry]) -> tuple[Target, ...]:
        return tuple(self._loaded.get(entry, asked.selector, asked.options) for entry in entries)

    def _made(self, whole: _Whole, paths: Sequence[Path]) -> Path:
        """In a thread of its own: prefill, or find what was prefilled."""

        def note(stage: str, done: int, total: int) -> None:
            if self._closing:
                raise Loading("the server is being stopped")
            whole.progress = done, total

        tell: Progress = note
        while True:
            try:
                return whole.held.enter_context(joined_store(paths, whole.loaded, tell))
            except DoesNotFit:
                if not self._let_go():
                    raise
            except Exception:
                LOG.warning("%d documents were not prefilled as one", len(paths), exc_info=True)
                raise

    def _let_go(self) -> bool:
        """Let the cache drop the store that was asked longest ago; who has it open keeps it."""
        with self._lock:
            for digests, one in self._wholes.items():
                if one.made.done():
                    self._wholes.pop(digests).held.close()
                    return True
        return False


@dataclass
class _Whole:
    """Documents that are being prefilled as one store, or were. held: keeps it in the cache."""

    loaded: LoadedModel
    count: int
    made: Future[Path] = field(default_factory=Future)
    held: ExitStack = field(default_factory=ExitStack)
    progress: tuple[int, int] = (0, 0)
    began: float = field(default_factory=time.monotonic)

    @property
    def gone(self) -> bool:
        """It was made, and somebody has cleared the cache since."""
        return self.made.done() and self.made.exception() is None and not self.made.result().exists()

    def told(self) -> str:
        done, total = self.progress
        so_far = f", {done:,} of {total:,} tokens so far" if total else ""
        seconds = time.monotonic() - self.began
        return f"{self.count} documents are being prefilled as one, for {seconds:.0f} s{so_far}"


Submit = Callable[[Target, Sequence[int], Emit], Ticket]
"""Puts a prompt to one target."""


class Reading:
    """A request that is answered from passages: a draft, which stores write together, finds them, and then
    the request is put to the model behind their text, or to the leading document where there are none.
    """

    def __init__(self, joining: Joining, model: Target, tokens: Sequence[int], submit: Submit, emit: Emit):
        self.joining, self.model, self.tokens = replace(joining, attended=True), model, tokens
        self._submit, self._emit = submit, emit
        self._lock, self._cancelled = threading.Lock(), False
        self._ticket: Ticket | None = None

    def begin(self, submit: Callable[[Joining, Emit], Ticket]) -> Ticket:
        """Begin the draft; the ticket is for all of it."""
        self._go(lambda: submit(self.joining, self._drafting))
        return Ticket(self.cancel)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled, ticket = True, self._ticket
        if ticket is not None:
            ticket.cancel()

    def _go(self, submit: Callable[[], Ticket]) -> None:
        with self._lock:
            if not self._cancelled:
                self._ticket = submit()

    def _drafting(self, event: Event) -> None:
        """An event of the draft, which nobody else is told."""
        if isinstance(event, Failed):
            self._emit(event)
        elif isinstance(event, Done):
            try:
                self._go(lambda: self._read(event))
            except Exception as error:  # noqa: BLE001  # it is told as the request's
                self._emit(Failed(error))

    def _read(self, drafted: Done) -> Ticket:
        assert drafted.joined is not None, "of a draft"
        shares = [one.share or 0.0 for one in drafted.joined.documents]
        alone = shares.index(max(shares))
        if text := text_of(drafted.citations or ()):
            begun = behind_text(self.joining.targets[0].start, text).pending
            emit = self._told(drafted, self.joining.notes())
            return self._submit(self.model, [*begun, *self.tokens], emit)
        emit = self._told(drafted, self.joining.notes(alone=alone))
        return self._submit(self.joining.targets[alone], self.tokens, emit)

    def _told(self, drafted: Done, notes: tuple[str, ...]) -> Emit:
        """`emit`, and in the end what the draft found and cost too."""

        def tell(event: Event) -> None:
            if isinstance(event, Done):
                usage, before = event.usage, drafted.usage
                both = Usage(usage.prompt + before.prompt, usage.cached + before.cached, usage.completion)
                event.stats.add(drafted.stats)
                cited, joined = drafted.citations, self.joining.joined()
                event = replace(event, usage=both, citations=cited, joined=joined, notes=notes)
            self._emit(event)

        return tell
