"""Memory planning of several workers on one machine.

The kernel counts the file pages of mapped weights as available memory, and KV pages that have not been written as free.
The primary therefore tells each worker how much of the memory that looks free belongs to other workers, and the worker
plans with the rest.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.runtime.machine import memory

if TYPE_CHECKING:
    from penstock.core.native import Plan
    from penstock.runtime.program import ProgramLimits
    from penstock.serving.proto import wire_pb2 as pb
    from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["fit_beside", "unwritten_bytes"]


def fit_beside(config: WorkerConfig) -> tuple[ProgramLimits, Plan]:
    """Return limits whose memory plan fits into what other workers leave, and the plan.

    Raises OutOfMemoryError with the figures of the plan.
    """
    from penstock.core import native
    from penstock.runtime.native import fit_limits

    machine = memory()
    # None: unknown; fit_limits handles that.
    available = max(0, machine.available - config.reserved_bytes) if machine.total else None
    context = native.Context(config.options.threads)
    try:
        model = native.Model.open(config.path)
        try:
            weights = config.options.weights
            requested = replace(config.options.limits, weights="mmap" if weights == "auto" else weights)
            limits, plan = fit_limits(model, context, requested, available)
            if weights == "auto" and available is not None and available - plan.total_bytes >= 2 * plan.weight_bytes:
                limits = replace(limits, weights="huge")
        finally:
            model.close()
    finally:
        context.close()
    return limits, plan


def unwritten_bytes(pid: int, plan: pb.Plan) -> int:
    """Return the bytes of a process's plan that the kernel does not count as used by it.

    These are mapped weights, KV pages that have not been written, and everything that is still being loaded.
    """
    used = 0
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                used = int(line.split()[1]) * 1024
    return max(plan.weight_bytes, plan.total_bytes - used)
