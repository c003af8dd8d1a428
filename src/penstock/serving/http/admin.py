"""The admin listener: routes that change a service's models, on a separate socket and never on the public listener."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.api_errors import RefusalError
from penstock.errors import (
    FileAccessError,
    InvalidArgumentError,
    InvalidFileError,
    OutOfMemoryError,
    UnsupportedError,
)
from penstock.json_schema import Choice, Members, Text
from penstock.serving.admission import Admission
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.gateway import Gateway
from penstock.serving.http.app import description_of
from penstock.serving.http.status import MODEL_STATUS, STATUS, model_status, status
from penstock.serving.operations import NAME, Operation, Routes
from penstock.serving.settings import GatewayLimits, GatewaySettings

if TYPE_CHECKING:
    from penstock.llm.backend import Models
    from penstock.serving.metrics import Metrics
    from penstock.serving.model_changes import Changes

__all__ = ["MAX_CONNECTIONS", "admin_operations", "make_admin"]

MAX_CONNECTIONS: Final = 64
_PATH: Final = Text(1, 4096)
_NOTES: Final = {
    "path": "Absolute path of a bundle or a checkpoint folder on the server.",
    "name": "Name of the model in requests. Default: the name of the file.",
}
LOAD: Final = Members("LoadRequest", {"path": _PATH, "name": Text(1, 128, NAME)}, ("path",), _NOTES)
UPDATE: Final = Members("UpdateRequest", {"path": _PATH}, ("path",), _NOTES)
UNLOADED: Final = Members("Unloaded", {"id": Text(), "state": Choice(("unloaded",))}, ("id", "state"))


class _Routes:
    """The handlers of the admin routes."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    async def load(self, call: Call) -> Reply:
        """Load a model under a new name."""
        with _refusals_of_files():
            backend = await self._changes.load(_absolute(call.body["path"]), call.body.get("name", ""))
        call.facts["model"] = backend.name
        return json_reply(model_status(backend, call.metrics))

    async def update(self, call: Call) -> Reply:
        """Switch a model to new weights."""
        name = call.facts["model"] = call.path_values["model"]
        with _refusals_of_files():
            backend = await self._changes.update(name, _absolute(call.body["path"]))
        return json_reply(model_status(backend, call.metrics))

    async def unload(self, call: Call) -> Reply:
        """Drain a model and free its memory."""
        name = call.facts["model"] = call.path_values["model"]
        await self._changes.unload(name)
        return json_reply({"id": name, "state": "unloaded"})


def admin_operations(changes: Changes) -> list[Operation]:
    """Return all routes of the admin listener."""
    routes = _Routes(changes)
    table = [
        Operation("GET", "/admin/models", "admin_models", "Models and workers, as in /status.", status, STATUS),
        Operation(
            "POST", "/admin/models/load", "load_model", "Load a model.", routes.load, MODEL_STATUS, LOAD,
            refusals=(429, 503, 504),
        ),
        Operation(
            "POST", "/admin/models/{model}/update", "update_model", "Switch a model to new weights.",
            routes.update, MODEL_STATUS, UPDATE, refusals=(404, 429, 503, 504),
        ),
        Operation(
            "POST", "/admin/models/{model}/unload", "unload_model", "Drain a model and free its memory.",
            routes.unload, UNLOADED, refusals=(404, 429, 503, 504),
        ),
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
    except (InvalidFileError, FileAccessError, UnsupportedError) as error:
        raise RefusalError(400, str(error), param="path", code="invalid_model") from error
    except OutOfMemoryError as error:
        raise RefusalError(503, str(error), code="out_of_memory", retry_after_s=30) from error
