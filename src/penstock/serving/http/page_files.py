"""The web page: a fixed table of the package's files, read once.  It contains no data, so it needs no key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from penstock.api_errors import RefusalError
from penstock.serving.call import Call, Headers, Reply

__all__ = ["PAGE_TYPES", "page", "page_file"]

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE_TYPES: Final = ("text/css", "text/javascript", "image/svg+xml")
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final[Headers] = [
    (b"content-security-policy", _POLICY),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@cache
def _table() -> dict[str, Reply]:
    """Return all files by name; only files that exist at the first request are ever served."""
    found: dict[str, Reply] = {}
    for one in files("penstock.serving").joinpath("page").iterdir():
        kind = _TYPES.get(one.name[one.name.rfind(".") :])
        if kind is not None and one.is_file():
            found[one.name] = Reply(200, one.read_bytes(), kind.encode(), _HEADERS)
    return found


async def page(call: Call) -> Reply:
    """The page itself."""
    return _table()["index.html"]


async def page_file(call: Call) -> Reply:
    """A file that the page loads."""
    name = call.path_values["file"]
    reply = _table().get(name)
    if reply is None or name == "index.html":
        raise RefusalError(404, "The page has no file of that name.", code="unknown_route")
    return reply
