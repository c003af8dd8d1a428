"""Whether a model fits beside the others, before it is loaded.

The kernel counts the file pages of mapped weights as memory that can be had, and pages of keys and values that nobody
wrote yet as free.  So each worker is told how much of what looks free belongs to the others, and plans with the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.runtime.machine import memory

if TYPE_CHECKING:
    from penstock.core.native import Plan
    from penstock.runtime.program import ProgramLimits
    from penstock.serving.workers.worker_config import WorkerConfig

__all__ = ["fit_beside"]


def fit_beside(config: WorkerConfig) -> tuple[ProgramLimits, Plan]:
    """Limits whose plan fits into what the other workers leave, and the plan; OutOfMemoryError with its figures."""
    from penstock.core import native
    from penstock.runtime.native import fit_limits

    found = memory()
    # None: unknown, which fit_limits takes care of.
    available = max(0, found.available - config.reserved_bytes) if found.total else None
    context = native.Context(config.options.threads)
    try:
        model = native.Model.open(config.path)
        try:
            chosen = config.options.weights
            asked = replace(config.options.limits, weights="mmap" if chosen == "auto" else chosen)
            limits, plan = fit_limits(model, context, asked, available)
            if chosen == "auto" and available is not None and available - plan.total_bytes >= 2 * plan.weight_bytes:
                limits = replace(limits, weights="huge")
        finally:
            model.close()
    finally:
        context.close()
    return limits, plan
