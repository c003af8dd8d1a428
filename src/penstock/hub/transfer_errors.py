"""The errors of requests to a hub: what its status, its headers or the HTTP library say, as errors of Penstock."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import FileAccessError, InvalidFileError, NotFoundError, PenstockError, UnavailableError
from penstock.hub.names import ModelName
from penstock.validation import printable

__all__ = ["endpoint", "is_offline", "network_error", "refusal"]


def endpoint() -> str:
    """Return the address of the hub, without a slash at its end."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """``HF_HUB_OFFLINE``: True if no request may be sent."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def refusal(name: ModelName, status: int, headers: Mapping[str, str]) -> PenstockError:
    """Return the error for a response that is not the one asked for; the names of ``headers`` are in lower case."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    if code == "GatedRepo":
        return FileAccessError(
            f"{name}: access is restricted. Accept the conditions at {endpoint()}/{name.repository}, then log in with "
            "`hf auth login` or set HF_TOKEN."
        )
    if code == "RevisionNotFound":
        return NotFoundError(
            f"{name}: {endpoint()}/{name.repository} has no revision {name.revision}. Pass a branch, a tag or a commit."
        )
    if code == "RepoNotFound" or (status == 401 and "credentials" not in message):
        return NotFoundError(  # a hub answers 401 for an unknown repository, as it hides private ones
            f"{name}: {endpoint()} has no such repository, or it is private. Check the name. For a private repository, "
            "log in with `hf auth login` or set HF_TOKEN."
        )
    if status in (401, 403):
        return FileAccessError(
            f"{name}: {endpoint()} refused access ({status}). Check HF_TOKEN or log in with `hf auth login`."
        )
    if status == 404:
        return NotFoundError(f"{name}: {endpoint()} has no such file ({status}).")
    retry_after = headers.get("retry-after", "").strip()
    seconds = int(retry_after) if retry_after.isascii() and retry_after.isdigit() and len(retry_after) < 9 else 0
    when = f"in {seconds} s" if seconds else "later"
    return UnavailableError(f"{name}: {endpoint()} answered with an error ({status}). Try again {when}.", seconds)


def network_error(name: ModelName, error: BaseException) -> BaseException:
    """Return the error for one of the HTTP library, or ``error`` itself if it is neither of the network
    nor of the response."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return UnavailableError(f"{name}: HF_HUB_OFFLINE is set, so nothing can be downloaded.")
    reason = printable(f"{str(error) or type(error).__name__:.300}")
    if _is_of_network(error):
        return UnavailableError(
            f"{name}: no connection to {endpoint()}: {reason}. Check the network and try again.", code="no_connection"
        )
    if isinstance(error, ValueError):  # httpx builds the request of a redirect even if it does not follow it
        return InvalidFileError(
            f"{name}: {endpoint()}: the response cannot be read: {reason}. Check HF_ENDPOINT.", code="invalid_response"
        )
    return error


def _is_of_network(error: BaseException) -> bool:
    """Return True for an error of the HTTP library, whichever one this version of ``huggingface_hub`` uses."""
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    return isinstance(error, ConnectionError | TimeoutError) or bool(modules & {"httpx", "httpx2"})
