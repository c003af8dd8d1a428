"""The primary's view of one worker: its stream, its open requests and its heartbeat."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Final

from penstock.cluster.routing import ROUTED_PAGES
from penstock.engine.fair_queue import heaviest
from penstock.engine.options import PRIORITY_S
from penstock.engine.pages import PageKeys
from penstock.errors import InternalError, QueueFullError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.llm.backend import ModelCard, WorkerState
from penstock.logs import tell
from penstock.processes.silence import SILENT_S, until_silent
from penstock.runtime.program import PAGE_TOKENS
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.handshake import PAGE_SECRET
from penstock.serving.workers.messages import KEY_BYTES, card_from, error_from, event_from, pages_from, stats_from
from penstock.serving.workers.moving.delivered import Delivered
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.engine.page_journal import PageReport
    from penstock.errors import PenstockError
    from penstock.processes.frames import FrameStream
    from penstock.serving.arrivals import Arrivals

__all__ = [
    "FRESH_S", "LostWorkerError", "MovedRequestError", "OpenRequest", "WorkerConnection", "body_of", "page_keys",
    "reset_worker_numbers",
]  # fmt: skip

FRESH_S: Final = 3.0
"""A worker sends a heartbeat each half second.  One that has sent nothing for this long gets no new requests."""
MOVE_PAUSE_S: Final = 0.25
"""Pause after which a worker that is being drained offers its requests to the others again."""
_MAX_MOVES: Final = 4
"""The most requests of a worker that move at a time.  The others go on meanwhile."""
_CONFIRM_PAUSE_S: Final = 0.05
_MAX_WRITE_BYTES: Final = 1 << 16
_PAGE_KEYS: Final = PageKeys(PAGE_SECRET)
_PAGE_KINDS: Final = ("pages_offered", "pages_granted", "page_data", "page_stored", "pages_ended")
_numbers: defaultdict[str, Iterator[int]] = defaultdict(lambda: count(1))
"""The numbers of the next workers, by model."""


class LostWorkerError(UnavailableError):
    """The worker was lost with the request, which ``was_running`` or waited in the worker's queue."""

    def __init__(self, message: str, was_running: bool = True) -> None:
        super().__init__(message)
        self.was_running = was_running


class MovedRequestError(Exception):
    """The worker is being drained and gave the request back before its first event."""


def page_keys(prompt_ids: Sequence[int], salt: str) -> list[bytes]:
    """Return the key of each leading page of a prompt, as workers report it.

    A key stands for all tokens up to the end of its page, and for the salt.
    """
    keys: list[bytes] = []
    _PAGE_KEYS.extend(keys, salt, prompt_ids[: ROUTED_PAGES * PAGE_TOKENS])
    return [key[:KEY_BYTES] for key in keys]


def body_of(message: pb.ToWorker) -> pb.Submit | pb.Score | pb.Embed:
    """Return the part of a request's message that says what to do."""
    body: pb.Submit | pb.Score | pb.Embed = getattr(message, message.WhichOneof("kind") or "submit")
    return body


class OpenRequest:
    """A request that is sent to a worker.

    ``answer`` receives its events, and ``delivered`` notes them.  ``taken`` is done when the worker has accepted or
    refused it.  ``on_lost`` is called if a worker that had accepted it is lost.  ``move``, called while the worker is
    being drained, takes the request to another one if there is one with room.  It returns a task that ends when that
    one goes on.
    """

    def __init__(
        self,
        answer: EventAnswer,
        message: pb.ToWorker,
        on_lost: Callable[[LostWorkerError], None],
        move: Callable[[], asyncio.Future[None] | None] = lambda: None,
        delivered: Delivered | None = None,
    ) -> None:
        self.answer = answer
        self.message = message
        self.on_lost, self.move = on_lost, move
        self.delivered = delivered or Delivered()
        self.client = self._options.client
        self.key = 0
        self.due = 0.0
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def priority(self) -> int:
        """The priority; lower numbers go first."""
        return self._options.priority

    @property
    def _options(self) -> pb.Options:
        return body_of(self.message).options

    def refuse(self, error: PenstockError) -> None:
        """Note that the worker does not accept the request."""
        if not self.taken.done():
            self.taken.set_exception(error)
        else:
            self.answer.fail(error)


