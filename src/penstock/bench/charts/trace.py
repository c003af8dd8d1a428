"""Converts a profile to a Chrome trace for https://ui.perfetto.dev or chrome://tracing.

Format: "Trace Event Format", Google, 2016.  A trace has a process per phase and a track per thread; times are in
microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from penstock.bench.phase_report import PhaseReport, ProfileReport

__all__ = ["chrome_trace"]


def chrome_trace(report: ProfileReport) -> dict[str, Any]:
    """Return the trace of the steps of each phase's median pass, with ops and waits."""
    events: list[dict[str, Any]] = []
    for process, phase in enumerate(report.phases, 1):
        events.append(_name(process, 0, "process_name", f"{phase.phase} ({report.network}, {report.scheme})"))
        events.append(_name(process, 0, "thread_name", "step"))
        threads = sorted({int(thread) for step_spans in phase.spans for thread in np.unique(step_spans["thread"])})
        events += [_name(process, thread + 1, "thread_name", f"thread {thread}") for thread in threads]
        events += _events(process, phase)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _name(process: int, track: int, kind: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": track, "name": kind, "args": {"name": name}}


def _events(process: int, phase: PhaseReport) -> list[dict[str, Any]]:
    zero = int(phase.spans[0]["begin_ns"][0])

    def event(track: int, name: str, category: str, begin: int, end: int, args: dict[str, Any]) -> dict[str, Any]:
        times = {"ts": (begin - zero) / 1e3, "dur": (end - begin) / 1e3}
        return {"ph": "X", "pid": process, "tid": track, "name": name, "cat": category, **times, "args": args}

    events = []
    for number, step_spans in enumerate(phase.spans):
        for node, part, thread, _, arrive, begin, end in step_spans.tolist():
            if node < 0:
                events.append(event(0, f"step {number}", "step", begin, end, {}))
                continue
            row = phase.nodes[node]
            if begin > arrive:
                events.append(event(thread + 1, "wait", "wait", arrive, begin, {"before": row.name}))
            args = {
                "op": row.op,
                "phase": part,
                "bytes": row.num_bytes / phase.num_steps,
                "operations": row.num_ops / phase.num_steps,
            }
            name = row.name if row.name.endswith(row.op) else f"{row.op} {row.name}"
            events.append(event(thread + 1, name, row.op, begin, end, {**args, "node": node}))
    return events
