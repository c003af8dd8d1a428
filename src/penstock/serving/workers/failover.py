"""Sends a request to a worker, and to another one if the first is lost before its first event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import DeadlineError, InternalError, UnavailableError
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import MAX_CRASHES, CrashTracker
from penstock.serving.workers.messages import options_to
from penstock.serving.workers.worker_connection import (
    LostWorkerError,
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


class WorkerRoutes(Protocol):
    """The part of a model that chooses workers for requests."""

    crashes: CrashTracker
    suspects: asyncio.Lock
    """The lock of a request that may have crashed a worker, held until its first event or its end.
    Suspects thus run one at a time, and another crash has only one suspect."""

    def choose(self, num_tokens: int = 0, keys: Sequence[bytes] = (), client: str = "") -> RoutedRequest:
        """Return the worker for a prompt of so many tokens, whose leading pages have these keys; UnavailableError."""

    async def wait_ready(self, seconds: float) -> None:
        """Wait until a worker accepts requests; UnavailableError on timeout."""

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
                    num_crashes = self._count_crash(error)
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
        routed = self._routes.choose(self._num_tokens, self._page_keys, self._options.client)
        connection = self._connection = routed.connection
        request = self._request = OpenRequest(self.answer, self._make(self._remaining_options()), self._on_lost)
        connection.begin(request)
        routed.begin()
        self._routed = routed
        if connection.card is not None:
            self.answer.version = connection.card.version
        try:
            await request.taken
        except BaseException:
            routed.end(self.answer)
            raise
        finally:
            del request  # breaks a reference cycle: an error holds this frame, and the request holds the error

    async def _send_as_suspect(self) -> None:
        async with self._routes.suspects:
            self._settled.clear()
            await self._send()
            await self._settled.wait()

    def _remaining_options(self) -> pb.Options:
        """Return the options with the time that is left until the deadline; DeadlineError after it."""
        message = options_to(self._options)
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
        """Retry or fail the request after the worker that had accepted it was lost."""
        num_crashes = self._count_crash(error)
        self._settled.set()
        if self._routed is not None:
            self._routed.end(self.answer)
        if num_crashes >= MAX_CRASHES:
            self.answer.fail(self._refusal())
        elif self.answer.has_begun:
            self.answer.fail(error)
        else:
            self._retry = asyncio.ensure_future(self._send_again(num_crashes > 0))

    def _count_crash(self, error: LostWorkerError) -> int:
        """Return how many workers crashed while they ran the request, including this one if it did."""
        crashes, worker = self._routes.crashes, "" if self._connection is None else self._connection.name
        return (crashes.add if error.was_running else crashes.add_wait)(self._fingerprint, worker)

    async def _send_again(self, is_suspect: bool) -> None:
        try:
            await self._routes.wait_ready(RETRY_WAIT_S)
            await (self._send_as_suspect() if is_suspect else self._send())
        except LostWorkerError as error:  # before the worker accepted it; otherwise _on_lost was called
            self._on_lost(error)
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
