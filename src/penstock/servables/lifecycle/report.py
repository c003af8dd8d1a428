"""What ``/status`` and ``/metrics`` say of servables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from penstock.api_errors import without_folders
from penstock.json_schema import Choice, Entries, Flag, Items, Members, Number, Shape, Text, Whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.servables.lifecycle.loaded_version import LoadedMethod
    from penstock.servables.lifecycle.repository import Servable, Servables

__all__ = ["SERVABLE_STATUS", "metric_lines", "servable_status"]

_COUNT: Final = Whole(0, 2**63)
_SECONDS: Final = Number(0, 1e15)
_METHOD: Final[dict[str, Shape]] = {
    "name": Text(),
    "num_success": _COUNT,
    "num_fail": _COUNT,
    "num_rejected": _COUNT,
    "num_cancelled": _COUNT,
    "num_instances": _COUNT,
    "num_batches": _COUNT,
    "num_batched": _COUNT,
    "queue_s": _SECONDS,
    "compute_s": _SECONDS,
}
_PROCESS: Final[dict[str, Shape]] = {"pid": _COUNT, "runs": Text(), "status": Text(), "num_open": _COUNT}
_VERSION: Final[dict[str, Shape]] = {
    "version": Text(),
    "state": Choice(("READY", "LOADING", "UNLOADING", "UNAVAILABLE")),
    "reason": Text(),
    "is_ready": Flag(),
    "num_open": _COUNT,
    "num_restarts": Entries("[a-z]+", _COUNT, 16),
    "methods": Items(Members("ServableMethodStatus", _METHOD, tuple(_METHOD)), 0, None),
    "processes": Items(Members("ServableProcess", _PROCESS, tuple(_PROCESS)), 0, None),
}
SERVABLE_STATUS: Final = Members(
    "ServableStatus",
    {
        "name": Text(),
        "labels": Entries("[A-Za-z][A-Za-z0-9_-]*", _COUNT, 1 << 16),
        "versions": Items(Members("ServableVersionStatus", _VERSION, tuple(_VERSION)), 0, None),
    },
    ("name", "labels", "versions"),
)


def servable_status(servables: Servables) -> list[dict[str, Any]]:
    """Each servable, its versions, their methods and processes."""
    return [
        {"name": one.name, "labels": dict(one.labels), "versions": [_version(one, n) for n in sorted(one.states)]}
        for one in servables.all()
    ]


def _version(servable: Servable, number: int) -> dict[str, Any]:
    state, reason = servable.states[number]
    loaded = servable.versions.get(number)
    deaths: Counter[str] = Counter()
    for pool in () if loaded is None else loaded.pools:
        deaths.update(pool.deaths)
    return {
        "version": str(number),
        "state": state,
        "reason": without_folders(reason),
        "is_ready": loaded is not None and loaded.is_ready,
        "num_open": 0 if loaded is None else loaded.num_open,
        "num_restarts": dict(deaths),
        "methods": [] if loaded is None else [_method(one) for one in loaded.methods.values()],
        "processes": [
            {"pid": one.pid, "runs": one.name, "status": one.status, "num_open": one.num_open}
            for one in ([] if loaded is None else loaded.workers())
        ],
    }


def _method(method: LoadedMethod) -> dict[str, Any]:
    found = method.statistics
    return {
        "name": method.name,
        "num_success": found.num_success,
        "num_fail": found.num_fail,
        "num_rejected": found.num_rejected,
        "num_cancelled": found.num_cancelled,
        "num_instances": found.num_inferences,
        "num_batches": found.num_executions,
        "num_batched": sum(size * number for size, (number, _) in found.batch_sizes.items()),
        "queue_s": found.queue_ns / 1e9,
        "compute_s": found.compute_ns / 1e9,
    }


_COUNTERS: Final[tuple[tuple[str, str, Callable[[LoadedMethod], float]], ...]] = (
    ("instances", "Instances that were answered.", lambda one: one.statistics.num_inferences),
    ("batches", "Batches of the step that counts: a model, or the last.", lambda one: one.statistics.num_executions),
    ("queue_seconds", "Time that requests waited for their batches.", lambda one: one.statistics.queue_ns / 1e9),
    ("compute_seconds", "Time that requests were in batches.", lambda one: one.statistics.compute_ns / 1e9),
)


def metric_lines(servables: Servables) -> Iterable[str]:
    """In Prometheus' text format."""
    methods = servables.list()
    name = "penstock:servable_requests_total"
    yield f"# HELP {name} Requests to methods of servables, by how they ended."
    yield f"# TYPE {name} counter"
    for one in methods:
        found = one.statistics
        ends = {"success": found.num_success, "fail": found.num_fail, "rejected": found.num_rejected,
                "cancelled": found.num_cancelled}  # fmt: skip
        for end, count in ends.items():
            yield f'{name}{{{_labels(one)},end="{end}"}} {count}'
    for kind, note, value in _COUNTERS:
        name = f"penstock:servable_{kind}_total"
        yield f"# HELP {name} {note}"
        yield f"# TYPE {name} counter"
        for one in methods:
            yield f"{name}{{{_labels(one)}}} {value(one)}"
    name = "penstock:servable_ready"
    yield f"# HELP {name} 1 while the version's processes take batches."
    yield f"# TYPE {name} gauge"
    for servable in servables.all():
        for number, version in sorted(servable.versions.items()):
            yield f'{name}{{servable="{servable.name}",version="{number}"}} {int(version.is_ready)}'
    name = "penstock:servable_restarts_total"
    yield f"# HELP {name} Processes of stages and models that ended unasked, by cause."
    yield f"# TYPE {name} counter"
    for servable in servables.all():
        for number, version in sorted(servable.versions.items()):
            deaths: Counter[str] = Counter()
            for pool in version.pools:
                deaths.update(pool.deaths)
            for cause, count in deaths.items():
                yield f'{name}{{servable="{servable.name}",version="{number}",cause="{cause}"}} {count}'


def _labels(method: LoadedMethod) -> str:
    """Names of servables and methods have no character that would have to be escaped."""
    return f'method="{method.name}",version="{method.version}"'
