"""A request's way through workers: sent to one, and to another when the first goes away before anything came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import DeadlineError, InternalError
from penstock.llm.answer import EventAnswer
from penstock.serving.proto import wire_pb2 as pb
from penstock.serving.workers.crash_tracker import MAX_DEATHS, CrashTracker
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

__all__ = ["Failover", "WorkerRoutes"]

RETRY_WAIT_S: Final = 60.0
"""How long a request that is tried again waits for a worker."""


class WorkerRoutes(Protocol):
    """What a journey needs of its model."""

    blame: CrashTracker
    suspects: asyncio.Lock
    """Held by a request that was there when a worker died, until something comes of it: the next death is then its own
    fault and not that of all who were open beside it."""

    def choose(self, names: Sequence[bytes]) -> WorkerConnection:
        """The worker for a prompt with these leading pages; UnavailableError."""

    async def wait_ready(self, seconds: float) -> None:
        """Until a worker takes requests; UnavailableError."""


class Failover:
    """One request.  ``make`` gives the message for the options that hold when it is sent."""

    def __init__(
        self,
        roads: WorkerRoutes,
        prompt_ids: Sequence[int],
        options: RequestOptions,
        make: Callable[[pb.Options], pb.ToWorker],
    ) -> None:
        self._roads = roads
        self._options = options
        self._make = make
        self._names = page_keys(prompt_ids, options.cache_salt)
        self._began = time.monotonic()
        self._link: WorkerConnection | None = None
        self._request: OpenRequest | None = None
        self._retry: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self.answer = EventAnswer(self._abort)
        self.answer.on_settled = self._on_settled

    async def start(self) -> EventAnswer:
        """Begin; returns with the first news of it, raises what the worker refuses it with."""
        try:
            deaths = self._roads.blame.num_deaths(self._fingerprint) if self._roads.blame else 0
            while True:
                if deaths >= MAX_DEATHS:
                    raise self._refusal()
                try:
                    await (self._send() if deaths == 0 else self._send_as_suspect())
                    return self.answer
                except LostWorkerError as error:
                    deaths = self._deaths(error)
                await self._roads.wait_ready(RETRY_WAIT_S)
        except BaseException:
            self.answer.close()
            raise

    @cached_property
    def _fingerprint(self) -> bytes:
        """Not needed before a worker has died."""
        return _fingerprint(self._make(options_to(replace(self._options, deadline_s=None, client=""))))

    async def _send(self) -> None:
        link = self._link = self._roads.choose(self._names)
        request = self._request = OpenRequest(self.answer, self._make(self._options_now()), self._on_lost)
        link.begin(request)
        link.prefixes.add(self._names)
        if link.card is not None:
            self.answer.version = link.card.version
        try:
            await request.taken
        finally:
            del request  # an error that came holds this frame, and the request holds the error

    async def _send_as_suspect(self) -> None:
        async with self._roads.suspects:
            self._settled.clear()
            await self._send()
            await self._settled.wait()

    def _options_now(self) -> pb.Options:
        message = options_to(self._options)
        if self._options.deadline_s is not None:
            message.deadline_s = self._options.deadline_s - (time.monotonic() - self._began)
            if message.deadline_s <= 0:
                raise DeadlineError(
                    f"deadline_s {self._options.deadline_s:g} is over: no worker took the request", param="deadline_s"
                )
        return message

    def _on_settled(self) -> None:
        self._settled.set()
        if self.answer.is_complete and self._roads.blame:
            self._roads.blame.clear(self._fingerprint)
        if self.answer.is_over:
            self._request = None

    def _refusal(self) -> InternalError:
        return InternalError(
            f"the request is refused: it was open when {MAX_DEATHS} workers died, which may be its doing"
        )

    def _on_lost(self, error: LostWorkerError) -> None:
        """The worker that had taken it is gone."""
        deaths = self._deaths(error)
        self._settled.set()
        if deaths >= MAX_DEATHS:
            self.answer.fail(self._refusal())
        elif self.answer.has_begun:
            self.answer.fail(error)
        else:
            self._retry = asyncio.ensure_future(self._again(deaths > 0))

    def _deaths(self, error: LostWorkerError) -> int:
        """How many workers died with it running, this one included; what merely waited is no suspect."""
        blame, worker = self._roads.blame, "" if self._link is None else self._link.name
        return (blame.add if error.was_running else blame.add_wait)(self._fingerprint, worker)

    async def _again(self, is_suspect: bool) -> None:
        try:
            await self._roads.wait_ready(RETRY_WAIT_S)
            await (self._send_as_suspect() if is_suspect else self._send())
        except LostWorkerError as error:  # before it was taken; else _on_lost was called
            self._on_lost(error)
        except Exception as error:  # whatever it is: somebody waits for the answer
            self.answer.fail(error)

    def _abort(self) -> None:
        self._settled.set()
        if self._retry is not None:
            self._retry.cancel()
        if self._link is not None and self._request is not None:
            self._link.abort(self._request)


def _fingerprint(message: pb.ToWorker) -> bytes:
    """What tells requests apart that are not the same one sent again."""
    body_of(message).request_id = ""
    return blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()
