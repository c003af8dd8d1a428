"""Sends a request to a worker, and to another one if the first is lost.

A worker that is being drained gives its requests back, and one that is lost leaves them.  Another one goes on with
their answers: it computes prompt and delivered tokens again and samples the tokens that the first one would have
sampled, because logits do not depend on the company and a draw depends on nothing but the seed and the position.  The
number of workers that may be lost with a request is bounded by ``crash_tracker``.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import DeadlineError, InternalError, QueueFullError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import CONTINUED, FAILED, RETRIED, CrashTracker, Loss, Verdict
from penstock.serving.workers.messages import options_to
from penstock.serving.workers.moving.copy_pages import copy_pages
from penstock.serving.workers.moving.delivered import Delivered
from penstock.serving.workers.worker_connection import (
    MOVE_PAUSE_S,
    LostWorkerError,
    MovedRequestError,
    OpenRequest,
    WorkerConnection,
    body_of,
    page_keys,
)

if TYPE_CHECKING:
    from penstock.engine.options import RequestOptions
    from penstock.serving.workers.worker_routing import RoutedRequest

__all__ = ["Failover", "WorkerRoutes"]

RETRY_WAIT_S: Final = 60.0
"""Limit on the time that a retry waits for a ready worker."""
_CAUSE_WAIT_S: Final = 1.0
"""Limit on the time that a retry waits for the cause of a loss.  A crash is known within milliseconds; the loss of a
machine can take seconds."""
_ALONE_S: Final = 20.0
"""Limit on the time that a request runs alone in a worker."""


class WorkerRoutes(Protocol):
    """The part of a model that chooses workers for requests."""

    crashes: CrashTracker
    suspects: asyncio.Lock
    """The lock of a request that may have crashed a worker, held until its first event or its end.
    Suspects thus run one at a time, and another crash has only one suspect."""

    @property
    def is_reserved(self) -> bool:
        """True if every ready worker is kept for a request that runs alone."""

    def reserve(self, *, waits: bool, state_id: str = "") -> AbstractAsyncContextManager[WorkerConnection | None]:
        """Keep one worker for a request that runs alone: its other requests move, or wait in this process.

        With ``state_id`` it is one that goes on with answers of the workers of that id.  Without ``waits`` it is a
        worker without requests, or None.  Raises UnavailableError if there is no worker, or if its requests do not end
        in time.
        """

    def choose(
        self,
        num_tokens: int = 0,
        keys: Sequence[bytes] = (),
        session: str = "",
        state_id: str = "",
        only: WorkerConnection | None = None,
    ) -> RoutedRequest:
        """Return the worker for a prompt of so many tokens, whose leading pages have these keys; UnavailableError.

        ``session`` decides between equals.  With ``state_id`` it is one that goes on with answers of the workers of
        that id; ``only`` is the only choice.
        """

    def hands_over(self, source: WorkerConnection, target: WorkerConnection | None = None) -> bool:
        """Return True if another worker, or ``target``, goes on with the answers that this one, for prefill, began."""

    def can_take(self, state_id: str, client: str) -> bool:
        """Return True if a worker can go on with a request of a worker with this id; "": one that has not begun."""

    def may_go_on(self, state_id: str) -> bool:
        """Return True if a worker with this id runs, or is started, that goes on with answers of a lost one."""

    async def wait_ready(self, seconds: float, state_id: str = "") -> None:
        """Wait until a worker accepts requests, with ``state_id`` one of that id; UnavailableError on timeout."""

    async def wake(self, seconds: float | None) -> None:
        """Wait for a worker if there is none now because their number follows the load; UnavailableError on timeout."""


class Failover:
    """One request on its way through workers.  ``make`` returns its message for given options."""

    def __init__(
        self,
        routes: WorkerRoutes,
        prompt_ids: Sequence[int],
        options: RequestOptions,
        make: Callable[[pb.Options], pb.ToWorker],
    ) -> None:
        self._routes = routes
        self._options = options
        self._make = make
        self._num_tokens = len(prompt_ids)
        self._page_keys = page_keys(prompt_ids, options.cache_salt)
        self._start_time = time.monotonic()
        self._connection: WorkerConnection | None = None
        self._routed: RoutedRequest | None = None
        self._request: OpenRequest | None = None
        self._retry: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._alone_on: WorkerConnection | None = None
        """The worker in which the request runs alone."""
        self._goal = -1
        """The number of delivered tokens above which the request has settled."""
        self._keeping: asyncio.Task[None] | None = None
        self._delivered = Delivered()
        self._state_id = ""
        """The id of the worker that began the answers."""
        self._is_moving = False
        """True while pages are copied to another worker; the present one goes on meanwhile."""
        self._target: WorkerConnection | None = None
        self._salt = options.cache_salt
        self._moved_at = 0.0
        """The time at which the request left a worker that was being drained or lost; 0 if it did not."""
        self._has_lost_worker = False
        """True from the loss of the worker until the next one has begun."""
        self.answer = EventAnswer(self._abort)
        self.answer.on_settled = self._on_settled

    async def start(self) -> EventAnswer:
        """Send the request and return its answer after the first event; raises the error of a worker that refuses."""
        try:
            await self._wake()
            verdict = self._verdict()
            while True:
                try:
                    await self._send_as(verdict)
                    return self.answer
                except LostWorkerError as error:
                    self._note_loss(error)
                verdict = await self._verdict_with_cause()
                self._check(verdict)
                await self._routes.wait_ready(RETRY_WAIT_S)
        except BaseException as error:
            self._count_loss(FAILED if isinstance(error, Exception) else "")
            self.answer.close()
            raise

    async def _wake(self) -> None:
        try:
            await self._routes.wake(self._options.deadline_s)
        except UnavailableError:
            self._remaining_options()  # the deadline has passed: DeadlineError
            raise

    async def _wait_for_worker(self) -> None:
        """Wait for a worker that is not kept for another request, at most until the deadline."""
        deadline_s = self._remaining_options().deadline_s if self._options.deadline_s is not None else RETRY_WAIT_S
        try:
            await self._routes.wait_ready(min(RETRY_WAIT_S, deadline_s), self._state_id)
        except UnavailableError:
            self._remaining_options()
            raise

    @cached_property
    def _fingerprint(self) -> bytes:
        """A hash that equal requests share; computed only after a worker has crashed."""
        return _fingerprint(self._make(options_to(replace(self._options, deadline_s=None, client=""))))

    async def _send(self) -> None:
        """Send the request and wait for its first event, also if workers that are being drained give it back."""
        while True:
            if self._alone_on is None and self._routes.is_reserved:
                await self._wait_for_worker()
            try:
                await self._send_once()
                return
            except MovedRequestError:
                await self._routes.wait_ready(RETRY_WAIT_S, self._state_id)
            except QueueFullError:  # others took the place
                if not self._moved_at or time.monotonic() - self._moved_at > RETRY_WAIT_S:
                    raise
                await asyncio.sleep(MOVE_PAUSE_S)

    async def _send_once(self) -> None:
        routed = self._choose()
        connection = self._connection = routed.connection
        message = self._message()
        request = self._request = OpenRequest(self.answer, message, self._on_lost, self._move, self._delivered)
        connection.begin(request)
        routed.begin()
        self._routed = routed
        if self._state_id:
            routed.is_whole, self._delivered.has_moved = False, True
        elif connection.card is not None:
            self.answer.version = connection.card.version
        try:
            await request.taken
        except BaseException:
            routed.end(self.answer)
            del request  # breaks a reference cycle: an error holds this frame, and the request holds the error
            raise
        if not self.answer.is_over and not connection.has(request):  # lost or given back since, and sent again
            return
        routed.note_first()
        self._count_begun()
        self._look()
        if not self.answer.is_over and self._alone_on is None and self._routes.hands_over(connection):
            self._move(for_role=True)

    def _choose(self) -> RoutedRequest:
        """Return the worker for the request; the one that has its pages if that has a place."""
        num_tokens = self._num_tokens + self._delivered.num_tokens
        target, self._target = self._target, None
        is_own = target is not None and target is self._alone_on
        only = target if target is not None and (is_own or (target.is_fresh and target.has_place)) else None
        session = self._options.session or self._options.client
        return self._routes.choose(num_tokens, self._page_keys, session, self._state_id, only)

    def _message(self) -> pb.ToWorker:
        """Return the request as it is sent: with a seed, so that another worker goes on with the same draws."""
        message = self._make(self._remaining_options())
        if message.HasField("submit"):
            if not message.submit.sampling.HasField("seed"):
                message.submit.sampling.seed = self._seed
            message.submit.begun.extend(self._delivered.messages())
        return message

    @cached_property
    def _seed(self) -> int:
        return secrets.randbits(63)

    def _move(self, *, for_role: bool = False) -> asyncio.Future[None] | None:
        """Leave the worker, which is being drained, if another one can go on with the answers; see OpenRequest.

        ``for_role``: it is not drained, and the request goes to a worker for decode only.
        """
        connection, request = self._connection, self._request
        if connection is None or request is None or self._is_moving:
            return None
        has_begun = request.taken.done()
        if has_begun and not connection.state_id:
            return None
        can_go = self._routes.can_take(connection.state_id if has_begun else self._state_id, self._options.client)
        if not can_go and not connection.is_reserved:  # from a worker that is kept for another request it goes anyway
            return None
        self._moved_at = time.monotonic()
        if not has_begun:  # _send waits for it
            connection.give_back(request)
            request.taken.set_exception(MovedRequestError())
            return asyncio.ensure_future(asyncio.sleep(0))
        self._count_begun()
        self._state_id = connection.state_id
        if not can_go:  # it waits in this process until a worker is free
            connection.give_back(request)
            if self._routed is not None:
                self._routed.end(self.answer)
            self._retry = asyncio.ensure_future(self._go_on())
            return asyncio.ensure_future(asyncio.sleep(0))
        self._is_moving = True
        self._retry = asyncio.ensure_future(self._hand_over(connection, request, for_role=for_role))
        return self._retry

    async def _hand_over(self, source: WorkerConnection, request: OpenRequest, *, for_role: bool) -> None:
        """Copy the pages of a begun request to another worker while it goes on; then let that worker go on.

        If none has a free place by then, the request stays, and is offered again if its worker is drained.
        """
        try:
            with suppress(UnavailableError):
                self._target = self._choose().connection
            if for_role and not self._takes_over(source):
                return
            await self._copy_pages(source, request)
            if not self._is_moving or self._request is not request:  # its worker was lost, or it ended
                return
            can_go = self._routes.can_take(self._state_id, self._options.client)
            if not (self._takes_over(source) if for_role else can_go):
                return
        finally:
            if self._request is request:  # otherwise the flag may be that of a later move
                self._is_moving = False
        source.give_back(request)
        if self._routed is not None:
            self._routed.end(self.answer)
        await self._go_on()

    def _takes_over(self, source: WorkerConnection) -> bool:
        """Return True if the target, for decode, goes on with the answers; without one it is forgotten."""
        target, self._target = self._target, None
        if target is not None and self._routes.hands_over(source, target):
            self._target = target
        return self._target is not None

    async def _copy_pages(self, source: WorkerConnection, request: OpenRequest) -> None:
        target = self._target  # if the source is lost meanwhile, the request gets another one
        if target is None:
            return
        salt = request.message.submit.options.cache_salt
        if source.is_remote:  # it may send anything, which no other prompt must share
            self._salt = secrets.token_hex(16)
        for token_ids in self._texts(request.message.submit):
            await copy_pages(source, target, token_ids, salt, self._salt)

    def _texts(self, submit: pb.Submit) -> list[list[int]]:
        """Return prompt and delivered tokens of each open answer; the prompt as it runs, which may have been cut."""
        prompt_ids = list(submit.prompt_ids)[-max(1, self.answer.num_prompt_tokens) :]
        return [prompt_ids + token_ids for token_ids in self._delivered.open_answers()]

    async def _send_as(self, verdict: Verdict) -> None:
        """Send the request as it may run now and return after its first event, or raise why it may not run."""
        self._check(verdict)
        if verdict is Verdict.FREE:
            await self._send()
            return
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._routes.suspects)
            verdict = max(verdict, self._verdict())
            self._check(verdict)
            await self._wait_for_worker()  # it may have been lost with the suspect before
            reserved = self._routes.reserve(waits=verdict is Verdict.ALONE, state_id=self._state_id)
            connection = await stack.enter_async_context(reserved)
            self._settled.clear()
            if connection is not None:
                self._alone_on = self._target = connection
                self._goal = self._routes.crashes.num_tokens(self._fingerprint, goes_on=bool(self._state_id))
                self._delivered.on_note = self._look
            self._keeping = asyncio.ensure_future(self._keep(stack.pop_all(), None if connection is None else _ALONE_S))
            try:
                await self._send()
            except BaseException:
                self._settled.set()
                raise

    async def _keep(self, reserved: AsyncExitStack, limit_s: float | None) -> None:
        """Keep lock and worker until the request is past the point where its workers were lost before."""
        async with reserved:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._settled.wait(), limit_s)
            self._end_alone()

    def _look(self) -> None:
        """Note that the request has settled once it has ended or is past the point where its workers were lost."""
        if self.answer.is_over or self._delivered.num_tokens > self._goal:
            self._settled.set()
            self._end_alone()

    def _end_alone(self) -> None:
        self._alone_on, self._goal, self._delivered.on_note = None, -1, None

    def _check(self, verdict: Verdict) -> None:
        """Raise why the request may not run, if it may not."""
        if verdict is Verdict.REFUSED:
            raise InternalError("request refused: workers crashed while it was open, the last one while it ran alone")
        if verdict is Verdict.PAUSED:
            message = "too many workers were lost while this request ran; send it again later"
            raise UnavailableError(message, self._routes.crashes.pause_s(self._fingerprint))

    def _verdict(self) -> Verdict:
        crashes = self._routes.crashes
        return crashes.verdict(self._fingerprint) if crashes else Verdict.FREE

    def _remaining_options(self) -> pb.Options:
        """Return the options with the time that is left until the deadline; DeadlineError after it."""
        options = options_to(self._options)
        options.cache_salt = self._salt
        if self._options.deadline_s is not None:
            options.deadline_s = self._options.deadline_s - (time.monotonic() - self._start_time)
            if options.deadline_s <= 0:
                missing = "went on with the answer" if self._delivered.num_tokens else "accepted the request"
                message = f"deadline_s: no worker {missing} within {self._options.deadline_s:g} s"
                raise DeadlineError(message, param="deadline_s")
        return options

    def _on_settled(self) -> None:
        self._look()
        if self._routed is not None:
            self._routed.end(self.answer) if self.answer.is_over else self._routed.note_first()
        if self.answer.is_complete and self._routes.crashes:
            self._routes.crashes.clear(self._fingerprint)
        if self.answer.is_over:
            self._request = None

    def _on_lost(self, error: LostWorkerError) -> None:
        """Let another worker go on with what the lost one has begun; without one that may, fail the request.

        While pages were copied, ``_move`` has found another worker already.
        """
        connection = self._connection
        state_id = connection.state_id if connection is not None else ""
        may_go_on = self._is_moving or self._routes.may_go_on(state_id)
        self._count_begun()  # of an earlier loss, if this worker was lost right after its first event
        self._is_moving, self._state_id = False, state_id
        self._after_loss(error, may_go_on=may_go_on)

    def _after_loss(self, error: LostWorkerError, *, may_go_on: bool) -> None:
        self._note_loss(error)
        self._moved_at = time.monotonic()
        self._settled.set()
        if self._routed is not None:
            self._routed.end(self.answer)
        if may_go_on:
            self._retry = asyncio.ensure_future(self._go_on(is_lost=True))
        else:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._count_loss(FAILED)
        self.answer.fail(error)

    def _count_loss(self, outcome: str) -> None:
        """Count what came of a request whose worker was lost, once for each loss; "": its client has left."""
        if self._has_lost_worker and outcome:
            self._routes.crashes.outcomes[outcome] += 1
        self._has_lost_worker = False

    def _count_begun(self) -> None:
        """Count a loss after which the present worker has begun."""
        self._count_loss(CONTINUED if self._state_id else RETRIED)

    def _note_loss(self, error: LostWorkerError) -> None:
        """Have the loss of the worker counted as soon as its cause is known."""
        self._has_lost_worker = True
        connection = self._connection
        if connection is None:
            return
        was_alone = self._alone_on is connection
        loss = Loss(connection.name, error.was_running, was_alone, self._delivered.num_tokens)
        self._end_alone()
        crashes, fingerprint = self._routes.crashes, self._fingerprint
        connection.on_cause(lambda has_crashed: crashes.note(fingerprint, loss, has_crashed=has_crashed))

    async def _verdict_with_cause(self) -> Verdict:
        """Return how the request may run after a loss: until its cause is known, the request is suspected."""
        connection = self._connection
        if connection is not None and not connection.explained.is_set():
            try:
                async with asyncio.timeout(_CAUSE_WAIT_S):  # wait_for of Python 3.11 may swallow a cancellation
                    await connection.explained.wait()
            except TimeoutError:
                return max(self._verdict(), Verdict.SUSPECT)
        return self._verdict()

    async def _go_on(self, *, is_lost: bool = False) -> None:
        """Send the request to the next worker: after a loss, or because the present one gave it back."""
        try:
            verdict = await self._verdict_with_cause() if is_lost else Verdict.FREE
            self._check(verdict)
            await self._wait_for_worker()
            await self._send_as(verdict)
        except LostWorkerError as error:  # before the worker accepted it; otherwise _on_lost was called
            self._after_loss(error, may_go_on=True)
        except Exception as error:  # of any kind: the reader waits for the answer
            self._fail(error)

    def _abort(self) -> None:
        self._settled.set()
        if self._routed is not None:
            self._routed.end(self.answer)
        if self._retry is not None:
            self._retry.cancel()
        if self._connection is not None and self._request is not None:
            self._connection.abort(self._request)


def _fingerprint(message: pb.ToWorker) -> bytes:
    """Return a hash of a request without its id: a client may send the same request again with another one."""
    body_of(message).request_id = ""
    return blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
