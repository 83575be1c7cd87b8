"""Continuous batching: requests to many stores and models run together, step by step in one thread.

Each step runs one token of every answer that is being written, and a part of the prompts that are not read
yet; conversations that may share a forward pass do (`engine.batching`), the others take turns. Requests join
and leave between steps. Nothing here knows HTTP.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from offload_decode.common.errors import OffloadDecodeError
from offload_decode.common.memory import give_back
from offload_decode.engine.batching import packing_key, run_turns
from offload_decode.selectors.budgets import PASS_TOKENS
from offload_decode.server.job import UNKNOWN
from offload_decode.server.joint_request import Joining, JointRequest
from offload_decode.server.loaded_models import Target
from offload_decode.server.metrics import Metrics
from offload_decode.server.prefix_cache import PrefixCache
from offload_decode.server.requests import Busy, Emit, Failed, Request, Settings, TimedOut, TooLarge
from offload_decode.server.sequences import RunningRequest, ScheduledTurn
from offload_decode.types import StepStats

LOG = logging.getLogger("offload_decode.server")
LEAST_SHARE = 16
"""Tokens of prompts in a step, however slow they are."""
IDLE_S = 1.0
"""Seconds without a request after which freed memory goes back to the system."""
ROOM_S = 0.1
"""Seconds that a request which has no room is looked at again, while nothing else runs."""
STEP_S = 0.25
"""Seconds by which prompts may delay the next token of the answers that are being written."""


class Ticket(NamedTuple):
    """A request that was taken on. `cancel` drops it before the next step; any thread may call it."""

    cancel: Callable[[], None]


class Scheduler:
    """Takes requests from any thread, and answers them in one of its own."""

    def __init__(self, settings: Settings, prefix_cache: PrefixCache, metrics: Metrics):
        self.settings = settings
        self.prefix_cache = prefix_cache
        self.metrics = metrics
        self._waiting: deque[RunningRequest] = deque()
        self._running: list[RunningRequest] = []
        self._ended: list[RunningRequest] = []  # whole, and not told yet
        self._pace: dict[str, float] = {}  # seconds for a token of a prompt, by model
        self._changed = threading.Condition()
        self._closing = self._stopped = self._full = False  # full: there was no room for who waits longest
        # What follows an answer keeps no other waiting, nor do ends that take passes keep those that do not.
        self._ending, self._citing = ThreadPoolExecutor(1, "ending"), ThreadPoolExecutor(1, "citing")
        self._thread = threading.Thread(target=self._work, name="scheduler", daemon=True)
        self._thread.start()

    def submit(self, request: Request, target: Target | Joining, emit: Emit) -> Ticket:
        """Take on a request to a target, or to several that answer together; its events go to `emit`, from
        the scheduler's threads, one after another.

        Raises `Busy` where too many wait, and `TooLarge` for what can never run.
        """
        if isinstance(target, Joining):
            running: RunningRequest = JointRequest(request, target, emit, self.metrics.watch(target.name))
        else:
            # Passages and documents have no name of their own in the catalog: their collection's comes first.
            name = target.entry.name.partition("/")[0]
            running = RunningRequest(request, target, emit, self.metrics.watch(name))
        settings, tokens = self.settings, len(request.tokens)
        try:
            if tokens > settings.max_prompt:
                most = f"{settings.max_prompt:,}"
                raise TooLarge(f"the prompt has {tokens:,} tokens, and this server takes {most}")
            if running.width > settings.max_running:
                raise TooLarge(
                    f"these are {running.width} answers at once, and this server writes "
                    f"{settings.max_running}: ask for fewer"
                )
            if running.bytes > settings.running_bytes:
                raise TooLarge("this needs more memory than there is: ask for fewer tokens, or fewer answers")
            with self._changed:
                if self._closing:
                    raise Busy("the server is being stopped")
                if (waiting := len(self._waiting)) >= max(settings.max_waiting, 1):
                    raise Busy(f"{waiting} requests are waiting already: try again in a moment")
                self._waiting.append(running)
                self._changed.notify()
        except OffloadDecodeError as error:
            running.followed.event(Failed(error))
            raise

        def cancel() -> None:
            with self._changed:
                running.cancelled = True
                self._changed.notify()

        return Ticket(cancel)

    def uses(self, name: str) -> bool:
        """Whether a name is being answered from, or an answer of it is being put away."""
        if self._answers(name):
            return True
        with suppress(RuntimeError):  # the scheduler is closed: nothing is put away any more
            for one in (self._citing, self._ending):
                one.submit(int).result()  # all that has ended before is put away then
        return self._answers(name)  # a draft that ended has put its answer's request

    def _answers(self, name: str) -> bool:
        with self._changed:
            return any(name in one.names for one in (*self._running, *self._waiting))

    def close(self, grace_s: float = 0.0) -> None:
        """Take on nothing more; what runs has so many seconds to end, and is then ended."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            self._changed.wait_for(lambda: not (self._running or self._waiting or self._ended), grace_s)
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=60)
        self._ending.shutdown()
        self._citing.shutdown()

    def _work(self) -> None:
        patience: float | None = None
        while True:
            with self._changed:
                if not self._changed.wait_for(
                    lambda: self._running or self._waiting or self._closing, patience
                ):
                    give_back()
                    patience = None
                    continue
                patience = IDLE_S
                if not self._running and not self._waiting:
                    return
                if self._full and not self._running and self._ended:  # which have the room that it needs
                    self._changed.wait(ROOM_S)
            try:
                self._step()
            except Exception as error:  # whatever it was, the next request is answered
                LOG.exception("a step of the scheduler failed")
                for running in list(self._running):
                    self._fail(running, error)

    def _step(self) -> None:
        """One token of every answer, and a part of the prompts."""
        self._drop_gone()
        self._admit()
        groups: dict[Hashable, list[RunningRequest]] = defaultdict(list)
        whole = [one for one in self._running if one.prompting and one.whole]
        for running in self._running:
            if running in whole[1:]:
                continue  # of questions that run whole, one in a step
            key = packing_key(running.conversation)
            groups[running if key is None else key].append(running)
        asking = sum(any(one.prompting for one in group) for group in groups.values())
        for group in groups.values():
            if turns := self._turns(group, asking):
                self._run(turns)
        for running in [one for one in self._running if one.done]:
            with self._changed:  # `uses` must not look between these
                self._leave(running)
                self._ended.append(running)
                (self._citing if running.ends_later else self._ending).submit(self._end, running)
        if not self._running:
            with self._changed:
                self._changed.notify_all()  # `close` waits for this

    def _drop_gone(self) -> None:
        with self._changed:
            here = [*self._running, *self._waiting]
        for running in here:
            if running.cancelled:
                self._leave(running)
                running.followed.aborted()
                running.forget()
            elif (over := self._over(running)) is not None:
                self._fail(running, over)

    def _over(self, running: RunningRequest) -> OffloadDecodeError | None:
        """Why no more is done for a request, if so."""
        if self._stopped:
            return Busy("the server is being stopped: ask again in a moment")
        if time.perf_counter() <= running.deadline:
            return None
        limit = running.deadline - running.submitted
        if running.checking or running in self._ended:
            return TimedOut(f"the limit of {limit:g} seconds was reached")
        return TimedOut(f"the answer was not whole after {limit:g} seconds")

    def _admit(self) -> None:
        """Begin waiting requests, in their order, as far as there is room."""
        self._full = False
        while True:
            with self._changed:
                if not self._waiting:
                    return
                first = self._waiting[0]
                together = [*self._running, *self._ended, first]
                if (
                    sum(one.width for one in together) > self.settings.max_running
                    or sum(one.bytes for one in together) > self.settings.running_bytes
                ):
                    self._full = True
                    return
                self._running.append(self._waiting.popleft())
            try:
                first.begin(self.prefix_cache)
            except Exception as error:  # noqa: BLE001  # of this request alone
                self._fail(first, error)

    def _turns(self, group: Sequence[RunningRequest], asking: int) -> list[ScheduledTurn]:
        """The turns of a group in one pass: a token of every answer, and prompts, the shortest first, but
        some of the oldest in any case. So many groups are `asking` in this step.
        """
        turns = [turn for one in group if not one.prompting for turn in one.turns()]
        prompts = sorted((one for one in group if one.prompting), key=lambda one: one.prompting)
        if not prompts:
            return turns
        if prompts[0].whole:
            return turns + prompts[0].turns(prompts[0].prompting)
        # Fewer while answers are being written, and the more groups ask.
        left, pace = PASS_TOKENS, self._pace.get(prompts[0].target.loaded.model_id)
        if pace is not None and not all(one.prompting for one in self._running):
            left = max(LEAST_SHARE, min(PASS_TOKENS, int(STEP_S / pace / asking)))
        oldest = min(prompts, key=lambda one: one.submitted)
        shares = {oldest: min(oldest.prompting, max(LEAST_SHARE, left // 4))}
        left -= shares[oldest]
        for one in prompts:
            before = shares.get(one, 0)
            more = max(0, min(one.prompting - before, left))
            shares[one], left = before + more, left - more
        return turns + [turn for one, share in shares.items() if share for turn in one.turns(share)]

    def _run(self, turns: Sequence[ScheduledTurn]) -> None:
        """One pass; where it fails, each turn on its own, so that one request takes no other along."""
        began = time.perf_counter()
        try:
            logits = run_turns([each.turn for each in turns])
        except Exception as error:  # noqa: BLE001  # of the requests that it concerns
            if len(turns) == 1:
                self._fail(turns[0].request, error)
            else:
                for each in turns:
                    if each.request in self._running:
                        self._run([each])
            return
        seconds, stats = time.perf_counter() - began, StepStats()
        for each in turns:
            cost = each.turn.conversation.prefix.take_stats()
            each.request.spent(cost)
            stats.add(cost)
        tokens = sum(len(each.turn.tokens) or 1 for each in turns)  # at least the pending one
        self.metrics.passed(len(turns), tokens, seconds, stats)
        checks = any(each.request.checking for each in turns)  # which attend to all that is stored
        if tokens - len(turns) >= LEAST_SHARE and not checks:
            model = turns[0].request.target.loaded.model_id
            self._pace[model] = 0.5 * self._pace.get(model, seconds / tokens) + 0.5 * seconds / tokens
        for each, one in zip(turns, logits, strict=True):
            if each.request not in self._running:  # another of its answers failed
                continue
            try:
                each.take(one)
            except Exception as error:  # noqa: BLE001  # of this request alone
                self._fail(each.request, error)

    def _end(self, running: RunningRequest) -> None:
        """Cache the turn, and find its citations, or its passages."""
        try:
            over = self._over(running) if running.ends_later else None
            done = None if running.cancelled else running.ended(over)
            for key, conversation in running.turns_run():
                conversation.prefix.watches = ()
                self.prefix_cache.keep(key, conversation)
            if done is None or running.cancelled:
                running.followed.aborted()
            else:
                running.emit(done)
        except OffloadDecodeError as error:
            running.emit(Failed(error))
        except Exception as error:
            LOG.exception("the end of a request failed")
            running.emit(Failed(error))
        finally:
            running.forget()
            with self._changed:
                self._ended.remove(running)
                self._changed.notify_all()

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        told = isinstance(error, OffloadDecodeError)
        if not told:
            LOG.error("request %s failed", running.request.id, exc_info=error)
        if running.checking:
            running.leave_unchecked(str(error) if told else UNKNOWN)
            return
        self._leave(running)
        running.emit(Failed(error))
        running.forget()

    def _leave(self, running: RunningRequest) -> None:
        with self._changed:
            for place in (self._running, self._waiting):
                if running in place:
                    place.remove(running)
