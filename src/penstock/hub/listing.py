"""The listing of a repository, decoded into types: nothing of it is used that was not checked."""

from __future__ import annotations

import re
from typing import Annotated, Final

import msgspec

from penstock.config import show
from penstock.errors import InvalidFileError
from penstock.hub.names import ModelName
from penstock.hub.remote_model import RemoteFile, RemoteModel
from penstock.hub.transfer_errors import endpoint

__all__ = ["COMMIT", "MAX_FILE_BYTES", "decode_listing"]

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
MAX_FILE_BYTES: Final = 1 << 50
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_MAX_NAME_BYTES: Final = 255
_MAX_PATH_CHARS: Final = 1024
_PLACE: Final = re.compile(r"^(.*?) - at `\$\.?(.*)`$", re.DOTALL)

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]


class _Large(msgspec.Struct, gc=False):
    """A file in Git LFS; beside it, ``blobId`` is the digest of the pointer."""

    sha256: str | None = None
    size: _Size | None = None


class _Sibling(msgspec.Struct, gc=False, rename={"blob_id": "blobId", "name": "rfilename"}):
    name: str
    size: _Size | None = None
    blob_id: str | None = None
    lfs: _Large | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]


_DECODER: Final = msgspec.json.Decoder(_Listing)


def decode_listing(name: ModelName, data: bytes, content_type: str = "") -> RemoteModel:
    """Return the repository that a listing in JSON describes; InvalidFileError names the field at fault.

    Files with names that no file here can have are left out: control characters, or more than 255 bytes.
    """
    if "html" in content_type.lower() or data.lstrip()[:1] == b"<":
        raise _error(
            name, "HF_ENDPOINT", "expected the address of a hub, got a web page from it", "A login may be needed."
        )
    try:
        listing = _DECODER.decode(data)
    except RecursionError:
        raise _error(name, "", "expected a listing in JSON, got too many levels of nesting") from None
    except (msgspec.MsgspecError, UnicodeError) as error:
        place = _PLACE.match(str(error))
        reason, field = (place[1], place[2]) if place else (f"Expected a listing in JSON: {error}", "")
        raise _error(name, field, f"{reason[:1].lower()}{reason[1:]}") from None
    if not COMMIT.fullmatch(listing.sha):
        raise _error(name, "sha", f"expected a commit of 40 hexadecimal digits, got {show(listing.sha)}")
    if COMMIT.fullmatch(name.revision) and name.revision != listing.sha:
        raise _error(name, "sha", f"expected the commit {name.revision}, got {listing.sha}")
    files: dict[str, RemoteFile] = {}
    for number, sibling in enumerate(listing.siblings):
        if not _is_usable(sibling.name):
            continue
        file = _file_of(name, sibling, f"siblings[{number}]")
        if files.setdefault(file.name, file) != file:
            raise _error(name, f"siblings[{number}].rfilename", f"expected each file once, got {show(file.name)} again")
    return RemoteModel(name, listing.sha, tuple(files.values()))


def _file_of(name: ModelName, sibling: _Sibling, place: str) -> RemoteFile:
    lfs = sibling.lfs
    digest, key = (sibling.blob_id, "blobId") if lfs is None else (lfs.sha256, "lfs.sha256")
    if digest and not _DIGEST.fullmatch(digest):
        raise _error(
            name, f"{place}.{key}", f"expected a SHA-256 or a Git object id in hexadecimal, got {show(digest)}"
        )
    size = sibling.size if sibling.size is not None or lfs is None else lfs.size
    return RemoteFile(sibling.name, -1 if size is None else size, digest or "")


def _is_usable(path: str) -> bool:
    if not path.isprintable() or len(path) > _MAX_PATH_CHARS:
        return False
    return all(len(part.encode()) <= _MAX_NAME_BYTES for part in path.split("/"))


def _error(name: ModelName, field: str, reason: str, hint: str = "") -> InvalidFileError:
    where = f"{field}: " if field else ""
    advice = hint or "Check HF_ENDPOINT."
    return InvalidFileError(
        f"{name}: {endpoint()}: {where}{reason}. {advice}", param=field or None, code="invalid_listing"
    )
