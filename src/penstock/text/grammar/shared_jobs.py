"""Calls that run once for all threads that want the same result meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from penstock.errors import InternalError, InvalidArgumentError

__all__ = ["SharedJobs"]

NUM_THREADS = 2

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass(eq=False)
class _CompileJob(Generic[_Value]):
    """A call that waits for a thread or runs.  Each caller has a future of its own, which it may cancel."""

    waiters: list[Future[_Value]] = field(default_factory=list)
    has_begun: bool = False


class SharedJobs(Generic[_Key, _Value]):
    """Calls ``function`` with a key in one of two threads of its own, or in that of a caller.

    Callers of an equal key share a call that has not ended.  One that all its callers have cancelled before it began
    does not run.  Results are not kept.  Any number of threads may use it.
    """

    def __init__(self, function: Callable[[_Key], _Value], name: str) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._jobs: dict[_Key, _CompileJob[_Value]] = {}
        self._pool = ThreadPoolExecutor(NUM_THREADS, name)  # its threads start with the first call
        self._is_closed = False

    def begin(self, key: _Key) -> Future[_Value]:
        """Call the function in a thread of this object.  Cancel the result when it is no longer wanted."""
        job, waiter, is_new = self._join(key)
        if is_new:
            self._pool.submit(self._run, key, job)
        return waiter

    def call(self, key: _Key) -> _Value:
        """Call the function in this thread, or wait for the call that has begun in another."""
        job, waiter, _ = self._join(key)
        self._run(key, job)
        return waiter.result()

    def close(self) -> None:
        """Cancel the calls that have not begun.  Later ones are refused."""
        with self._lock:
            self._is_closed = True
            waiting = [job for job in self._jobs.values() if not job.has_begun]
        self._pool.shutdown(wait=False, cancel_futures=True)
        for job in waiting:
            for waiter in job.waiters:
                waiter.cancel()

    def _join(self, key: _Key) -> tuple[_CompileJob[_Value], Future[_Value], bool]:
        waiter: Future[_Value] = Future()
        with self._lock:
            if self._is_closed:
                raise InvalidArgumentError("The model is closed.")
            job = self._jobs.get(key)
            is_new = job is None
            if job is None:
                job = self._jobs[key] = _CompileJob()
            job.waiters.append(waiter)
        return job, waiter, is_new

    def _run(self, key: _Key, job: _CompileJob[_Value]) -> None:
        """Run a job unless it has begun, and give its result to everybody who waits for it."""
        with self._lock:
            if job.has_begun:
                return
            job.has_begun = True
            if all(waiter.cancelled() for waiter in job.waiters):
                del self._jobs[key]
                return
        error: BaseException | None = None
        try:
            value = self._function(key)
        except BaseException as raised:
            error = raised
        with self._lock:
            del self._jobs[key]
        for waiter in job.waiters:
            if not waiter.set_running_or_notify_cancel():
                continue
            if error is None:
                waiter.set_result(value)
            elif isinstance(error, Exception):
                waiter.set_exception(error)
            else:  # the thread that ran it was interrupted
                waiter.set_exception(InternalError(f"The call was ended by {type(error).__name__}."))
        if error is not None and not isinstance(error, Exception):
            raise error
