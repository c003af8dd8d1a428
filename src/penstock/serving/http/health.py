"""The routes for models, health, metrics and version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET, UnsetType

from penstock.api_errors import RefusalError
from penstock.llm.backend import known_card
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.http.status import Count, State
from penstock.serving.metrics import CONTENT_TYPE
from penstock.serving.request_fields import Body
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.backend import Backend

__all__ = [
    "Health",
    "ModelList",
    "ModelObject",
    "Version",
    "health_live",
    "health_ready",
    "metrics",
    "model",
    "models",
    "version",
]


class ModelObject(Body):
    """A model.  The fields with defaults are absent before its first load."""

    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    state: State
    is_ready: bool
    max_model_len: Count | UnsetType = UNSET
    version: Count | UnsetType = UNSET
    scheme: str | UnsetType = UNSET
    network: str | UnsetType = UNSET
    has_chat_template: bool | UnsetType = UNSET
    has_embeddings: bool | UnsetType = UNSET


class ModelList(Body):
    """The list of models."""

    object: Literal["list"]
    data: list[ModelObject]


class Health(Body):
    """The response of a check of health."""

    status: Literal["ok"]


class Version(Body):
    """The version of Penstock."""

    version: str


def _described(backend: Backend) -> dict[str, Any]:
    description: dict[str, Any] = {
        "id": backend.name,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "state": backend.state,
        "is_ready": backend.is_ready,
    }
    card = known_card(backend)
    if card is None:
        return description
    return description | {
        "created": card.created,
        "max_model_len": card.max_len,
        "version": card.version,
        "scheme": card.scheme,
        "network": card.network,
        "has_chat_template": card.has_chat_template,
        "has_embeddings": card.has_embeddings,
    }


async def models(call: Call) -> Reply:
    """Return all models."""
    return json_reply({"object": "list", "data": [_described(backend) for backend in call.models.list()]})


async def model(call: Call) -> Reply:
    """Return one model."""
    return json_reply(_described(call.models.get(call.path_values["model"])))


async def health_live(call: Call) -> Reply:
    """Report that the event loop runs."""
    return json_reply({"status": "ok"})


async def health_ready(call: Call) -> Reply:
    """Report whether a model or a servable accepts requests, and the service is not stopping."""
    if call.models.is_draining:
        raise RefusalError(503, "The service is stopping.", code="draining")
    if not call.is_ready():
        raise RefusalError(503, "No model is ready.", code="not_ready")
    return json_reply({"status": "ok"})


async def metrics(call: Call) -> Reply:
    """Return the metrics in Prometheus' text format."""
    return Reply(200, call.metrics.text(), CONTENT_TYPE)


async def version(call: Call) -> Reply:
    """Return the version of Penstock."""
    return json_reply({"version": __version__})
