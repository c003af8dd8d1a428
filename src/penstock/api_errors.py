"""API errors: the table of status codes, OpenAI's error format, and the mapping from exceptions to both."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from penstock.errors import (
    DeadlineError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    OutOfMemoryError,
    QueueFullError,
    TokenizerError,
    UnavailableError,
    UnsupportedError,
)

__all__ = [
    "CODES",
    "CombinationError",
    "Error",
    "ErrorDetail",
    "FieldError",
    "InferenceError",
    "RefusalError",
    "VersionNotFoundError",
    "grpc_code",
    "refusal_of",
    "refuse_if",
    "without_folders",
]


@dataclass(frozen=True)
class Code:
    """A status code: OpenAI's ``type``, gRPC's code, its meaning, and whether the same request may succeed later."""

    type: str
    grpc: str
    meaning: str
    is_retriable: bool = False


CODES: Final[dict[int, Code]] = {
    400: Code(
        "invalid_request_error",
        "INVALID_ARGUMENT",
        "The body, a field or a header is invalid. `param` names the field.",
    ),
    401: Code("authentication_error", "UNAUTHENTICATED", "The API key is missing or invalid."),
    403: Code(
        "permission_error",
        "PERMISSION_DENIED",
        "The Host or Origin header is not allowed, or the operation needs an admin key.",
    ),
    404: Code("not_found_error", "NOT_FOUND", "The route, model or version does not exist."),
    405: Code(
        "invalid_request_error",
        "UNIMPLEMENTED",
        "The route does not support this method. The `Allow` header lists those that it supports.",
    ),
    408: Code("timeout_error", "DEADLINE_EXCEEDED", "The body did not arrive in time.", is_retriable=True),
    413: Code("invalid_request_error", "RESOURCE_EXHAUSTED", "The body is too large."),
    415: Code(
        "invalid_request_error",
        "UNIMPLEMENTED",
        "The route does not accept this Content-Type or Content-Encoding.",
    ),
    429: Code(
        "rate_limit_error",
        "RESOURCE_EXHAUSTED",
        "The request queue is full. Retry after `Retry-After` seconds.",
        is_retriable=True,
    ),
    431: Code("invalid_request_error", "RESOURCE_EXHAUSTED", "The headers are too many or too large."),
    500: Code("server_error", "INTERNAL", "Penstock or a servable failed. The log has details under the request id."),
    501: Code(
        "invalid_request_error",
        "UNIMPLEMENTED",
        "The server does not implement this method or Transfer-Encoding.",
    ),
    503: Code(
        "unavailable_error",
        "UNAVAILABLE",
        "The model is not ready, or the service is stopping. Retry later.",
        is_retriable=True,
    ),
    504: Code("timeout_error", "DEADLINE_EXCEEDED", "The response was not complete within the request's timeout."),
}
"""The error statuses that routes return; the documentation's reference shows the same table."""


def grpc_code(status: int) -> str:
    """Return gRPC's name for a status of the table, for 200, or for 499 (the client disconnected)."""
    return {200: "OK", 499: "CANCELLED"}.get(status) or CODES[status].grpc


class ErrorDetail(msgspec.Struct, forbid_unknown_fields=True):
    """``type`` depends on the status only.  ``param`` is the field at fault, ``code`` the failure."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """An error response."""

    error: ErrorDetail


class InferenceError(msgspec.Struct, forbid_unknown_fields=True):
    """An error response of the Open Inference Protocol, whose clients expect ``error`` to be a string."""

    error: str
    type: str
    param: str | None
    code: str | None


MAX_MESSAGE_CHARS: Final = 1000


class VersionNotFoundError(NotFoundError):
    """A model exists, but not in the requested version."""

    default_code = "version_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model_version")


_QUOTED_PATH: Final = re.compile(r"""(['"])/[^'"]*?([^'"/]*)/?\1""")
_PATH: Final = re.compile(r"""(?<![\w./:'"])/(?:[^\s/:;,'"()]+/)+""")


def without_folders(text: str, *folders: str) -> str:
    """Return an error message for clients, with each absolute path cut to its last component.

    ``folders``: paths that the message may contain and that the patterns would not recognize as a whole, because of
    spaces or punctuation.
    """
    for path in folders:
        if path.startswith("/") and (name := path.rstrip("/").rpartition("/")[2]):
            text = text.replace(path, name)
    return _PATH.sub("", _QUOTED_PATH.sub(r"\1\2\1", text))


class RefusalError(Exception):
    """Raised to end a request with a status of the table.

    ``param`` names the field at fault, ``code`` the failure.  ``retry_after_s`` is sent for retriable statuses.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers: list[tuple[bytes, bytes]] = []
        if CODES[status].is_retriable:
            self.headers.append((b"retry-after", b"%d" % max(1, retry_after_s)))
        if status == 401:
            self.headers.append((b"www-authenticate", b"Bearer"))
        if status in (408, 413):  # close instead of reading the rest of the body
            self.headers.append((b"connection", b"close"))

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's format."""
        message = str(self)[:MAX_MESSAGE_CHARS]
        return {"error": {"message": message, "type": CODES[self.status].type, "param": self.param, "code": self.code}}

    def text(self, is_oip: bool = False) -> bytes:
        """Return the body as JSON, in OpenAI's format or in that of the Open Inference Protocol."""
        body = self.body()
        if is_oip:
            detail = body["error"]
            body = {"error": detail.pop("message"), **detail}
        return json.dumps(body).encode()


_KINDS: Final = {
    "missing": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "value": "invalid_value",
}


class FieldError(RefusalError):
    """Raised for a field of a request that is missing, unknown, unsupported or has a wrong value (``kind``).

    ``path`` is the path of the field; "" is the body itself.
    """

    def __init__(self, path: str, message: str, kind: str = "value") -> None:
        super().__init__(400, message, param=path or None, code=_KINDS[kind])


class CombinationError(FieldError):
    """Raised for fields that are valid separately but exclude each other, which the JSON schemas do not describe."""


def refuse_if(is_wrong: bool, message: str, param: str) -> None:
    """Raise CombinationError if a combination of fields is wrong."""
    if is_wrong:
        raise CombinationError(param, message)


_BODY_FIELDS = {"deadline_s": "timeout", "truncate_prompt": "truncate_prompt_tokens"}
"""Fields of RequestOptions, and what request bodies call them."""


def refusal_of(error: BaseException, request_id: str) -> RefusalError:
    """Return the response for a request that raised ``error``.

    The message of an unexpected exception is not sent to the client; it is only in the log.
    """
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, QueueFullError):
        return RefusalError(429, "The request queue is full. Retry later.", code=error.code)
    if isinstance(error, DeadlineError):
        return RefusalError(504, error.naming("timeout"), param="timeout", code=error.code)
    if isinstance(error, (InvalidArgumentError, TokenizerError, UnsupportedError)):
        param = _BODY_FIELDS.get(error.param, error.param) if error.param else None
        return RefusalError(400, error.naming(param) if param else str(error), param=param, code=error.code)
    if isinstance(error, (OutOfMemoryError, MemoryError)):
        return RefusalError(503, "Not enough memory for this request now. Retry later.", code="out_of_memory")
    if isinstance(error, NotFoundError):
        return RefusalError(404, str(error), param=error.param or "model", code=error.code)
    if isinstance(error, UnavailableError):
        message = without_folders(str(error))
        return RefusalError(503, message, code=error.code, retry_after_s=math.ceil(error.retry_after_s))
    message = f"Internal error. The server's log has details under request {request_id}."
    return RefusalError(500, message, code=InternalError.default_code)
