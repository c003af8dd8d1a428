"""Metadata, readiness, statistics and index of what is served, in the format of the Open Inference Protocol.

The functions return plain objects, which become JSON over REST and messages over gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import without_folders
from penstock.llm.backend import known_card
from penstock.serving.oip.classifiers import signature_of
from penstock.serving.oip.dispatch import check_version, found_method, model_called
from penstock.tensors import MethodStatistics, ServedMethod
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.llm.backend import Backend
    from penstock.serving.call import Call
    from penstock.serving.metrics import Metrics

__all__ = ["EXTENSIONS", "REST_EXTENSIONS", "index", "is_model_ready", "metadata", "server_metadata", "statistics"]

EXTENSIONS: Final = ("model_configuration", "model_repository", "parameters", "schedule_policy", "statistics")
REST_EXTENSIONS: Final = ("binary_tensor_data", "generate", *EXTENSIONS)
"""The supported extensions of Triton's; over gRPC all tensors are binary, and streams need no extension."""
_STATES: Final = {
    "loading": "LOADING", "ready": "READY", "updating": "READY", "failed": "UNAVAILABLE", "draining": "UNLOADING"
}  # fmt: skip
_NS: Final = 1e9


def server_metadata(extensions: tuple[str, ...]) -> dict[str, Any]:
    """Return the server's name, version and extensions."""
    return {"name": "penstock", "version": __version__, "extensions": [*extensions]}


def metadata(call: Call, name: str, version: str) -> dict[str, Any]:
    """Return a model's inputs and outputs."""
    method = found_method(call, name, version)
    if method is not None:
        return {
            "name": name, "versions": [*method.versions], "platform": "penstock_servable",
            "inputs": [_spec(tensor.name, tensor.datatype, tensor.shape) for tensor in method.inputs],
            "outputs": [_spec(tensor.name, tensor.datatype, tensor.shape) for tensor in method.outputs],
        }  # fmt: skip
    backend = model_called(call, name)
    check_version(backend, version)
    signature = signature_of(backend)
    return {
        "name": backend.name, "versions": [str(backend.card.version)], "platform": "penstock",
        "inputs": [_spec(*row, (-1,)) for row in signature.inputs],
        "outputs": [_spec(*row) for row in signature.outputs],
    }  # fmt: skip


def _spec(name: str, datatype: str, shape: Iterable[int]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": [*shape]}


def is_model_ready(call: Call, name: str, version: str) -> bool:
    """Return True if a new request would be accepted."""
    method = found_method(call, name, version)
    if method is not None:
        return method.is_ready and not call.models.is_draining
    backend = model_called(call, name)
    is_ready = backend.is_ready and not call.models.is_draining
    if is_ready:
        check_version(backend, version)
    return is_ready


def statistics(call: Call, name: str = "", version: str = "") -> dict[str, Any]:
    """Return the statistics of a model, a version, or all loaded models: sums since the model was loaded."""
    methods = [*call.methods.list()] if call.methods is not None else []
    if name:
        method = found_method(call, name, version)
        if method is None:
            backend = model_called(call, name)
            check_version(backend, version)
            return {"model_stats": [_of_backend(backend, call.metrics)]}
        methods = [model for model in methods if model.name == method.name] if not version else [method]
        return {"model_stats": [_of_method(model) for model in methods or [method]]}
    ready = [model for model in call.models.list() if known_card(model) is not None]
    return {"model_stats": [*(_of_backend(model, call.metrics) for model in ready), *map(_of_method, methods)]}


def _duration(count: int = 0, ns: float = 0) -> dict[str, int]:
    return {"count": count, "ns": int(ns)}


def _entry(name: str, version: str, counts: MethodStatistics, batches: list[dict[str, Any]]) -> dict[str, Any]:
    num_success, none = counts.num_success, _duration()
    return {
        "name": name, "version": version, "last_inference": counts.last_inference_ms,
        "inference_count": counts.num_inferences, "execution_count": counts.num_executions,
        "inference_stats": {
            "success": _duration(num_success, counts.success_ns), "fail": _duration(counts.num_fail, counts.fail_ns),
            "queue": _duration(num_success, counts.queue_ns), "compute_input": none,
            "compute_infer": _duration(num_success, counts.compute_ns), "compute_output": none,
            "cache_hit": none, "cache_miss": none,
        },
        "batch_stats": batches,
    }  # fmt: skip


def _of_method(method: ServedMethod) -> dict[str, Any]:
    counts, none = method.statistics, _duration()
    batches = [
        {"batch_size": size, "compute_input": none, "compute_infer": _duration(*durations), "compute_output": none}
        for size, durations in sorted(counts.batch_sizes.items())
    ]
    return _entry(method.name, method.version, counts, batches)


def _of_backend(backend: Backend, metrics: Metrics) -> dict[str, Any]:
    """Return the statistics of a language model, summed over its versions and all protocols; times are from Metrics."""
    model_metrics, figures = metrics.of_model(backend.name), backend.figures()
    latency, queue_time = (
        model_metrics.histograms["e2e_request_latency_seconds"],
        model_metrics.histograms["request_queue_time_seconds"],
    )
    counts = MethodStatistics(
        num_inferences=model_metrics.finished["stop"] + model_metrics.finished["length"],
        num_executions=figures.num_steps if figures is not None else 0,
        last_inference_ms=model_metrics.last_ended_ms,
        num_success=sum(latency.counts),
        success_ns=int(latency.total * _NS),
        num_fail=model_metrics.finished["error"],
        queue_ns=int(queue_time.total * _NS),
        compute_ns=int(model_metrics.histograms["request_inference_time_seconds"].total * _NS),
    )
    return _entry(backend.name, str(backend.card.version), counts, [])


def index(call: Call, is_ready: bool = False) -> list[dict[str, str]]:
    """Return all versions of all models and servables; with ``is_ready`` only those that are ready."""
    entries = [
        {
            "name": version.name,
            "version": _version(version),
            "state": _STATES[version.state],
            "reason": without_folders(version.error)[:1000],
        }
        for version in call.models.list()
    ]
    if call.methods is not None:
        entries += [
            {
                "name": version.name,
                "version": version.version,
                "state": version.state,
                "reason": without_folders(version.reason)[:1000],
            }
            for version in call.methods.index()
        ]
    return [version for version in entries if version["state"] == "READY" or not is_ready]


def _version(backend: Backend) -> str:
    card = known_card(backend)
    return "" if card is None else str(card.version)
