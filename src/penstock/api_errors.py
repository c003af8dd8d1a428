"""How a request is refused: one table of codes, OpenAI's shape of an error, and which error becomes which code."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

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
from penstock.json_schema import Members, MisfitError, Text, optional

__all__ = [
    "CODES",
    "ERROR",
    "OIP_ERROR",
    "RefusalError",
    "VersionNotFoundError",
    "grpc_code",
    "misfit_refusal",
    "refusal_of",
    "without_folders",
]


@dataclass(frozen=True)
class Code:
    """One way to be refused: OpenAI's ``type``, gRPC's code, what it means, and whether the same request may succeed
    later.
    """

    type: str
    grpc: str
    meaning: str
    is_retriable: bool = False


CODES: Final[dict[int, Code]] = {
    400: Code(
        "invalid_request_error", "INVALID_ARGUMENT", "the body, a field or a header is wrong; `param` names the field"
    ),
    401: Code("authentication_error", "UNAUTHENTICATED", "the key is missing or wrong"),
    403: Code(
        "permission_error",
        "PERMISSION_DENIED",
        "the Host or Origin header is not one that this service answers to, or only admins may do this",
    ),
    404: Code("not_found_error", "NOT_FOUND", "no such route or model"),
    405: Code("invalid_request_error", "UNIMPLEMENTED", "the route has other methods: `Allow` lists them"),
    408: Code("timeout_error", "DEADLINE_EXCEEDED", "the body did not arrive in time", is_retriable=True),
    413: Code("invalid_request_error", "RESOURCE_EXHAUSTED", "the body is larger than may be"),
    415: Code(
        "invalid_request_error",
        "UNIMPLEMENTED",
        "the body is of a type, or compressed in a way, that the route does not take",
    ),
    429: Code(
        "rate_limit_error",
        "RESOURCE_EXHAUSTED",
        "as many requests wait as may: come back after `Retry-After` seconds",
        is_retriable=True,
    ),
    431: Code("invalid_request_error", "RESOURCE_EXHAUSTED", "the headers are too many or too large"),
    500: Code("server_error", "INTERNAL", "a bug of ours, or a servable failed; the log has more under the request id"),
    501: Code(
        "invalid_request_error",
        "UNIMPLEMENTED",
        "the request has a method or a Transfer-Encoding that this server does not implement",
    ),
    503: Code(
        "unavailable_error",
        "UNAVAILABLE",
        "the model is not ready, or the service is stopping: come back later",
        is_retriable=True,
    ),
    504: Code("timeout_error", "DEADLINE_EXCEEDED", "the answer was not done in the time that the request was given"),
}
"""Every status beside 200 that a route answers with; ``docs/serving.md`` shows the same table."""


def grpc_code(status: int) -> str:
    """gRPC's name for a status of the table, for 200, and for 499: the client went away."""
    return {200: "OK", 499: "CANCELLED"}.get(status) or CODES[status].grpc


_DETAIL = Members(
    "ErrorDetail",
    {"message": Text(), "type": Text(), "param": optional(Text()), "code": optional(Text())},
    ("message", "type", "param", "code"),
)
ERROR: Final = Members("Error", {"error": _DETAIL}, ("error",))
"""The body of every refusal."""
OIP_ERROR: Final = Members(
    "InferenceError",
    {"error": Text(), "type": Text(), "param": optional(Text()), "code": optional(Text())},
    ("error", "type", "param", "code"),
)
"""The same where the Open Inference Protocol is spoken, whose clients read ``error`` as a text."""
MAX_MESSAGE_CHARS: Final = 1000


class VersionNotFoundError(NotFoundError):
    """A model exists, but not in the requested version."""

    default_code = "version_not_found"

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model_version")


_QUOTED_PATH: Final = re.compile(r"""(['"])/[^'"]*?([^'"/]*)/?\1""")
_PATH: Final = re.compile(r"""(?<![\w./:'"])/(?:[^\s/:;,'"()]+/)+""")


def without_folders(text: str, *known: str) -> str:
    """Return an error's text for clients: only the last part of each absolute path is left.

    ``known``: paths that the text may name and that have characters at which a path in other texts ends.
    """
    for path in known:
        if path.startswith("/") and (name := path.rstrip("/").rpartition("/")[2]):
            text = text.replace(path, name)
    return _PATH.sub("", _QUOTED_PATH.sub(r"\1\2\1", text))


class RefusalError(Exception):
    """A request that ends with a status of the table."""

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
        if status in (408, 413):  # the rest of the body is not worth reading
            self.headers.append((b"connection", b"close"))

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        message = str(self)[:MAX_MESSAGE_CHARS]
        return {"error": {"message": message, "type": CODES[self.status].type, "param": self.param, "code": self.code}}

    def text(self, is_oip: bool = False) -> bytes:
        """The body as JSON, in the one form or the other."""
        body = self.body()
        if is_oip:
            detail = body["error"]
            body = {"error": detail.pop("message"), **detail}
        return json.dumps(body).encode()


_KINDS = {
    "missing": "missing_required_parameter",
    "unknown": "unknown_parameter",
    "unsupported": "unsupported_parameter",
    "value": "invalid_value",
}


_BODY_FIELDS = {"deadline_s": "timeout", "truncate_prompt": "truncate_prompt_tokens"}
"""Fields of RequestOptions, and what request bodies call them."""


def misfit_refusal(misfit: MisfitError) -> RefusalError:
    """A field that does not fit: 400."""
    return RefusalError(400, str(misfit), param=misfit.path or None, code=_KINDS[misfit.kind])


def refusal_of(error: BaseException, request_id: str) -> RefusalError:
    """What a request ends with that raised ``error``.  The text of what is not our own error stays in the log."""
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, MisfitError):
        return misfit_refusal(error)
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
