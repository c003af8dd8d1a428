"""Says in words what limits a measured phase, how far it is from that limit, and what to try."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from penstock.bench.measure import ABOVE_LIMIT, Report
from penstock.bench.phase_report import PhaseReport
from penstock.quant.scheme import rounds_to_int8

__all__ = ["cache_bytes", "describe_bench", "describe_phase", "in_caches"]

_NEAR: Final = 0.6
_LONG_WAIT: Final = 0.2
_WAIT: Final = "waiting for other threads"


def cache_bytes() -> int:
    """Return the size of the largest CPU cache; 0 if the system does not say."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)


def in_caches(num_bytes: int) -> str:
    """Explain why ``num_bytes`` were read faster than memory."""
    size = f"{num_bytes / 1e6:,.1f} MB per token"
    if 0 < cache_bytes() < num_bytes:
        return f"faster than memory was when it was probed ({size}); measure again on a quiet machine"
    return f"faster than memory: {size} fit into the CPU caches"


def describe_bench(report: Report) -> list[str]:
    """Return a sentence for prefill and one for each batch size of decode."""
    shares: dict[int, float] = report.share_of_limit["decode"]
    peak = report.limits["prefill_peak"]
    lines = [f"prefill: {_sentence(report.share_of_limit['prefill'], peak, report.scheme)}"]
    for batch, share in shares.items():
        if share > ABOVE_LIMIT:
            text = f"{in_caches(report.weight_bytes_per_token)}. Memory does not limit this model."
        else:
            text = _sentence(share, report.decode_bound[batch], report.scheme)
        lines.append(f"decode, batch {batch}: {text}")
    return lines


def describe_phase(phase: PhaseReport, scheme: str) -> str:
    """Return one or two sentences about a profiled phase."""
    needed: dict[str, float] = {}
    for row in phase.kinds:
        needed[row.limit] = needed.get(row.limit, 0.0) + row.share_of_limit * row.busy_seconds
    bound = max(needed, key=lambda name: needed[name])
    share = sum(needed.values()) / phase.wall_s
    if bound == "memory" and share > ABOVE_LIMIT:
        text = "faster than memory: the data fits into the CPU caches, so memory does not limit this phase."
    else:
        text = _sentence(min(share, 1.0), bound, scheme)
    wait = phase.between.get(_WAIT, 0.0) / phase.wall_s
    if wait >= _LONG_WAIT:
        text += (
            f" Threads wait for each other {wait:.0%} of the time, usually because other processes use the cores (load "
            f"{os.getloadavg()[0]:.1f}); stop those, or try fewer --threads."
        )
    return f"{phase.phase}: {text}"


def _sentence(share: float, bound: str, scheme: str) -> str:
    """Return what limits a phase that reaches ``share`` of ``bound``, "memory" or the type of an arithmetic peak."""
    limit = "memory bandwidth" if bound == "memory" else f"{bound} arithmetic"
    if share < _NEAR:
        hint = "`penstock profile` shows what takes the rest"
        return f"the nearest limit is {limit}, of which it reaches only {share:.0%}; {hint}."
    return f"limited by {limit}, of which it reaches {share:.0%}. {_advice(bound, scheme)}"


def _advice(bound: str, scheme: str) -> str:
    if bound != "memory":
        if rounds_to_int8(scheme):
            return "More cores (--threads) would help."
        return "Export with --scheme w8a8, which multiplies int8 numbers, or use more cores (--threads)."
    if scheme.startswith(("w4", "q4")):
        return "Answer more requests at once (--batch), which share each read of the weights."
    smaller = "w4a8" if scheme.startswith("w8") else "w8a8 or w4a8"
    return f"Export with --scheme {smaller} to read fewer bytes per token, or answer more requests at once (--batch)."
