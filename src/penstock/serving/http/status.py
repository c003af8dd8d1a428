"""``GET /status``: models, workers, servables, counts and latencies; the page's live view shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from msgspec import UNSET, Meta, UnsetType

from penstock.api_errors import without_folders
from penstock.llm.backend import known_card
from penstock.servables.lifecycle.report import ServableStatus, servable_status
from penstock.serving.call import Call, Reply, json_reply
from penstock.serving.metrics import WINDOW
from penstock.serving.request_fields import Body
from penstock.text.answer.template_features import TemplateFeature, features_of
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.backend import Backend

__all__ = ["Count", "ModelStatus", "State", "Status", "StatusHistory", "history", "model_status", "status"]

State = Literal["loading", "ready", "updating", "failed", "draining"]
Count = Annotated[int, Meta(ge=0)]
_Seconds = Annotated[float, Meta(ge=0)]
_LATENCIES: Final = ("first_token_s", "between_tokens_s", "e2e_s")
_COUNTS: Final = (
    "num_running", "num_waiting", "num_pages", "num_held_pages", "num_prompt_tokens", "num_cached_tokens",
    "num_output_tokens", "num_preemptions",
)  # fmt: skip
_CARD: Final = (
    "scheme", "network", "source", "version", "max_model_len", "has_chat_template", "has_tokenizer", "tail",
)  # fmt: skip


class Percentiles(Body):
    """Percentiles of a time in seconds."""

    p50: _Seconds
    p99: _Seconds


class Latencies(Body):
    """Percentiles of a model's latencies; null before the first request."""

    first_token_s: Percentiles | None
    between_tokens_s: Percentiles | None
    e2e_s: Percentiles | None


class WorkerStatus(Body):
    """A process that runs a model; ``pid`` is that on the machine ``node``, an address or "" for the service's own."""

    name: str
    status: str
    role: Literal["", "prefill", "decode"]
    node: str
    pid: Count
    version: Count
    heartbeat_age_s: _Seconds | None
    num_open: Count


class ModelStatus(Body):
    """A model's workers, counts and latencies.  The fields with defaults are absent before its first load."""

    id: str
    state: State
    is_ready: bool
    error: str
    heartbeat_age_s: _Seconds | None
    num_running: Count
    num_waiting: Count
    num_pages: Count
    num_held_pages: Count
    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_output_tokens: Count
    num_preemptions: Count
    num_finished: dict[str, Count]
    num_restarts: dict[str, Count]
    window: str
    latency: Latencies
    workers: list[WorkerStatus]
    scheme: str | UnsetType = UNSET
    network: str | UnsetType = UNSET
    source: str | UnsetType = UNSET
    version: Count | UnsetType = UNSET
    max_model_len: Count | UnsetType = UNSET
    has_chat_template: bool | UnsetType = UNSET
    chat_features: list[TemplateFeature] | UnsetType = UNSET
    has_tokenizer: bool | UnsetType = UNSET
    tail: str | UnsetType = UNSET


class Status(Body):
    """Models, workers and servables."""

    version: str
    uptime_s: _Seconds
    is_draining: bool
    models: list[ModelStatus]
    servables: list[ServableStatus]


class ModelHistory(Body):
    """Means of a model's values over equal intervals; ``at_s`` has their ends in seconds of the service's uptime."""

    interval_s: _Seconds
    at_s: list[_Seconds]
    output_tokens_per_s: list[_Seconds]
    prompt_tokens_per_s: list[_Seconds]
    finished_per_s: list[_Seconds]
    num_running: list[_Seconds]
    num_waiting: list[_Seconds]
    held_pages_share: list[Annotated[float, Meta(ge=0, le=1)]]


class StatusHistory(Body):
    """The history of each model since the service started; a long history has longer intervals."""

    uptime_s: _Seconds
    models: dict[str, ModelHistory]


async def history(call: Call) -> Reply:
    """Return the history of each model."""
    series = call.metrics.history.series
    models = {
        name: {"interval_s": model_series.interval_s, "at_s": model_series.at_s, **model_series.columns}
        for name, model_series in series.items()
    }
    return json_reply({"uptime_s": call.arrived - call.metrics.started, "models": models})


async def status(call: Call) -> Reply:
    """Return the current models, workers, servables, counts and latencies."""
    models = [model_status(backend, call) for backend in call.models.list()]
    uptime_s = call.arrived - call.metrics.started
    servables = call.metrics.servables
    report = {
        "version": __version__,
        "uptime_s": uptime_s,
        "is_draining": call.models.is_draining,
        "models": models,
        "servables": [] if servables is None else servable_status(servables),
    }
    return json_reply(report)


def _age(seconds: float) -> float | None:
    """Return an age for JSON, which has no infinity: None for an engine that has not run a step."""
    return max(0.0, seconds) if seconds < 1e12 else None


def model_status(backend: Backend, call: Call) -> dict[str, Any]:
    """Return a model's status: workers, counts, latencies, and the features of its chat template."""
    figures, model_metrics = backend.figures(), call.metrics.of_model(backend.name)
    report: dict[str, Any] = {
        "id": backend.name,
        "state": backend.state,
        "is_ready": backend.is_ready,
        "error": without_folders(backend.error),
        "heartbeat_age_s": _age(backend.heartbeat_age_s),
        **{name: 0 if figures is None else getattr(figures, name) for name in _COUNTS},
        "num_finished": {} if figures is None else dict(figures.num_finished),
        "num_restarts": dict(backend.deaths()),
        "window": f"the last {WINDOW:,} requests; inter-token latency over the last {WINDOW:,} chunks",
        "latency": {name: model_metrics.percentiles(name) for name in _LATENCIES},
        "workers": [
            {
                "name": worker.name,
                "status": worker.status,
                "role": worker.role,
                "node": worker.node,
                "pid": worker.pid,
                "version": worker.version,
                "heartbeat_age_s": _age(worker.heartbeat_age_s),
                "num_open": worker.num_open,
            }
            for worker in backend.workers()
        ],
    }
    card = known_card(backend)
    if card is not None:
        report |= {name: getattr(card, "max_len" if name == "max_model_len" else name) for name in _CARD}
        formats = (call.settings.tool_format, call.settings.reasoning_format)
        report["chat_features"] = [] if backend.tokenizer is None else features_of(backend.tokenizer, *formats)
    return report
