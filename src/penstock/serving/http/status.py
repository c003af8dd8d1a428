"""``GET /status``: models, workers, servables, counts and latencies; the page's live view shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import without_folders
from penstock.json_schema import Choice, Entries, Flag, Items, Members, Number, Shape, Text, Whole, optional
from penstock.llm.backend import known_card
from penstock.servables.lifecycle.report import SERVABLE_STATUS, servable_status
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.metrics import WINDOW
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.serving.metrics import Metrics

__all__ = ["MODEL_STATUS", "STATES", "STATUS", "model_status", "status"]

STATES: Final = Choice(("loading", "ready", "updating", "failed", "draining"))
_COUNT: Final = Whole(0, 2**53)
_SECONDS: Final = Number(0, 1e12)
_PERCENTILES: Final = optional(Members("Percentiles", {"p50": _SECONDS, "p99": _SECONDS}, ("p50", "p99")))
_LATENCIES: Final = ("first_token_s", "between_tokens_s", "e2e_s")
_COUNTS: Final = (
    "num_running", "num_waiting", "num_pages", "num_held_pages", "num_prompt_tokens", "num_cached_tokens",
    "num_output_tokens", "num_preemptions",
)  # fmt: skip
_CARD: Final[dict[str, Shape]] = {
    "scheme": Text(),
    "network": Text(),
    "source": Text(),
    "version": _COUNT,
    "max_model_len": _COUNT,
    "has_chat_template": Flag(),
    "has_tokenizer": Flag(),
    "tail": Text(),
}
_WORKER: Final = Members(
    "Worker",
    {
        "name": Text(),
        "status": Text(),
        "pid": _COUNT,
        "version": _COUNT,
        "heartbeat_age_s": optional(_SECONDS),
        "num_open": _COUNT,
    },
    ("name", "status", "pid", "version", "heartbeat_age_s", "num_open"),
)
MODEL_STATUS: Final = Members(
    "ModelStatus",
    {
        "id": Text(),
        "state": STATES,
        "is_ready": Flag(),
        "error": Text(),
        "heartbeat_age_s": optional(_SECONDS),
        **_CARD,
        **dict.fromkeys(_COUNTS, _COUNT),
        "num_finished": Entries("[a-z]+", _COUNT, 16),
        "num_restarts": Entries("[a-z]+", _COUNT, 16),
        "window": Text(),
        "latency": Members("Latencies", dict.fromkeys(_LATENCIES, _PERCENTILES), _LATENCIES),
        "workers": Items(_WORKER, 0, None),
    },
    (
        "id",
        "state",
        "is_ready",
        "error",
        "heartbeat_age_s",
        *_COUNTS,
        "num_finished",
        "num_restarts",
        "window",
        "latency",
        "workers",
    ),
)
STATUS: Final = Members(
    "Status",
    {
        "version": Text(),
        "uptime_s": _SECONDS,
        "is_draining": Flag(),
        "models": Items(MODEL_STATUS, 0, None),
        "servables": Items(SERVABLE_STATUS, 0, None),
    },
    ("version", "uptime_s", "is_draining", "models", "servables"),
)


async def status(call: Call) -> Reply:
    """Return the current models, workers, servables, counts and latencies."""
    models = [model_status(one, call.metrics) for one in call.models.list()]
    uptime_s = call.arrived - call.metrics.started
    servables = call.metrics.servables
    found = {
        "version": __version__,
        "uptime_s": uptime_s,
        "is_draining": call.models.is_draining,
        "models": models,
        "servables": [] if servables is None else servable_status(servables),
    }
    return json_reply(found)


def _age(seconds: float) -> float | None:
    """Return an age for JSON, which has no infinity: None for an engine that has not run a step."""
    return max(0.0, seconds) if seconds < 1e12 else None


def model_status(backend: Backend, metrics: Metrics) -> dict[str, Any]:
    """Return a model's status: workers, counts and latencies."""
    figures, noted = backend.figures(), metrics.of_model(backend.name)
    found: dict[str, Any] = {
        "id": backend.name,
        "state": backend.state,
        "is_ready": backend.is_ready,
        "error": without_folders(backend.error),
        "heartbeat_age_s": _age(backend.heartbeat_age_s),
        **{name: 0 if figures is None else getattr(figures, name) for name in _COUNTS},
        "num_finished": {} if figures is None else dict(figures.num_finished),
        "num_restarts": dict(backend.deaths()),
        "window": f"the last {WINDOW:,} requests; inter-token latency over the last {WINDOW:,} chunks",
        "latency": {name: noted.percentiles(name) for name in _LATENCIES},
        "workers": [
            {
                "name": one.name,
                "status": one.status,
                "pid": one.pid,
                "version": one.version,
                "heartbeat_age_s": _age(one.heartbeat_age_s),
                "num_open": one.num_open,
            }
            for one in backend.workers()
        ],
    }
    card = known_card(backend)
    if card is not None:
        found |= {name: getattr(card, "max_len" if name == "max_model_len" else name) for name in _CARD}
    return found
