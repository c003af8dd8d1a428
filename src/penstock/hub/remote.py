"""The description of a repository by its hub: its commit, its files with their sizes, and the small files themselves.

The endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN`` or ``hf auth login``) and ``HF_HUB_OFFLINE`` are read by
``huggingface_hub``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final
from urllib.parse import quote

from penstock.config import show
from penstock.errors import InvalidFileError, UnavailableError
from penstock.hub.content_hash import ContentHash
from penstock.hub.listing import MAX_FILE_BYTES, decode_listing
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile, RemoteModel
from penstock.hub.transfer import Pace, Transfer, is_redirect, open_transfer, receive
from penstock.hub.transfer_errors import endpoint, is_offline, refusal

__all__ = ["complete_files", "fetch_listing", "fetch_small", "file_url"]

MAX_SMALL_BYTES: Final = 64 << 20
_SMALL_S: Final = 300.0
"""Limit in seconds on the time to wait for a listing or a small file."""
_ETAG: Final = re.compile(r"(?:W/)?\"?([0-9a-f]{64}|[0-9a-f]{40}|[0-9a-f]{32})\"?")


def file_url(model: RemoteModel, name: str) -> str:
    """Return the address of a file."""
    return f"{endpoint()}/{model.name.repository}/resolve/{model.commit}/{quote(name)}"


def fetch_listing(name: ModelName) -> RemoteModel:
    """Return the files of a repository at a revision.

    Raises NotFoundError (repository or revision), FileAccessError (gated, wrong token), UnavailableError (offline, no
    connection, an error of the hub) or InvalidFileError (an answer that is no listing).
    """
    if is_offline():
        raise UnavailableError(f"{name}: HF_HUB_OFFLINE is set, so nothing can be downloaded. Unset it and try again.")
    url = f"{endpoint()}/api/models/{name.repository}/revision/{quote(name.revision, safe='')}?blobs=True"
    data = bytearray()
    with open_transfer("GET", url, name) as transfer:
        if transfer.status != 200:
            raise refusal(name, transfer.status, transfer.headers)
        for piece in transfer.pieces(Pace(name, _SMALL_S)):
            data += piece
            if len(data) > MAX_SMALL_BYTES:
                raise InvalidFileError(
                    f"{name}: {endpoint()}: expected a listing of at most {MAX_SMALL_BYTES} bytes, got more",
                    code="hub_too_large",
                )
    return decode_listing(name, bytes(data), transfer.headers.get("content-type", ""))


def complete_files(model: RemoteModel, files: Iterable[RemoteFile]) -> tuple[RemoteFile, ...]:
    """Return files with a size and a digest each.

    Those that the listing lacks come from headers: a hub names the digest of a large file in its redirect to another
    server, and other servers have it as the ETag.
    """
    return tuple(_complete(model, file) for file in files)


def _complete(model: RemoteModel, file: RemoteFile) -> RemoteFile:
    if file.digest and file.num_bytes >= 0:
        return file
    url = file_url(model, file.name)
    with open_transfer("HEAD", url, model.name, follow=False) as transfer:
        if "x-linked-etag" in transfer.headers or not is_redirect(transfer):
            return _completed_by(model, file, transfer)
    with open_transfer("HEAD", url, model.name) as transfer:
        return _completed_by(model, file, transfer)


def _completed_by(model: RemoteModel, file: RemoteFile, transfer: Transfer) -> RemoteFile:
    headers = transfer.headers
    if transfer.status != 200 and not is_redirect(transfer):
        raise refusal(model.name, transfer.status, headers)
    commit = headers.get("x-repo-commit", model.commit)
    if commit != model.commit:
        raise _header_error(model, file, "X-Repo-Commit", f"expected {model.commit}, got {show(commit)}")
    if file.num_bytes < 0:
        text = headers.get("x-linked-size", "" if is_redirect(transfer) else headers.get("content-length", ""))
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= MAX_FILE_BYTES):
            raise _header_error(model, file, "Content-Length", f"expected the size of the file, got {show(text)}")
        file = replace(file, num_bytes=int(text))
    if file.digest:
        return file
    etag = headers.get("x-linked-etag", headers.get("etag", ""))
    digest = _ETAG.fullmatch(etag)
    if digest is None:
        raise _header_error(
            model, file, "ETag", f"expected a digest in hexadecimal, as the listing has none, got {show(etag)}"
        )
    return replace(file, digest=digest[1], by_etag=True)


def _header_error(model: RemoteModel, file: RemoteFile, header: str, reason: str) -> InvalidFileError:
    return InvalidFileError(
        f"{model.name}: {file.name}: {header}: {reason}. The content cannot be verified, so it is not downloaded.",
        param=header,
        code="invalid_header",
    )


def fetch_small(model: RemoteModel, name: str) -> bytes:
    """Return a small file of a repository without keeping it; errors as in ``fetch_listing``."""
    listed = model.find(name)
    if listed is None:
        raise InvalidFileError(f"{model.name}: expected {name} in the repository, got none")
    file = _complete(model, listed)
    if file.num_bytes > MAX_SMALL_BYTES:
        raise InvalidFileError(f"{model.name}: {name}: expected at most {MAX_SMALL_BYTES} bytes, got {file.num_bytes}")
    sink = _Memory()
    receive(model.name, file, file_url(model, name), sink, _SMALL_S)
    digest = ContentHash(file)
    digest.update(sink.data)
    if not digest.matches():
        raise InvalidFileError(
            f"{model.name}: {name}: the content does not match {file.digest_source}. Run the command again.",
            code="wrong_digest",
        )
    return bytes(sink.data)


class _Memory:
    """The bytes of a small file."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self.data += data

    def tell(self) -> int:
        """Return the number of bytes."""
        return len(self.data)

    def restart(self) -> None:
        """Drop every byte."""
        self.data.clear()
