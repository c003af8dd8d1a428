"""Every error that Penstock raises on purpose.

    PenstockError
    ├── InvalidArgumentError   an argument, option or field is wrong (a ValueError too)
    ├── InvalidFileError       a file is damaged, hostile or incomplete; the message names file and field
    │   └── TokenizerError     the tokenizer of a model failed on this text or these token ids
    ├── UnsupportedError       the request is valid, but Penstock cannot serve it; the message says what to use instead
    ├── OutOfMemoryError       a memory plan does not fit (a MemoryError too)
    ├── FileAccessError        the operating system refused access (an OSError too)
    ├── QueueFullError         the request queue is full; retry later
    ├── DeadlineError          a request did not finish within its deadline (a TimeoutError too)
    ├── NotFoundError          a service or a hub has no model of that name (a LookupError too)
    ├── UnavailableError       a service or a hub cannot answer now; retry later
    ├── ServiceError           a service answered a client with an error, or could not be reached
    └── InternalError          a bug in Penstock

A message says what was expected and what was found.  ``param`` is the name of the field, option or argument at fault,
``code`` a stable name of the failure for programs.
"""

from __future__ import annotations

from typing import ClassVar, Self

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
    """The base class of all errors that Penstock raises on purpose.

    ``param``: the field, option or argument at fault, or None.  ``code``: a stable name of the failure; each class has
    its own, and an error may carry a more exact one.
    """

    param: str | None = None
    code: str | None = None
    default_code: ClassVar[str] = "error"

    def __init__(self, *arguments: object, param: str | None = None, code: str | None = None) -> None:
        super().__init__(*arguments)
        self.param, self.code = param, code or self.default_code

    def with_message(self, message: str) -> Self:
        """Return an error of the same class, ``param`` and ``code`` with another message."""
        error = type(self).__new__(type(self))
        error.args = (message,)
        error.__dict__.update(self.__dict__)
        return error

    def naming(self, param: str) -> str:
        """Return the message with the field under another name, as another interface calls it."""
        text = str(self)
        if self.param and text.startswith(self.param):
            return param + text[len(self.param) :]
        return text


class InvalidArgumentError(PenstockError, ValueError):
    """An argument, option or field is wrong."""

    default_code = "invalid_value"


class InvalidFileError(PenstockError):
    """A file is damaged, hostile or incomplete."""

    default_code = "invalid_file"


class TokenizerError(InvalidFileError):
    """The tokenizer of a model failed on a text or on token ids, or exceeded its memory or time for one call."""

    default_code = "tokenizer_failed"


class UnsupportedError(PenstockError):
    """The request is valid, but this version cannot serve it."""

    default_code = "unsupported_parameter"


class OutOfMemoryError(PenstockError, MemoryError):
    """A memory plan does not fit."""

    default_code = "out_of_memory"


class FileAccessError(PenstockError, OSError):
    """The operating system refused to read or write."""

    default_code = "file_access"


class QueueFullError(PenstockError):
    """The request queue is full."""

    default_code = "queue_full"


class DeadlineError(PenstockError, TimeoutError):
    """A request did not finish within its deadline."""

    default_code = "deadline_exceeded"


class NotFoundError(PenstockError, LookupError):
    """A service or a hub has no model of that name."""

    default_code = "model_not_found"


class UnavailableError(PenstockError):
    """A service or a hub cannot answer now; the same request may be sent again after ``retry_after_s`` seconds."""

    default_code = "unavailable"

    def __init__(
        self, message: str, retry_after_s: float = 1.0, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class ServiceError(PenstockError):
    """A service answered with an error, or could not be reached (``status`` 0).

    ``code`` and ``param`` are those of the service's error; ``request_id`` identifies the request in its log.
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

    default_code = "internal"
