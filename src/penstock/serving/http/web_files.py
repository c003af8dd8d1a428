"""The web page: a fixed table of the package's files, read once.  It contains no data, so it needs no key."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final

from penstock.api_errors import RefusalError
from penstock.serving.call import Call, Headers, Reply
from penstock.serving.http.compression import accepted, deflated

__all__ = ["PAGE_TYPES", "docs_page", "page", "page_file"]

_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
PAGE_TYPES: Final = ("text/css", "text/javascript", "image/svg+xml", "font/woff2")
_LEVEL: Final = 9
_POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    b"font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final[Headers] = [
    (b"content-security-policy", _POLICY),
    (b"vary", b"Accept-Encoding"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


@cache
def _table() -> dict[str, Reply]:
    """Return all files by name; only files that exist at the first request are ever served."""
    replies: dict[str, Reply] = {}
    for file in files("penstock.serving").joinpath("web_page").iterdir():
        kind = _TYPES.get(file.name[file.name.rfind(".") :])
        if kind is not None and file.is_file():
            replies[file.name] = Reply(200, file.read_bytes(), kind.encode(), _HEADERS)
    return replies


@cache
def _encoded(name: str, encoding: str) -> Reply:
    """Return a file in an encoding of HTTP; compressed once, at the first request."""
    plain = _table()[name]
    headers = [*_HEADERS, (b"content-encoding", encoding.encode())]
    return Reply(200, deflated(plain.body, encoding, _LEVEL), plain.content_type, headers)


def _reply(call: Call, name: str) -> Reply:
    encoding = accepted(call.headers.get(b"accept-encoding", b""))
    if not encoding or name.endswith(".woff2"):  # which is compressed already
        return _table()[name]
    return _encoded(name, encoding)


async def page(call: Call) -> Reply:
    """The page itself."""
    return _reply(call, "index.html")


async def docs_page(call: Call) -> Reply:
    """The page that shows the service's description."""
    return _reply(call, "docs.html")


async def page_file(call: Call) -> Reply:
    """A file that the page loads."""
    name = call.path_values["file"]
    if name not in _table() or name.endswith(".html"):
        raise RefusalError(404, "The page has no file of that name.", code="unknown_route")
    return _reply(call, name)
