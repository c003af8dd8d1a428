"""The servables in ``/status`` and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec

from penstock.api_errors import without_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.servables.lifecycle.loaded_version import LoadedMethod
    from penstock.servables.lifecycle.repository import ServableRepository
    from penstock.servables.lifecycle.servable import Servable

__all__ = ["ServableStatus", "metric_lines", "servable_status"]

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ServableMethodStatus(msgspec.Struct, forbid_unknown_fields=True):
    """The counts and total times of a method."""

    name: str
    num_success: _Count
    num_fail: _Count
    num_rejected: _Count
    num_cancelled: _Count
    num_instances: _Count
    num_batches: _Count
    num_batched: _Count
    queue_s: _Seconds
    compute_s: _Seconds


class ServableProcess(msgspec.Struct, forbid_unknown_fields=True):
    """A process of a servable's version."""

    pid: _Count
    runs: str
    status: str
    num_open: _Count


class ServableVersionStatus(msgspec.Struct, forbid_unknown_fields=True):
    """A version of a servable, its methods and processes."""

    version: str
    state: Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
    reason: str
    is_ready: bool
    num_open: _Count
    num_restarts: dict[str, _Count]
    methods: list[ServableMethodStatus]
    processes: list[ServableProcess]


class ServableStatus(msgspec.Struct, forbid_unknown_fields=True):
    """A servable in ``/status``."""

    name: str
    labels: dict[str, _Count]
    versions: list[ServableVersionStatus]


def servable_status(servables: ServableRepository) -> list[dict[str, Any]]:
    """Return each servable with its versions, their methods and processes, in the form of ServableStatus."""
    return [
        {
            "name": servable.name,
            "labels": dict(servable.labels),
            "versions": [_version_status(servable, number) for number in sorted(servable.states)],
        }
        for servable in servables.all()
    ]


def _version_status(servable: Servable, number: int) -> dict[str, Any]:
    state, reason = servable.states[number]
    loaded = servable.versions.get(number)
    return {
        "version": str(number),
        "state": state,
        "reason": without_folders(reason),
        "is_ready": loaded is not None and loaded.is_ready,
        "num_open": 0 if loaded is None else loaded.num_open,
        "num_restarts": {} if loaded is None else dict(loaded.deaths),
        "methods": [] if loaded is None else [_method_status(method) for method in loaded.methods.values()],
        "processes": [
            {"pid": worker.pid, "runs": worker.name, "status": worker.status, "num_open": worker.num_open}
            for worker in ([] if loaded is None else loaded.worker_states())
        ],
    }


def _method_status(method: LoadedMethod) -> dict[str, Any]:
    statistics = method.statistics
    return {
        "name": method.name,
        "num_success": statistics.num_success,
        "num_fail": statistics.num_fail,
        "num_rejected": statistics.num_rejected,
        "num_cancelled": statistics.num_cancelled,
        "num_instances": statistics.num_inferences,
        "num_batches": statistics.num_executions,
        "num_batched": sum(size * number for size, (number, _) in statistics.batch_sizes.items()),
        "queue_s": statistics.queue_ns / 1e9,
        "compute_s": statistics.compute_ns / 1e9,
    }


_COUNTERS: Final[tuple[tuple[str, str, Callable[[LoadedMethod], float]], ...]] = (
    ("instances", "Instances that succeeded.", lambda method: method.statistics.num_inferences),
    (
        "batches",
        "Batches of the counted step (the last with a model).",
        lambda method: method.statistics.num_executions,
    ),
    ("queue_seconds", "Seconds that requests waited in queues.", lambda method: method.statistics.queue_ns / 1e9),
    ("compute_seconds", "Seconds that the batches of requests ran.", lambda method: method.statistics.compute_ns / 1e9),
)


def metric_lines(servables: ServableRepository) -> Iterable[str]:
    """Return the metrics of servables in the text format of Prometheus."""
    methods = servables.list()
    name = "penstock:servable_requests_total"
    yield f"# HELP {name} Requests to methods of servables, by outcome."
    yield f"# TYPE {name} counter"
    for method in methods:
        statistics = method.statistics
        ends = {"success": statistics.num_success, "fail": statistics.num_fail, "rejected": statistics.num_rejected,
                "cancelled": statistics.num_cancelled}  # fmt: skip
        for end, count in ends.items():
            yield f'{name}{{{_labels(method)},end="{end}"}} {count}'
    for kind, note, value in _COUNTERS:
        name = f"penstock:servable_{kind}_total"
        yield f"# HELP {name} {note}"
        yield f"# TYPE {name} counter"
        for method in methods:
            yield f"{name}{{{_labels(method)}}} {value(method)}"
    name = "penstock:servable_ready"
    yield f"# HELP {name} 1 if the processes of the version are ready, otherwise 0."
    yield f"# TYPE {name} gauge"
    for servable in servables.all():
        for number, version in sorted(servable.versions.items()):
            yield f'{name}{{servable="{servable.name}",version="{number}"}} {int(version.is_ready)}'
    name = "penstock:servable_restarts_total"
    yield f"# HELP {name} Processes of stages and models that ended unexpectedly, by cause."
    yield f"# TYPE {name} counter"
    for servable in servables.all():
        for number, version in sorted(servable.versions.items()):
            for cause, count in version.deaths.items():
                yield f'{name}{{servable="{servable.name}",version="{number}",cause="{cause}"}} {count}'


def _labels(method: LoadedMethod) -> str:
    """Return the labels; names of servables and methods contain no characters that need escaping."""
    return f'method="{method.name}",version="{method.version}"'
