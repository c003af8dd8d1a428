"""Sends a request to a worker, and to another one if the first is lost before its first event.

A worker that is being drained gives its requests back.  Another one goes on with their answers: it computes prompt and
delivered tokens again and samples the tokens that the first one would have sampled, because logits do not depend on the
company and a draw depends on nothing but the seed and the position.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import DeadlineError, InternalError, QueueFullError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import MAX_CRASHES, CrashTracker
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


class WorkerRoutes(Protocol):
    """The part of a model that chooses workers for requests."""

    crashes: CrashTracker
    suspects: asyncio.Lock
    """The lock of a request that may have crashed a worker, held until its first event or its end.
    Suspects thus run one at a time, and another crash has only one suspect."""

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

    def can_take(self, state_id: str, client: str) -> bool:
        """Return True if a worker can go on with a request of a worker with this id; "": one that has not begun."""

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
        self._delivered = Delivered()
        self._state_id = ""
        """The id of the worker that began the answers."""
        self._is_moving = False
        """True while pages are copied to another worker; the present one goes on meanwhile."""
        self._target: WorkerConnection | None = None
        self._salt = options.cache_salt
        self._moved_at = 0.0
        """When the request left a worker that was being drained; 0 if it did not."""
        self.answer = EventAnswer(self._abort)
        self.answer.on_settled = self._on_settled

    async def start(self) -> EventAnswer:
        """Send the request and return its answer after the first event; raises the error of a worker that refuses."""
        try:
            await self._wake()
            num_crashes = self._routes.crashes.num_crashes(self._fingerprint) if self._routes.crashes else 0
            while True:
                if num_crashes >= MAX_CRASHES:
                    raise self._refusal()
                try:
                    await (self._send() if num_crashes == 0 else self._send_as_suspect())
                    return self.answer
                except LostWorkerError as error:
                    num_crashes = await self._count_again(self._count_crash(error))
                await self._routes.wait_ready(RETRY_WAIT_S)
        except BaseException:
            self.answer.close()
            raise

    async def _wake(self) -> None:
        try:
            await self._routes.wake(self._options.deadline_s)
        except UnavailableError:
            self._remaining_options()  # the deadline has passed: DeadlineError
            raise

    @cached_property
    def _fingerprint(self) -> bytes:
        """A hash that equal requests share; computed only after a worker has crashed."""
        return _fingerprint(self._make(options_to(replace(self._options, deadline_s=None, client=""))))

    async def _send(self) -> None:
        """Send the request and wait for its first event, also if workers that are being drained give it back."""
        while True:
            try:
                await self._send_once()
                return
            except MovedRequestError:
                await self._routes.wait_ready(RETRY_WAIT_S)
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
            routed.is_whole = False
        elif connection.card is not None:
            self.answer.version = connection.card.version
        try:
            await request.taken
        except BaseException:
            routed.end(self.answer)
            raise
        finally:
            del request  # breaks a reference cycle: an error holds this frame, and the request holds the error
        routed.note_first()
        self._settled.set()

    def _choose(self) -> RoutedRequest:
        """Return the worker for the request; the one that has its pages if that has a place."""
        num_tokens = self._num_tokens + self._delivered.num_tokens
        target, self._target = self._target, None
        only = target if target is not None and target.is_fresh and target.has_place else None
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

    def _move(self) -> asyncio.Future[None] | None:
        """Leave the worker, which is being drained, if another one can go on with the answers; see OpenRequest."""
        connection, request = self._connection, self._request
        if connection is None or request is None or self._is_moving:
            return None
        has_begun = request.taken.done()
        if has_begun and not connection.state_id:
            return None
        if not self._routes.can_take(connection.state_id if has_begun else "", self._options.client):
            return None
        self._moved_at = time.monotonic()
        if not has_begun:  # _send waits for it
            connection.give_back(request)
            request.taken.set_exception(MovedRequestError())
            return asyncio.ensure_future(asyncio.sleep(0))
        self._state_id, self._is_moving = connection.state_id, True
        self._retry = asyncio.ensure_future(self._hand_over(connection, request))
        return self._retry

    async def _hand_over(self, source: WorkerConnection, request: OpenRequest) -> None:
        """Copy the pages of a begun request to another worker while it goes on; then let that worker go on.

        If none has a free place by then, the request stays, and is offered again.
        """
        try:
            await self._copy_pages(source, request)
            if not self._is_moving or self._request is not request:  # its worker was lost, or it ended
                return
            if not self._routes.can_take(self._state_id, self._options.client):
                return
        finally:
            self._is_moving = False
        source.give_back(request)
        if self._routed is not None:
            self._routed.end(self.answer)
        await self._send_again(is_suspect=False)

    async def _copy_pages(self, source: WorkerConnection, request: OpenRequest) -> None:
        with suppress(UnavailableError):
            self._target = self._choose().connection
        if self._target is None:
            return
        salt = request.message.submit.options.cache_salt
        if source.is_remote:  # it may send anything, which no other prompt must share
            self._salt = secrets.token_hex(16)
        for token_ids in self._texts(request.message.submit):
            await copy_pages(source, self._target, token_ids, salt, self._salt)

    def _texts(self, submit: pb.Submit) -> list[list[int]]:
        """Return prompt and delivered tokens of each open answer; the prompt as it runs, which may have been cut."""
        prompt_ids = list(submit.prompt_ids)[-max(1, self.answer.num_prompt_tokens) :]
        return [prompt_ids + token_ids for token_ids in self._delivered.open_answers()]

    async def _send_as_suspect(self) -> None:
        async with self._routes.suspects:
            self._settled.clear()
            await self._send()
            await self._settled.wait()

    def _remaining_options(self) -> pb.Options:
        """Return the options with the time that is left until the deadline; DeadlineError after it."""
        message = options_to(self._options)
        message.cache_salt = self._salt
        if self._options.deadline_s is not None:
            message.deadline_s = self._options.deadline_s - (time.monotonic() - self._start_time)
            if message.deadline_s <= 0:
                raise DeadlineError(
                    f"deadline_s: no worker accepted the request within {self._options.deadline_s:g} s",
                    param="deadline_s",
                )
        return message

    def _on_settled(self) -> None:
        self._settled.set()
        if self._routed is not None:
            self._routed.end(self.answer) if self.answer.is_over else self._routed.note_first()
        if self.answer.is_complete and self._routes.crashes:
            self._routes.crashes.clear(self._fingerprint)
        if self.answer.is_over:
            self._request = None

    def _refusal(self) -> InternalError:
        return InternalError(
            f"request refused: {MAX_CRASHES} workers crashed while this request was open, so it may be the cause"
        )

    def _on_lost(self, error: LostWorkerError) -> None:
        """Fail the request if the worker that was lost had begun it and was not handing it over; else send it again."""
        may_go_on = self._is_moving or not self.answer.has_begun
        self._is_moving = False
        self._after_loss(error, may_go_on=may_go_on)

    def _after_loss(self, error: LostWorkerError, *, may_go_on: bool) -> None:
        num_crashes = self._count_crash(error)
        self._settled.set()
        if self._routed is not None:
            self._routed.end(self.answer)
        if num_crashes >= MAX_CRASHES:
            self.answer.fail(self._refusal())
        elif not may_go_on:
            self.answer.fail(error)
        else:
            self._retry = asyncio.ensure_future(self._send_again(num_crashes > 0))

    def _count_crash(self, error: LostWorkerError) -> int:
        """Return how many workers crashed while they ran the request, including this one if it did.

        It is not known at once whether a worker of a cluster has crashed or its machine is lost.  Until then the
        request is suspected, but not refused: the loss of machines is no request's fault.
        """
        connection, crashes, fingerprint = self._connection, self._routes.crashes, self._fingerprint
        count = crashes.add if error.was_running else crashes.add_wait
        if connection is None or connection.explained.is_set():
            return count(fingerprint, "" if connection is None else connection.name)
        name = connection.name
        connection.on_cause(lambda has_crashed: count(fingerprint, name) if has_crashed else None)
        known = crashes.num_crashes(fingerprint)
        return max(known, min(known + error.was_running, MAX_CRASHES - 1))

    async def _count_again(self, num_crashes: int) -> int:
        """Wait for the cause of the last loss, if it is to be known, and return the number of crashes with it."""
        connection = self._connection
        if connection is None or connection.explained.is_set():
            return num_crashes
        try:
            await asyncio.wait_for(connection.explained.wait(), _CAUSE_WAIT_S)
        except TimeoutError:
            return num_crashes
        return self._routes.crashes.num_crashes(self._fingerprint)

    async def _send_again(self, is_suspect: bool) -> None:
        try:
            if is_suspect:
                num_crashes = await self._count_again(1)
                if num_crashes >= MAX_CRASHES:
                    raise self._refusal()
                is_suspect = num_crashes > 0
            await self._routes.wait_ready(RETRY_WAIT_S, self._state_id)
            await (self._send_as_suspect() if is_suspect else self._send())
        except LostWorkerError as error:  # before the worker accepted it; otherwise _on_lost was called
            self._after_loss(error, may_go_on=True)
        except Exception as error:  # of any kind: the reader waits for the answer
            self.answer.fail(error)

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
