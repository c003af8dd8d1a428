"""The admin listener: routes that change a service's models, on a separate socket and never on the public listener.

The profile, which changes nothing, is on both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

from msgspec import Meta

from penstock.api_errors import RefusalError
from penstock.errors import (
    FileAccessError,
    InvalidArgumentError,
    InvalidFileError,
    OutOfMemoryError,
    UnsupportedError,
)
from penstock.serving.admission import Admission
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.gateway import Gateway
from penstock.serving.http.app import description_of
from penstock.serving.http.profile import profile_operation
from penstock.serving.http.status import ModelStatus, Status, model_status, status
from penstock.serving.operations import NAME, Operation, Routes
from penstock.serving.request_fields import Body
from penstock.serving.settings import GatewayLimits, GatewaySettings

if TYPE_CHECKING:
    from penstock.llm.backend import Models
    from penstock.serving.metrics import Metrics
    from penstock.serving.model_changes import Changes

__all__ = ["MAX_CONNECTIONS", "admin_operations", "make_admin"]

MAX_CONNECTIONS: Final = 64
_Path = Annotated[
    str,
    Meta(
        min_length=1, max_length=4096,
        description="Absolute path of a bundle or a checkpoint folder on the server.",
    ),
]  # fmt: skip
_Name = Annotated[str, Meta(max_length=128, pattern=rf"^{NAME}\Z")]


class LoadRequest(Body):
    """The body of a load."""

    path: _Path
    name: Annotated[_Name | None, Meta(description="Name of the model in requests. Default: the name of the file.")] = (
        None
    )


class UpdateRequest(Body):
    """The body of an update."""

    path: _Path


class DrainRequest(Body):
    """The body of a drain."""

    worker: Annotated[str, Meta(min_length=1, max_length=160, description="Name of the worker, as in /admin/models.")]
    replace: Annotated[bool, Meta(description="Start another worker first.")] = False


class Unloaded(Body):
    """The response of an unload."""

    id: str
    state: Literal["unloaded"]


class _Routes:
    """The handlers of the admin routes."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def load(self, call: Call) -> Reply:
        """Load a model under a new name."""
        body: LoadRequest = call.body
        with _refusals_of_files():
            backend = await self._changes.load(_absolute(body.path), body.name or "")
        call.facts["model"] = backend.name
        return json_reply(model_status(backend, call))

    async def update(self, call: Call) -> Reply:
        """Switch a model to new weights."""
        body: UpdateRequest = call.body
        name = call.facts["model"] = call.path_values["model"]
        with _refusals_of_files():
            backend = await self._changes.update(name, _absolute(body.path))
        return json_reply(model_status(backend, call))

    async def unload(self, call: Call) -> Reply:
        """Drain a model and free its memory."""
        name = call.facts["model"] = call.path_values["model"]
        await self._changes.unload(name)
        return json_reply({"id": name, "state": "unloaded"})

    async def drain(self, call: Call) -> Reply:
        """End one worker of a model; others go on with its requests."""
        body: DrainRequest = call.body
        name = call.facts["model"] = call.path_values["model"]
        backend = await self._changes.drain_worker(name, body.worker, replaces=body.replace)
        return json_reply(model_status(backend, call))


def admin_operations(changes: Changes) -> list[Operation]:
    """Return all routes of the admin listener."""
    routes = _Routes(changes)
    table = [
        Operation("GET", "/admin/models", "admin_models", "Models and workers, as in /status.", status, Status),
        Operation(
            "POST", "/admin/models/load", "load_model", "Load a model.", routes.load, ModelStatus, LoadRequest,
            refusals=(429, 503, 504),
        ),
        Operation(
            "POST", "/admin/models/{model}/update", "update_model", "Switch a model to new weights.",
            routes.update, ModelStatus, UpdateRequest, refusals=(404, 429, 503, 504),
        ),
        Operation(
            "POST", "/admin/models/{model}/unload", "unload_model", "Drain a model and free its memory.",
            routes.unload, Unloaded, refusals=(404, 429, 503, 504),
        ),
        Operation(
            "POST", "/admin/models/{model}/drain", "drain_worker", "Drain one worker of a model and end it.",
            routes.drain, ModelStatus, DrainRequest, refusals=(404, 429, 503, 504),
        ),
        profile_operation(),
    ]  # fmt: skip
    table.append(description_of(table))
    return table


def make_admin(changes: Changes, models: Models, metrics: Metrics) -> Gateway:
    """Return the application of the admin listener.

    It needs no key, because only the owner may open its socket.  Its limits are the defaults, because a load may take
    longer than a public request.  ``metrics`` are the public gateway's, so that both report the same latencies.
    """
    settings = GatewaySettings(limits=GatewayLimits(num_connections=MAX_CONNECTIONS))
    return Gateway(Routes(admin_operations(changes)), Admission(models, settings, metrics=metrics))


def _absolute(path: str) -> str:
    if not Path(path).is_absolute() or "\0" in path:
        raise InvalidArgumentError(
            f"path must be absolute, not {path!r:.200}. The server's working folder differs from yours.", param="path"
        )
    return path


@contextmanager
def _refusals_of_files() -> Iterator[None]:
    """Report why a file does not open.  Only the admin listener does, because its client chose the file."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.param is None or error.param in LoadRequest.__struct_fields__:
            raise
        raise RefusalError(400, str(error), param="path", code="invalid_model") from error
    except (InvalidFileError, FileAccessError, UnsupportedError) as error:
        raise RefusalError(400, str(error), param="path", code="invalid_model") from error
    except OutOfMemoryError as error:
        raise RefusalError(503, str(error), code="out_of_memory", retry_after_s=30) from error
