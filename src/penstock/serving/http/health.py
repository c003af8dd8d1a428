"""The routes for models, health, metrics and version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import RefusalError
from penstock.json_schema import Choice, Flag, Items, Members, Text, Whole
from penstock.llm.backend import known_card
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.http.status import STATES
from penstock.serving.metrics import CONTENT_TYPE
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.backend import Backend

__all__ = [
    "HEALTH",
    "MODEL",
    "MODELS",
    "VERSION",
    "health_live",
    "health_ready",
    "metrics",
    "model",
    "models",
    "version",
]

_COUNT: Final = Whole(0, 2**53)
MODEL: Final = Members(
    "Model",
    {
        "id": Text(),
        "object": Choice(("model",)),
        "created": _COUNT,
        "owned_by": Text(),
        "max_model_len": _COUNT,
        "state": STATES,
        "is_ready": Flag(),
        "version": _COUNT,
        "scheme": Text(),
        "network": Text(),
        "has_chat_template": Flag(),
        "has_embeddings": Flag(),
    },
    ("id", "object", "created", "owned_by", "state", "is_ready"),
)
MODELS: Final = Members("ModelList", {"object": Choice(("list",)), "data": Items(MODEL, 0, None)}, ("object", "data"))
HEALTH: Final = Members("Health", {"status": Choice(("ok",))}, ("status",))
VERSION: Final = Members("Version", {"version": Text()}, ("version",))


def _described(backend: Backend) -> dict[str, Any]:
    found: dict[str, Any] = {
        "id": backend.name,
        "object": "model",
        "created": 0,
        "owned_by": "penstock",
        "state": backend.state,
        "is_ready": backend.is_ready,
    }
    card = known_card(backend)
    if card is None:
        return found
    return found | {
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
    return json_reply({"object": "list", "data": [_described(one) for one in call.models.list()]})


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