def reset_worker_numbers(model: str) -> None:
    """Begin the names of a model's workers with number 1 again: the model is loaded, and has no worker yet."""
    _numbers.pop(model, None)


class WorkerConnection:
    """The primary's end of a worker's stream, from its Join on.

    ``pid``: its process id on its machine; 0 if a worker of another machine joined by itself.  ``is_remote``: it joined
    over TLS.  ``arrivals``: the first request to an idle worker waits for requests that are about to arrive, so that
    one step serves them together.
    """

    def __init__(self, model: str, pid: int, arrivals: Arrivals | None = None, *, is_remote: bool = False) -> None:
        self.name = f"{model}-{next(_numbers[model])}"
        self.model = model
        self.pid = pid
        self.is_remote = is_remote
        self.node = ""
        """The address of its machine, "" for this one."""
        self.role = ""
        self.copies_pages = False
        """The work that it does: "prefill", "decode", or "" for both."""
        self.status = "starting"
        self.card: ModelCard | None = None
        self.plan: pb.Plan | None = None
        self.tokenizer: Tokenizer | None = None
        self.max_open = 0
        self.weights_id = self.state_id = ""
        self.stats: pb.Stats | None = None
        self.num_sent = 0
        self.is_hung = False
        self.ready: asyncio.Future[WorkerConnection] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.on_planned: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        self.on_leave: Callable[[], None] = lambda: None
        """Called when the worker is about to end by itself."""
        self.num_lost = 0
        """Number of requests that were open when the worker was lost."""
        self.explained = asyncio.Event()
        """Set once it is known whether the process crashed, or if nothing will say so."""
        if not pid:
            self.explained.set()
        self.is_reserved = False
        """True while the worker is kept for one request, which runs alone in it."""
        self._has_crashed = False
        self._num_heartbeats = 0
        self._on_cause: list[Callable[[bool], object]] = []
        self._on_pages: Callable[[PageReport], None] | None = None
        self._next_report = 0  # 0: only a full report counts
        self.num_moved = 0
        """Number of its requests with which other workers went on."""
        self.transfers: dict[int, Callable[[pb.FromWorker | None], None]] = {}
        """The callbacks for messages of page transfers, by transfer number; None says that the worker is lost."""
        self._profiled: asyncio.Future[bytes] | None = None
        self._num_profiles = 0
        self._open: dict[int, OpenRequest] = {}
        self._keys = count(1)
        self._unsent: list[pb.ToWorker] = []
        self._arrivals, self._is_gathering = arrivals, False
        self._stream: FrameStream[pb.FromWorker] | None = None
        self._is_idle = asyncio.Event()
        self._last_message = time.monotonic()
        self._iteration_age_s = 0.0
        self._longest_iteration_s = 0.0

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """True if the worker accepts requests."""
        return self.status == "ready"

    @property
    def has_room(self) -> bool:
        """True if one more request may be open."""
        return not self.max_open or self.num_open < self.max_open

    @property
    def has_place(self) -> bool:
        """True if one more request would run at once."""
        max_running = self.plan.max_requests if self.plan is not None else 0
        return self.has_room and (not max_running or self.num_open < max_running)

    def has_room_for(self, client: str, priority: int | None = None) -> bool:
        """Return True if one more request of a client may be open, as ``Engine.has_room_for`` does."""
        if self.has_room:
            return True
        waiting = (
            (request.client, request.priority) for request in self._open.values() if not request.answer.has_begun
        )
        return heaviest(waiting, client, priority) is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's loop last began an iteration, as far as the primary knows."""
        if self.card is None:
            return math.inf
        return self._iteration_age_s + time.monotonic() - self._last_message

    @property
    def is_fresh(self) -> bool:
        """True if the worker accepts requests and is likely to answer soon.

        It has sent a message lately, and its engine's current iteration has taken no longer than one of this model may.
        """
        if not self.is_ready or time.monotonic() - self._last_message > FRESH_S:
            return False
        return self.heartbeat_age_s <= FRESH_S + self._longest_iteration_s

    def state(self) -> WorkerState:
        """Return what operators see of the worker."""
        stats = None if self.stats is None else stats_from([self.stats])
        version = self.card.version if self.card else 0
        age_s = self.heartbeat_age_s
        return WorkerState(self.name, self.status, self.pid, version, age_s, self.num_open, stats, self.node, self.role)

    def begin(self, request: OpenRequest) -> None:
        """Send a request; QueueFullError and LostWorkerError at once.

        ``request.taken`` is done with its first event or its refusal.
        """
        if not self.is_ready:
            raise LostWorkerError(f"{self.model}: the worker does not accept requests", was_running=False)
        if not self.has_room_for(request.client, request.priority):
            raise QueueFullError(f"The worker has {self.num_open} open requests, its maximum. Retry later.")
        request.key = next(self._keys)
        body_of(request.message).key = request.key
        request.due = time.monotonic() + request.priority * PRIORITY_S
        self._open[request.key] = request
        self.num_sent += 1
        if len(self._open) == 1 and not self._is_gathering and self._arrivals is not None:
            self._is_gathering = True
            self._arrivals.settle(self._on_gathered)
        self._send(request.message)

    def has(self, request: OpenRequest) -> bool:
        """Return True while the request is open in this worker."""
        return self._open.get(request.key) is request

    def abort(self, request: OpenRequest) -> None:
        """End a request and drop its later events.  One that has not been sent never is."""
        if self._open.pop(request.key, None) is None:
            return
        unsent = [message for message in self._unsent if message is not request.message]
        if len(unsent) < len(self._unsent):
            self._unsent = unsent
        else:
            self._send(pb.ToWorker(abort=pb.Abort(key=request.key)))
        self._changed()

    def give_back(self, request: OpenRequest) -> None:
        """End a request with which another worker goes on."""
        self.num_moved += 1
        self.abort(request)

    def stop(self) -> None:
        """Tell the worker to exit."""
        self._send(pb.ToWorker(stop=pb.Stop()))

    def drain(self) -> None:
        """Send the worker no more requests."""
        if self.status == "ready":
            self.status = "draining"

    async def idle(self) -> None:
        """Wait until the worker has no open requests."""
        while self._open and not self.gone.is_set():
            self._is_idle.clear()
            await self._is_idle.wait()

    async def empty(self, seconds: float) -> None:
        """Let other workers go on with the open requests, and wait up to ``seconds`` for the end of those that stay.

        Call ``drain`` before.
        """
        end, num_before = time.monotonic() + seconds, self.num_moved
        while self._open and not self.gone.is_set() and (left_s := end - time.monotonic()) > 0:
            await self._move_open(left_s)
            if self._open:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self.idle(), min(left_s, MOVE_PAUSE_S))
        if num_moved := self.num_moved - num_before:
            text = f"{self.model}: other workers go on with requests of worker {self.name}: {num_moved}"
            tell("requests_moved", text, model=self.model, worker=self.name, num_moved=num_moved)

    async def confirm_empty(self) -> None:
        """Wait until the worker's engine has no requests either: it may still run one that was just taken back.

        The second heartbeat from now on was sent after the worker had read everything sent so far.
        """
        wanted = self._num_heartbeats + 2
        while self.num_sent and not self.gone.is_set():
            stats = self.stats
            is_idle = stats is not None and not any(
                stats.numbers.get(name, 0) for name in ("num_running", "num_waiting")
            )
            if self._num_heartbeats >= wanted and is_idle:
                return
            await asyncio.sleep(_CONFIRM_PAUSE_S)

    async def _move_open(self, seconds: float) -> None:
        """Offer each open request to the other workers once."""
        moving: set[asyncio.Future[None]] = set()
        for request in [*self._open.values()]:
            if len(moving) >= _MAX_MOVES:
                done, moving = await asyncio.wait(moving, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
            if self.has(request) and (task := request.move()) is not None:
                moving.add(task)
                await asyncio.sleep(0)  # the other worker counts it before the next one looks for room

    def fail(self, reason: str) -> None:
        """Give the worker up: close its stream and fail its open requests.  Further calls do nothing."""
        if self.gone.is_set():
            return
        self.status = "lost"
        self.gone.set()
        if self._stream is not None:
            self._stream.close()
        reason = f"{self.model}: {reason}; send the request again"
        if not self.ready.done():
            self.ready.set_exception(LostWorkerError(reason))
            self.ready.exception()  # marks it as retrieved: there may be no reader
        lost = sorted(self._open.values(), key=lambda request: (request.due, request.key))
        self._open.clear()
        self.num_lost = len(lost)
        max_running = self.plan.max_requests if self.plan is not None else 0
        num_ahead: Counter[str] = Counter()
        for request in lost:  # the end of a request that had begun may not have been heard
            # The engine runs requests by due time, but a client with few of them overtakes one with many.  The primary
            # does not know that order, so each client counts as if it could have had the whole step.
            was_running = request.answer.has_begun or num_ahead[request.client] < max_running
            error = LostWorkerError(reason, was_running)
            num_ahead[request.client] += not request.answer.has_begun
            if not request.taken.done():
                request.taken.set_exception(error)
                request.taken.exception()
            else:
                request.on_lost(error)
        for on_message in [*self.transfers.values()]:
            on_message(None)
        if self._profiled is not None and not self._profiled.done():
            self._profiled.set_exception(UnavailableError(reason))
        self.on_gone()
        self._changed()

    async def profile(self, settings: pb.Profile) -> bytes:
        """Let the worker record steps; return its report as JSON.

        Raises UnavailableError if it is being profiled or is lost, and the error of the report.  Cancelling the caller
        ends the recording.
        """
        if self._profiled is not None or self.gone.is_set():
            raise UnavailableError(f"{self.name} is already being profiled, or was lost. Retry later.", 5.0)
        self._profiled = asyncio.get_running_loop().create_future()
        self._num_profiles += 1
        settings.number = self._num_profiles
        try:
            self._send(pb.ToWorker(profile=settings))
            return await self._profiled
        except asyncio.CancelledError:
            self._send(pb.ToWorker(profile=pb.Profile()))
            raise
        finally:
            self._profiled = None

    def _on_profiled(self, message: pb.Profiled) -> None:
        if self._profiled is None or self._profiled.done() or message.number != self._num_profiles:  # of an earlier one
            return
        if message.HasField("error"):
            self._profiled.set_exception(error_from(message.error))
        else:
            self._profiled.set_result(message.report)

    def send_page_message(self, message: pb.ToWorker) -> None:
        """Send a message of a transfer of pages; nothing to a worker that is lost."""
        if not self.gone.is_set():
            self._send(message)

    def on_message(self, message: pb.FromWorker) -> None:
        """Handle a message.

        A step proves that the engine's loop runs.  A heartbeat says how long ago it began its last iteration.  Raises
        InternalError for a message that may not come here.
        """
        kind = message.WhichOneof("kind")
        if kind == "step":
            self._note_iteration(0.0)
            if message.step.HasField("pages"):
                self._on_page_report(message.step.pages)
            for event in message.step.events:
                self._put(event)
        elif kind == "refused":
            self._on_refused(message.refused)
        elif kind == "heartbeat":
            heartbeat = message.heartbeat
            self._num_heartbeats += 1
            self._note_iteration(heartbeat.iteration_age_s)
            self.stats, self._longest_iteration_s = heartbeat.stats, heartbeat.longest_iteration_s
            if heartbeat.HasField("pages"):
                self._on_page_report(heartbeat.pages)
        elif kind in _PAGE_KINDS:
            on_message = self.transfers.get(getattr(message, kind).transfer)
            if on_message is not None:  # else the transfer was given up
                on_message(message)
        elif kind == "profiled":
            self._on_profiled(message.profiled)
        elif kind == "planned":
            self.plan = message.planned.plan
            self.on_planned()
        elif kind == "leave":
            self.drain()
            self._changed()
            self.on_leave()
        elif kind == "failed":
            if not self.ready.done():
                self.ready.set_exception(error_from(message.failed))
                self.ready.exception()
            self.fail("its model could not be loaded")
        else:
            raise InternalError(f"unexpected message from a worker: {kind}")

    def _note_iteration(self, age_s: float) -> None:
        self._iteration_age_s, self._last_message = age_s, time.monotonic()

    def follow_pages(self, on_pages: Callable[[PageReport], None]) -> None:
        """Call ``on_pages`` with each report of the worker's pages.  The first one, and one after a gap, are full."""
        self._on_pages = on_pages
        self._ask_pages()

    def _ask_pages(self) -> None:
        self._next_report = 0
        self._send(pb.ToWorker(ask_pages=pb.AskPages()))

    def _on_page_report(self, message: pb.PageReport) -> None:
        if self._on_pages is None or not (message.is_full or self._next_report):
            return
        if not message.is_full and message.number != self._next_report:
            self._ask_pages()
            return
        self._next_report = message.number + 1
        self._on_pages(pages_from(message))

    def get_ready(self, ready: pb.Ready, tokenizer: Tokenizer | None) -> None:
        """Note that the model is loaded; ``tokenizer`` is made from the files in ``ready``."""
        if self.gone.is_set():
            return
        self.card, self.tokenizer = card_from(ready.card), tokenizer
        self.plan, self.max_open = ready.plan, ready.max_open
        self.weights_id, self.state_id = ready.weights_id, ready.state_id
        self.copies_pages = ready.copies_pages
        self._note_iteration(0.0)
        self.status = "ready"
        self.on_planned()
        if not self.ready.done():
            self.ready.set_result(self)
        self._changed()

    async def watch(self, hang_s: float) -> None:
        """Give the worker up if its engine's loop makes no progress for ``hang_s`` seconds."""
        loop, pause_s = asyncio.get_running_loop(), hang_s / 8
        while not self.gone.is_set():
            due = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            if loop.time() - due > hang_s / 4:  # this process itself was stopped
                self.reset_heartbeat()
            elif self.heartbeat_age_s > hang_s:
                self.is_hung = True
                self.fail(f"the worker's engine made no progress for {hang_s:g} s and was ended")

    async def watch_link(self) -> None:
        """Give the worker up if nothing has come from it for ``SILENT_S`` seconds: its machine is lost, or the link."""
        if self._stream is not None and await until_silent(self._stream, SILENT_S) and not self.gone.is_set():
            self.is_hung = True
            self.fail(f"nothing has come from the worker's machine for {SILENT_S:g} s")

    def on_cause(self, callback: Callable[[bool], object]) -> None:
        """Call ``callback`` once it is known why the process has ended, or at once if nothing will say so.

        It gets True if the process crashed by itself, and False if it was killed from outside or its machine was lost.
        """
        if self.explained.is_set():
            callback(self._has_crashed)
        else:
            self._on_cause.append(callback)

    def note_cause(self, has_crashed: bool) -> None:
        """Note why the process has ended.  Further calls do nothing."""
        if self.explained.is_set():
            return
        self._has_crashed = has_crashed
        callbacks, self._on_cause = self._on_cause, []
        for callback in callbacks:
            callback(has_crashed)
        self.explained.set()

    def reset_heartbeat(self) -> None:
        """Restart the heartbeat's age: this process was stopped and has not read the worker's messages."""
        self._last_message = time.monotonic()

    def _put(self, message: pb.StepEvent) -> None:
        request = self._open.get(message.key)
        if request is None:
            return
        if message.is_last:
            del self._open[message.key]
        event = event_from(message)
        request.delivered.note(event)
        request.answer.put(event)
        if not request.taken.done():
            request.taken.set_result(None)
        if message.is_last:
            self._changed()

    def _on_refused(self, refused: pb.Refused) -> None:
        request = self._open.pop(refused.key, None)
        if request is not None:
            request.refuse(error_from(refused.error))
            self._changed()

    def _changed(self) -> None:
        if not self._open:
            self._is_idle.set()
        self.on_change()

    def _send(self, message: pb.ToWorker) -> None:
        self._unsent.append(message)
        if not self._is_gathering:
            self._flush()

    def _on_gathered(self) -> None:
        self._is_gathering = False
        self._flush()

    def send_over(self, stream: FrameStream[pb.FromWorker]) -> None:
        """Send messages over ``stream`` as fast as the worker reads them; ``fail`` closes it."""
        self._stream, stream.on_room = stream, self._flush
        self._flush()

    def _flush(self) -> None:
        """Send messages that are ready together in one write, so that an idle worker begins with all of them."""
        stream = self._stream
        while stream is not None and self._unsent and stream.has_room:
            batch, num_bytes = [self._unsent.pop(0)], 0
            while self._unsent and (num_bytes := num_bytes + batch[-1].ByteSize()) < _MAX_WRITE_BYTES:
                batch.append(self._unsent.pop(0))
            stream.send(*batch)
