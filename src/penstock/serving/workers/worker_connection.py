"""A worker as the primary sees it: one stream, the requests that are open on it, and when its engine last turned."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING, Final

from penstock.engine.fair_queue import heaviest
from penstock.engine.options import PRIORITY_S
from penstock.errors import InternalError, QueueFullError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.llm.backend import ModelCard, WorkerState
from penstock.runtime.program import PAGE_TOKENS
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.messages import card_from, error_from, events_from, stats_from
from penstock.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.processes.frames import FrameStream
    from penstock.serving.arrivals import Arrivals

__all__ = ["FRESH_S", "LostWorkerError", "OpenRequest", "PrefixMemory", "WorkerConnection", "page_names"]

FRESH_S: Final = 3.0
"""A worker says something each half second: one that said nothing for so long is not counted on."""
_MAX_PAGES: Final = 64
"""Pages at the beginning of a prompt that routing looks at: 2048 tokens."""
_MAX_NAMES: Final = 16384
_TOGETHER_BYTES: Final = 1 << 16
_names = count(1)


class LostWorkerError(UnavailableError):
    """The worker went away with the request, which ``was_running`` or waited for a place in a step."""

    def __init__(self, message: str, was_running: bool = True) -> None:
        super().__init__(message)
        self.was_running = was_running


def page_names(prompt_ids: Sequence[int], salt: str) -> list[bytes]:
    """A name for each leading page of a prompt, which stands for all tokens up to its end."""
    name = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    names = []
    for start in range(0, min(len(prompt_ids), _MAX_PAGES * PAGE_TOKENS) - PAGE_TOKENS + 1, PAGE_TOKENS):
        page = ",".join(map(str, prompt_ids[start : start + PAGE_TOKENS]))
        name = blake2b(name + page.encode(), digest_size=8).digest()
        names.append(name)
    return names


class PrefixMemory:
    """Which beginnings of prompts a worker saw lately, as far as the primary remembers."""

    def __init__(self) -> None:
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def add(self, names: Sequence[bytes]) -> None:
        """The worker computes these pages now."""
        for name in names:
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > _MAX_NAMES:
            self._names.popitem(last=False)

    def num_known(self, names: Sequence[bytes]) -> int:
        """How many leading pages it saw."""
        return next((i for i, name in enumerate(names) if name not in self._names), len(names))


class OpenRequest:
    """A request on its way through a worker.

    ``answer`` is filled with what comes; ``on_lost`` is told when the worker that took it goes away.
    """

    def __init__(self, answer: EventAnswer, message: pb.ToWorker, on_lost: Callable[[LostWorkerError], None]) -> None:
        self.answer = answer
        self.message = message
        self.on_lost = on_lost
        self.client = self._options.client
        self.key = 0
        self.due = 0.0
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def priority(self) -> int:
        """The lower goes first."""
        return self._options.priority

    @property
    def _options(self) -> pb.Options:
        options: pb.Options = getattr(self.message, self.message.WhichOneof("what") or "submit").options
        return options

    def refuse(self, error: PenstockError) -> None:
        """The worker does not take it."""
        if not self.taken.done():
            self.taken.set_exception(error)
        else:
            self.answer.fail(error)


class WorkerConnection:
    """The primary's end of a worker's stream, from its Join on.

    ``arrivals``: the first request to a worker that rests waits for those that are about to come.
    """

    def __init__(self, model: str, pid: int, arrivals: Arrivals | None = None) -> None:
        self.name = f"{model}-{next(_names)}"
        self.model = model
        self.pid = pid
        self.status = "starting"
        self.card: ModelCard | None = None
        self.plan: pb.Plan | None = None
        self.tokenizer: Tokenizer | None = None
        self.max_open = 0
        self.weights_id = ""
        self.figures: pb.Stats | None = None
        self.prefixes = PrefixMemory()
        self.num_sent = 0
        self.is_hung = False
        self.ready: asyncio.Future[WorkerConnection] = asyncio.get_running_loop().create_future()
        self.gone = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self.on_planned: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        self.num_lost = 0
        """Requests that were open when it went away."""
        self._open: dict[int, OpenRequest] = {}
        self._keys = count(1)
        self._out: list[pb.ToWorker] = []
        self._has_out = asyncio.Event()
        self._arrivals, self._is_gathering = arrivals, False
        self._stream: FrameStream[pb.FromWorker] | None = None
        self._is_idle = asyncio.Event()
        self._heard = time.monotonic()
        self._turn_age_s = 0.0
        self._longest_turn_s = 0.0

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.status == "ready"

    @property
    def has_room(self) -> bool:
        """Whether one more request may be open."""
        return not self.max_open or self.num_open < self.max_open

    def has_room_for(self, client: str, priority: int | None = None) -> bool:
        """Return True if one more request of a client may be open, as ``Engine.has_room_for`` does."""
        if self.has_room:
            return True
        waiting = ((one.client, one.priority) for one in self._open.values() if not one.answer.has_begun)
        return heaviest(waiting, client, priority) is not None

    @property
    def heartbeat_age_s(self) -> float:
        """Since the engine's loop last turned, as far as is known here."""
        if self.card is None:
            return math.inf
        return self._turn_age_s + time.monotonic() - self._heard

    @property
    def is_fresh(self) -> bool:
        """Whether it takes requests and is likely to answer soon: it was heard of lately, and its engine's loop turned
        within the time that a turn of this model may well take."""
        if not self.is_ready or time.monotonic() - self._heard > FRESH_S:
            return False
        return self.heartbeat_age_s <= FRESH_S + self._longest_turn_s

    def state(self) -> WorkerState:
        """What operators see."""
        figures = None if self.figures is None else stats_from([self.figures])
        version = self.card.version if self.card else 0
        age = self.heartbeat_age_s
        return WorkerState(self.name, self.status, self.pid, version, age, self.num_open, figures)

    def begin(self, request: OpenRequest) -> None:
        """Send a request; ``request.taken`` ends with its first news or a refusal.  QueueFullError at once."""
        if not self.is_ready:
            raise LostWorkerError(f"{self.model}: the worker takes no requests")
        if not self.has_room_for(request.client, request.priority):
            raise QueueFullError(f"The worker has {self.num_open} open requests, its maximum. Retry later.")
        request.key = next(self._keys)
        getattr(request.message, request.message.WhichOneof("what") or "submit").key = request.key
        request.due = time.monotonic() + request.priority * PRIORITY_S
        self._open[request.key] = request
        self.num_sent += 1
        if len(self._open) == 1 and not self._is_gathering and self._arrivals is not None:
            self._is_gathering = True
            self._arrivals.settle(self._gathered)
        self._send(request.message)

    def abort(self, request: OpenRequest) -> None:
        """End a request; nothing more comes of it.  What a worker that does not read was not sent yet, it never is."""
        if self._open.pop(request.key, None) is None:
            return
        unsent = [message for message in self._out if message is not request.message]
        if len(unsent) < len(self._out):
            self._out = unsent
        else:
            self._send(pb.ToWorker(abort=pb.Abort(key=request.key)))
        self._changed()

    def stop(self) -> None:
        """Tell it to end."""
        self._send(pb.ToWorker(stop=pb.Stop()))

    def drain(self) -> None:
        """Give it no more requests."""
        if self.status == "ready":
            self.status = "draining"

    async def idle(self) -> None:
        """Until nothing is open on it."""
        while self._open and not self.gone.is_set():
            self._is_idle.clear()
            await self._is_idle.wait()

    def fail(self, why: str) -> None:
        """It is gone or given up: whatever was open is lost."""
        if self.gone.is_set():
            return
        self.status = "lost"
        self.gone.set()
        self._has_out.set()
        if self._stream is not None:
            self._stream.close()
        why = f"{self.model}: {why}; send the request again"
        if not self.ready.done():
            self.ready.set_exception(LostWorkerError(why))
            self.ready.exception()  # seen: nobody may be waiting
        lost = sorted(self._open.values(), key=lambda request: (request.due, request.key))
        self._open.clear()
        self.num_lost = len(lost)
        max_places = self.plan.max_requests if self.plan is not None else 0
        places: Counter[str] = Counter()
        for request in lost:  # what had begun may have ended unheard
            # The engine gives places by due time, but a client with few requests overtakes one with many: as far as is
            # known here each client may have had all places.
            error = LostWorkerError(why, request.answer.has_begun or places[request.client] < max_places)
            places[request.client] += not request.answer.has_begun
            if not request.taken.done():
                request.taken.set_exception(error)
                request.taken.exception()
            else:
                request.on_lost(error)
        self.on_gone()
        self._changed()

    def hear(self, message: pb.FromWorker) -> None:
        """Take a message.  Whatever an engine sends proves that it turns, but for a beat, which says how long ago."""
        what = message.WhichOneof("what")
        if what == "step":
            self._turned(0.0)
            for one in message.step.news:
                self._put(one)
        elif what == "taken":
            self._answer_taken(message.taken)
        elif what == "beat":
            self._turned(message.beat.turn_age_s)
            self.figures, self._longest_turn_s = message.beat.figures, message.beat.longest_turn_s
        elif what == "planned":
            self.plan = message.planned.plan
            self.on_planned()
        elif what == "failed":
            if not self.ready.done():
                self.ready.set_exception(error_from(message.failed))
                self.ready.exception()
            self.fail("its model could not be loaded")
        else:
            raise InternalError(f"a worker sent {what}, which does not belong there")

    def _turned(self, age_s: float) -> None:
        self._turn_age_s, self._heard = age_s, time.monotonic()

    def get_ready(self, ready: pb.Ready, tokenizer: Tokenizer | None) -> None:
        """The model is loaded; ``tokenizer`` is made of the files that came with that."""
        if self.gone.is_set():
            return
        self.card, self.tokenizer = card_from(ready.card), tokenizer
        self.plan, self.max_open, self.weights_id = ready.plan, ready.max_open, ready.weights_id
        self._turned(0.0)
        self.status = "ready"
        self.on_planned()
        if not self.ready.done():
            self.ready.set_result(self)
        self._changed()

    async def watch(self, hang_s: float) -> None:
        """Give the worker up when its engine's loop stands for so long."""
        loop, pause = asyncio.get_running_loop(), hang_s / 8
        while not self.gone.is_set():
            due = loop.time() + pause
            await asyncio.sleep(pause)
            if loop.time() - due > hang_s / 4:  # this process itself stood still
                self.forgive()
            elif self.heartbeat_age_s > hang_s:
                self.is_hung = True
                self.fail(f"the worker's engine did nothing for {hang_s:g} s and was ended")

    def forgive(self) -> None:
        """This process itself stood still: what the worker sent meanwhile was not read yet."""
        self._heard = time.monotonic()

    def _put(self, message: pb.StepEvent) -> None:
        request = self._open.get(message.key)
        if request is None:
            return
        if message.is_last:
            del self._open[message.key]
        request.answer.put(events_from(message))
        if not request.taken.done():
            request.taken.set_result(None)
        if message.is_last:
            self._changed()

    def _answer_taken(self, taken: pb.Taken) -> None:
        request = self._open.get(taken.key)
        if request is None:
            return
        if taken.HasField("error"):
            del self._open[taken.key]
            request.refuse(error_from(taken.error))
            self._changed()
        elif not request.taken.done():
            request.taken.set_result(None)

    def _changed(self) -> None:
        if not self._open:
            self._is_idle.set()
        self.on_change()

    def _send(self, message: pb.ToWorker) -> None:
        self._out.append(message)
        if self._stream is None:
            self._has_out.set()
        elif not self._is_gathering:
            self._pour()

    def _gathered(self) -> None:
        self._is_gathering = False
        self._pour()

    def pour_into(self, stream: FrameStream[pb.FromWorker]) -> None:
        """Send the worker what it is to be sent, as fast as it reads; the stream ends when it is gone."""
        self._stream, stream.on_room = stream, self._pour
        self._pour()

    def _pour(self) -> None:
        """What goes together arrives together: a worker that rests begins with all of it."""
        stream = self._stream
        while stream is not None and self._out and stream.has_room:
            together, num_bytes = [self._out.pop(0)], 0
            while self._out and (num_bytes := num_bytes + together[-1].ByteSize()) < _TOGETHER_BYTES:
                together.append(self._out.pop(0))
            stream.send(*together)

    async def outgoing(self) -> AsyncIterator[pb.ToWorker]:
        """What the worker is to be sent, until it is gone."""
        while not self.gone.is_set():
            await self._has_out.wait()
            self._has_out.clear()
            out, self._out = self._out, []
            for message in out:
                yield message
