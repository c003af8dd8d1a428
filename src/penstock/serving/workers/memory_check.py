"""Memory planning of several workers on one machine.

The kernel counts the file pages of mapped weights as available memory, and KV pages that have not been written as free.
The primary therefore tells each worker how much of the memory that looks free belongs to other workers, and the worker
plans with the rest.  On a node of a cluster, where workers of several services may start at the same time, it plans
with its share instead.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.env import memory_share_bytes
from penstock.runtime.machine import memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.core.native import MemoryPlan
    from penstock.runtime.program import ProgramLimits
    from penstock.serving.proto import wire_pb2 as pb
    from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["fit_beside", "least_bytes", "unwritten_bytes"]

_ANY_BYTES = 1 << 60


def fit_beside(config: WorkerConfig, parts: Sequence[Path] = ()) -> tuple[ProgramLimits, list[MemoryPlan]]:
    """Return limits whose memory plan fits into what other workers leave and into its share, and the plans of ranks.

    ``parts``: the bundles of the ranks, if the model is cut already.  Raises OutOfMemoryError with the figures of the
    plan.
    """
    machine, options = memory(), config.options
    # None: unknown; the plan handles that.
    available = max(0, machine.available - config.reserved_bytes) if machine.total else None
    share = memory_share_bytes()
    if share is not None and available is not None:
        available = min(available, share)
    requested = replace(options.limits, weights="mmap" if options.weights == "auto" else options.weights)
    if options.layout.world > 1:
        from penstock.runtime.ranks.open_ranks import plan_ranks

        group = plan_ranks(
            list(parts) or Path(config.path),
            options.layout,
            threads=options.threads,
            limits=requested,
            available=available,
        )
        limits, plans = group.limits, group.plans
    else:
        limits, plans = _fit_one(config, requested, available)
    total, weights = (sum(getattr(plan, name) for plan in plans) for name in ("total_bytes", "weight_bytes"))
    if options.weights == "auto" and available is not None and available - total >= 2 * weights:
        limits = replace(limits, weights="huge")
    return limits, plans


def least_bytes(config: WorkerConfig) -> int:
    """Return the least memory with which a worker of a bundle starts: weights, buffers, states, KV pages, headroom.

    If the number of pages is left open, they hold one context, at most a short one, with which a worker still starts.
    """
    from penstock.runtime.native import HEADROOM_BYTES

    options = config.options
    limits = replace(options.limits, weights="mmap" if options.weights == "auto" else options.weights)
    if not limits.num_pages:
        limits = replace(limits, num_pages=_least_pages(config.path, limits.context_len))
    if options.layout.world > 1:
        from penstock.runtime.ranks.open_ranks import plan_ranks

        group = plan_ranks(
            Path(config.path), options.layout, threads=options.threads, limits=limits, available=_ANY_BYTES
        )
        largest = max(plan.total_bytes for plan in group.plans)  # each rank gets an equal share
        return options.layout.num_computing * (largest + HEADROOM_BYTES)
    return _fit_one(config, limits, _ANY_BYTES)[1][0].total_bytes + HEADROOM_BYTES


def _least_pages(path: str, context_len: int) -> int:
    from penstock.core import native
    from penstock.runtime.native import MIN_CONTEXT
    from penstock.runtime.program import pages_for

    with native.Model.open(path) as model:
        return pages_for(context_len or min(model.info.context_len, MIN_CONTEXT))


def _fit_one(
    config: WorkerConfig, requested: ProgramLimits, available: int | None
) -> tuple[ProgramLimits, list[MemoryPlan]]:
    from penstock.core import native
    from penstock.runtime.native import fit_limits, refuse_general_network

    context = native.Context(config.options.threads)
    try:
        model = native.Model.open(config.path)
        try:
            refuse_general_network(model.info.kind, config.path)
            limits, plan = fit_limits(model, context, requested, available)
        finally:
            model.close()
    finally:
        context.close()
    return limits, [plan]


def unwritten_bytes(pid: int, plan: pb.Plan) -> int:
    """Return the bytes of the plan of a worker that the kernel does not count as used by it and its ranks.

    These are mapped weights, KV pages that have not been written, and everything that is still being loaded.
    """
    used = 0
    for process in [pid, *_children(pid)]:
        with suppress(OSError, ValueError):
            for line in Path(f"/proc/{process}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    used += int(line.split()[1]) * 1024
    return max(plan.weight_bytes, plan.total_bytes - used)


def _children(pid: int) -> list[int]:
    child_pids: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended, or the kernel has no such file
            child_pids += map(int, file.read_text().split())
    return child_pids
