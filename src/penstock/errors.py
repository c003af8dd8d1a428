"""Every error that Penstock raises on purpose.

    PenstockError
    ├── InvalidArgumentError   the caller's mistake; the message names the option or field (a ValueError too)
    ├── InvalidFileError       a damaged, hostile or incomplete file; the message names file and field
    │   └── TokenizerError     the tokenizer of a model failed on this text or these token ids
    ├── UnsupportedError       a sound request that Penstock cannot serve; the message says what to use instead
    ├── OutOfMemoryError       a plan that does not fit (a MemoryError too)
    ├── FileAccessError        the operating system refused (an OSError too)
    ├── QueueFullError         as many requests wait as may wait: try again later
    ├── DeadlineError          a request was not done in the time it was given (a TimeoutError too)
    ├── NotFoundError          a service has no model of that name (a LookupError too)
    ├── UnavailableError       a service cannot answer now: try again later
    ├── ServiceError           what a client was told by a service that it asked
    └── InternalError          our bug

A message says what was expected and what was found.
"""

from __future__ import annotations

__all__ = [
    "DeadlineError",
    "FileAccessError",
    "InternalError",
    "InvalidArgumentError",
    "InvalidFileError",
    "NotFoundError",
    "OutOfMemoryError",
    "PenstockError",
    "QueueFullError",
    "ServiceError",
    "TokenizerError",
    "UnavailableError",
    "UnsupportedError",
]


class PenstockError(Exception):
    """The root: catching it catches everything that Penstock raises on purpose."""


class InvalidArgumentError(PenstockError, ValueError):
    """The caller's mistake."""


class InvalidFileError(PenstockError):
    """A file that is damaged, hostile or incomplete."""


class TokenizerError(InvalidFileError):
    """The tokenizer of a model failed on a text or on token ids, or exceeded its memory or time for one call."""


class UnsupportedError(PenstockError):
    """A sound request that this version cannot serve."""


class OutOfMemoryError(PenstockError, MemoryError):
    """A memory plan that does not fit."""


class FileAccessError(PenstockError, OSError):
    """The operating system refused to read or write."""


class QueueFullError(PenstockError):
    """As many requests wait as may wait."""


class DeadlineError(PenstockError, TimeoutError):
    """A request was not done in the time it was given."""


class NotFoundError(PenstockError, LookupError):
    """A service has no model of that name."""


class UnavailableError(PenstockError):
    """A service cannot answer now; the same request may be sent again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServiceError(PenstockError):
    """What a client was told by the service that it asked, or that it could not ask it (``status`` 0).

    ``code`` and ``param`` are the refusal's; ``request_id`` finds it in the service's log.
    """

    def __init__(
        self,
        message: str,
        status: int,
        *,
        code: str | None = None,
        param: str | None = None,
        request_id: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param
        self.request_id, self.retry_after_s = request_id, retry_after_s


class InternalError(PenstockError):
    """A bug in Penstock."""
