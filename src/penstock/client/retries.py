"""Decide whether a failed request is sent again, and when."""

from __future__ import annotations

import random
import time
from typing import Final

from penstock.client.address import Address
from penstock.errors import ServiceError

__all__ = ["Retries"]

RETRIABLE: Final = (0, 408, 429, 503)
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0


class Retries:
    """The retries, pauses and deadline of one call.

    Pauses double, have a random part so that clients do not retry at the same moment, and heed ``Retry-After``.
    ``timeout_s`` limits the whole call, retries included.  A call with ``is_sent_once`` is never sent again.
    """

    def __init__(self, address: Address, timeout_s: float | None = None, is_sent_once: bool = False) -> None:
        self.has_begun = False
        """True once the caller has received a part of the response: nothing is retried after that."""
        self._address = address
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._num_left = 0 if is_sent_once else address.retries
        self._pause_s = FIRST_PAUSE_S

    def pause_s(self, error: OSError | ServiceError) -> float:
        """Return the seconds to wait before the next try, or raise the error as ServiceError if there is none.

        A timeout is never retried, because the service may still be working on the request.
        """
        failure = self._connection_failure(error) if isinstance(error, OSError) else error
        if self.has_begun or self._num_left == 0 or failure.status not in RETRIABLE or isinstance(error, TimeoutError):
            raise failure from None
        self._num_left -= 1
        pause_s = max(failure.retry_after_s, self._pause_s) * (1 + random.random() / 2)  # noqa: S311 - no secret
        self._pause_s *= 2
        pause_s = min(pause_s, MAX_PAUSE_S)
        if self._deadline is not None and time.monotonic() + pause_s >= self._deadline:
            raise failure from None
        return pause_s

    def read_timeout_s(self) -> float:
        """Return the seconds to wait for the next bytes."""
        left_s = self._address.timeout_s
        if self._deadline is not None:
            left_s = min(left_s, max(self._deadline - time.monotonic(), 0.001))
        return left_s

    def check_deadline(self) -> None:
        """Raise TimeoutError if the time of the whole call is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimeoutError

    def _connection_failure(self, error: OSError) -> ServiceError:
        """Return the ServiceError for a connection that failed: status 0, or 504 after the deadline of the call."""
        reason, status = error.strerror or str(error) or type(error).__name__, 0
        if isinstance(error, TimeoutError):
            reason = f"no data received for {self._address.timeout_s:g} s"
            if self._deadline is not None and time.monotonic() >= self._deadline:
                reason, status = "no complete response within timeout_s", 504
        return ServiceError(f"{self._address.url}: {reason}", status)
