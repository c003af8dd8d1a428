"""The routes of the service in one table: who answers, what the body is, what comes back, who may ask."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final

from penstock.json_schema import Members, Shape
from penstock.serving.call import Call, Reply

__all__ = ["JSON", "Media", "Operation", "Routes"]

Handler = Callable[[Call], Awaitable[Reply | None]]
NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}"
"""What a name in a path may be: no separator, nothing that begins with a dot."""
MAX_NEAREST_CHARS: Final = 100
"""Of a path that is compared with the routes: the time goes with its square."""
COMMON_REFUSALS: Final = (400, 401, 403, 431)


@dataclass(frozen=True)
class Media:
    """How a body may come.

    ``types``: what Content-Type may say, "" that it is missing.  ``encodings``: how it may be compressed.
    ``is_optional``: an empty body is an empty object.  ``is_raw``: the handler reads ``Call.data`` itself, and the
    body's shape is that of its JSON.  ``headers``: JSON schemas of headers that say more about it.
    """

    types: tuple[str, ...] = ("application/json",)
    encodings: tuple[str, ...] = ()
    is_optional: bool = False
    is_raw: bool = False
    headers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


JSON: Final = Media()


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    ``handler`` returns a Reply, or None when it has answered itself.  ``answer`` is the shape of a JSON answer, or
    other content types.  ``refusals`` are statuses of the table beside those that every route has.  With
    ``events`` the answer may be a stream of those.  ``is_open``: no key is asked for.  ``is_admin``: an admin's key
    is.  ``media``: how the body may come.  ``binary``: the answer may be bytes, too, behind its JSON.
    """

    method: str
    path: str
    name: str
    summary: str
    handler: Handler
    answer: Shape | tuple[str, ...]
    body: Members | None = None
    events: Shape | None = None
    refusals: tuple[int, ...] = ()
    is_open: bool = False
    is_admin: bool = False
    media: Media = JSON
    binary: bool = False

    @property
    def is_work(self) -> bool:
        """Whether an engine answers it, in its turn and within its time."""
        return 504 in self.refusals

    @property
    def is_oip(self) -> bool:
        """Whether it is of the Open Inference Protocol, which has another form of errors."""
        return is_oip(self.path)

    @property
    def statuses(self) -> tuple[int, ...]:
        """All refusals that it answers with."""
        with_body = (408, 413, 415) if self.body is not None else ()
        return tuple(sorted({*COMMON_REFUSALS, *with_body, *self.refusals, 500}))


def is_oip(path: str) -> bool:
    """Whether a path is one of the Open Inference Protocol's, or could be."""
    return path == "/v2" or path.startswith("/v2/")


class Routes:
    """Finds the operation of a method and path.  What the table does not have, nobody reaches."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.operations = tuple(operations)
        self._plain: dict[str, dict[str, Operation]] = {}
        self._named: list[tuple[re.Pattern[str], dict[str, Operation]]] = []
        for one in operations:
            methods = self._plain.setdefault(one.path, {})
            methods[one.method] = one
        for path, methods in self._plain.items():
            if "{" in path:
                pattern = re.sub(r"\\{(\w+)\\}", rf"(?P<\1>{NAME})", re.escape(path))
                self._named.append((re.compile(pattern), methods))

    def find(self, path: str) -> tuple[dict[str, Operation], dict[str, str]]:
        """The operations of a path by method, and what its variable parts are; empty for a path that is not there."""
        methods = self._plain.get(path)
        if methods is not None and "{" not in path:
            return methods, {}
        for pattern, methods in self._named:
            found = pattern.fullmatch(path)
            if found is not None:
                return methods, found.groupdict()
        return {}, {}

    def nearest(self, path: str) -> str:
        """The route that a path that is not there may have meant; empty when none is like it."""
        if len(path) > MAX_NEAREST_CHARS:
            return ""
        tail = path.rstrip("/")
        ends = [one for one in self._plain if tail and one.endswith(tail)]
        return (ends or get_close_matches(path, self._plain, 1) or [""])[0]
