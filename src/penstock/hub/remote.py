"""The description of a repository by its hub: its commit, its files with their sizes, and the small files themselves.

The endpoint (``HF_ENDPOINT``), the token (``HF_TOKEN`` or ``hf auth login``) and ``HF_HUB_OFFLINE`` are read by
``huggingface_hub``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from penstock.errors import FileAccessError, InvalidFileError, NotFoundError, PenstockError, UnavailableError
from penstock.hub.names import ModelName

__all__ = ["RemoteFile", "RemoteModel", "endpoint", "fetch_listing", "fetch_small", "is_offline", "translated_errors"]

MAX_SMALL_BYTES: Final = 64 << 20
_TIMEOUT_S: Final = 20.0
_CHUNK_BYTES: Final = 256 << 10
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DIGEST: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository.  ``digest`` is its SHA-256 (64 digits) or its Git object id (40), and its blob's name."""

    name: str
    num_bytes: int
    digest: str


@dataclass(frozen=True)
class RemoteModel:
    """A repository at the commit that its revision means now."""

    name: ModelName
    commit: str
    files: tuple[RemoteFile, ...]

    def find(self, name: str) -> RemoteFile | None:
        """Return the file called ``name``, or None."""
        return next((file for file in self.files if file.name == name), None)


def endpoint() -> str:
    """Return the address of the hub, without a slash at its end."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_offline() -> bool:
    """``HF_HUB_OFFLINE``: True if no request may be sent."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def fetch_listing(name: ModelName) -> RemoteModel:
    """Return the files of a repository at a revision.

    Raises NotFoundError (repository or revision), FileAccessError (gated, wrong token) or UnavailableError (offline, no
    connection, an error of the hub).
    """
    if is_offline():
        raise UnavailableError(f"{name}: HF_HUB_OFFLINE is set, so nothing can be downloaded. Unset it and try again.")
    from huggingface_hub import HfApi

    _configure()
    with translated_errors(name):
        info = HfApi(library_name="penstock").model_info(
            name.repository, revision=name.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    if not _COMMIT.fullmatch(info.sha or ""):
        raise InvalidFileError(f"{name}: {endpoint()} returned no commit")
    files = []
    for sibling in info.siblings or ():
        digest = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        if sibling.size is None or not _DIGEST.fullmatch(digest):
            raise InvalidFileError(f"{name}: {endpoint()} returned no size or digest for {sibling.rfilename!r:.120}")
        files.append(RemoteFile(sibling.rfilename, sibling.size, digest))
    return RemoteModel(name, str(info.sha), tuple(files))


def fetch_small(model: RemoteModel, name: str) -> bytes:
    """Return a small file of a repository without keeping it; errors as in ``fetch_listing``."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get

    file = model.find(name)
    if file is None:
        raise InvalidFileError(f"{model.name}: expected {name} in the repository, found none")
    if file.num_bytes > MAX_SMALL_BYTES:
        raise InvalidFileError(
            f"{model.name}: {name}: expected at most {MAX_SMALL_BYTES} bytes, found {file.num_bytes}"
        )
    data = io.BytesIO()
    url = hf_hub_url(model.name.repository, name, revision=model.commit)
    with translated_errors(model.name):
        http_get(url, data, headers=request_headers(), expected_size=file.num_bytes)
    return data.getvalue()


def request_headers() -> dict[str, str]:
    """Return the headers of a download, with the user's token; files come as they are, never compressed."""
    from huggingface_hub.utils import build_hf_headers

    return {**build_hf_headers(library_name="penstock"), "Accept-Encoding": "identity"}


def _configure() -> None:
    """Silence the progress bars and warnings of ``huggingface_hub``, as the command line shows its own.

    Its default of 10 MB a chunk makes progress jump on a slow line, and a connection that breaks off loses a chunk.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, logging

    constants.DOWNLOAD_CHUNK_SIZE = _CHUNK_BYTES
    logging.set_verbosity(logging.CRITICAL)
    disable_progress_bars()


@contextmanager
def translated_errors(name: ModelName) -> Iterator[None]:
    """Turn the errors of ``huggingface_hub`` in the block into those of Penstock."""
    from huggingface_hub import errors

    try:
        yield
    except PenstockError:
        raise
    except errors.GatedRepoError:
        raise FileAccessError(
            f"{name}: access is restricted. Accept the conditions at {endpoint()}/{name.repository}, then log in with "
            "`hf auth login` or set HF_TOKEN."
        ) from None
    except errors.RepositoryNotFoundError:
        raise _not_found(name) from None
    except errors.RevisionNotFoundError:
        raise NotFoundError(
            f"{name}: {endpoint()}/{name.repository} has no revision {name.revision}. Pass a branch, a tag or a commit."
        ) from None
    except errors.HfHubHTTPError as error:
        raise _http_error(name, error.response) from None
    except errors.OfflineModeIsEnabled:
        raise UnavailableError(f"{name}: HF_HUB_OFFLINE is set, so nothing can be downloaded.") from None
    except Exception as error:
        if not _is_network_error(error):
            raise
        raise UnavailableError(
            f"{name}: no connection to {endpoint()}: {error or type(error).__name__}. Check the network and try again."
        ) from None


def _not_found(name: ModelName) -> NotFoundError:
    return NotFoundError(
        f"{name}: {endpoint()} has no such repository, or it is private. Check the name. For a private repository, log "
        "in with `hf auth login` or set HF_TOKEN."
    )


def _http_error(name: ModelName, response: Any) -> PenstockError:
    status = response.status_code
    if status == 401 and "credentials" not in response.headers.get("X-Error-Message", ""):
        return _not_found(name)  # a hub answers this for an unknown repository, as it hides private ones
    if status in (401, 403):
        return FileAccessError(
            f"{name}: {endpoint()} refused access ({status}). Check HF_TOKEN or log in with `hf auth login`."
        )
    if status == 404:
        return NotFoundError(f"{name}: {endpoint()} has no such file ({status}).")
    return UnavailableError(f"{name}: {endpoint()} answered with an error ({status}). Try again later.")


def _is_network_error(error: Exception) -> bool:
    """Return True for an error of the HTTP library, whichever one this version of ``huggingface_hub`` uses."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(modules & {"httpx", "httpx2", "requests"})
