"""The profile of a running service: a worker records the spans of some of its steps while it answers requests.

The worker records (``StepRecorder``), at a cost that stays a small share of the time.  A process of its own, of low
priority, reads the graph and makes the tables (``report_of``): in the worker that would hold the interpreter's lock
while steps wait for it.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock import env
from penstock.bench.node_costs import StepSize
from penstock.bench.phase_report import PhaseReport, ProfiledProgram, ProfileReport, compare_with_limits, rows_by_kind
from penstock.bench.span_totals import add_up_spans
from penstock.core import native, spans
from penstock.errors import InternalError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.runtime.program import PAGE_TOKENS

if TYPE_CHECKING:
    from penstock.core.arrays import StepBatch
    from penstock.runtime.native import NativeProgram

__all__ = ["MAX_SECONDS", "MAX_STEPS", "StepRecorder", "describe_program", "measure_limits", "report_from", "report_of"]

_Result = TypeVar("_Result")
MAX_STEPS: Final = 1000
"""The spans of all recorded steps stay in the worker's memory until the last one; see ``_MAX_SPAN_BYTES``."""
MAX_SECONDS: Final = 600.0
KINDS: Final = ("prefill", "mixed", "decode")
_SHARE: Final = 0.01
"""Share of the time that recording may take: a step is not recorded while the recorded ones have cost more.  Counting
the other steps takes some microseconds each and is not part of it, or steps of 0.2 ms would never be recorded."""
_RECORDING_SHARE: Final = 0.05
"""Share of a step that the core spends on its spans, at most: 2 to 4 % of the demo model's steps."""
_MAX_SPAN_BYTES: Final = 64 << 20
"""Recording ends once the spans take so much, 40 bytes for each phase of an op and thread."""
_PROBE_BYTES, _PROBE_PASSES = 96 << 20, 3  # the worker's memory is planned without a larger buffer
_REPORT_S: Final = 120.0
_NICE: Final = 19


@dataclasses.dataclass(frozen=True)
class RecordedStep:
    """One step: its kind and size, nanoseconds of the whole call, and spans."""

    kind: str
    size: StepSize
    wall_ns: int
    spans: NDArray[np.void]


class StepRecorder:
    """Records spans of some steps of a program; ``NativeProgram.recorder`` calls it in the thread of the steps.

    ``on_done`` is called once in that thread when ``num_steps`` are recorded, or so many that their spans fill the
    memory for them, or when recording fails, which ``error`` then says.  No step fails because it is recorded.
    """

    def __init__(self, program: NativeProgram, num_steps: int, on_done: Callable[[], object]) -> None:
        self.recorded: list[RecordedStep] = []
        self.plain: dict[str, tuple[int, int]] = {}
        """For each kind, the number of the steps that were not recorded, and the sum of their nanoseconds."""
        self.error: Exception | None = None
        self.program = program
        self._num_bytes = 0
        self._is_over = False
        self._num_steps = num_steps
        self._on_done = on_done
        self._begin_ns = time.perf_counter_ns()
        self._spent_ns = 0.0

    def record(self, batch: StepBatch, call: Callable[[], _Result]) -> _Result:
        """Run a step, and record it if that costs no more than its share of the time."""
        if self._is_over:
            return call()
        entered = time.perf_counter_ns()
        is_due = self._spent_ns <= _SHARE * (entered - self._begin_ns) and self._guard(self._switch, True)
        begin = time.perf_counter_ns()
        try:
            result = call()
            wall_ns = time.perf_counter_ns() - begin
            self._guard(self._note, batch, wall_ns, is_due)
        finally:
            if is_due:
                self._guard(self._switch, False)
        if is_due:
            self._spent_ns += time.perf_counter_ns() - entered - wall_ns + _RECORDING_SHARE * wall_ns
        if self._is_over:
            self._on_done()
        return result

    def _guard(self, function: Callable[..., object], *arguments: object) -> bool:
        """Call a part of the recording; if it fails, recording is over.  Returns True if it did not fail."""
        try:
            function(*arguments)
        except Exception as error:
            self.error, self._is_over = self.error or error, True
            return False
        return True

    def _switch(self, is_on: bool) -> None:
        spans.set_profiling(self.program.core_program, is_on)

    def _note(self, batch: StepBatch, wall_ns: int, is_due: bool) -> None:
        kind = _kind_of(batch)
        if not is_due:
            number, total_ns = self.plain.get(kind, (0, 0))
            self.plain[kind] = (number + 1, total_ns + wall_ns)
            return
        recorded_spans = spans.last_spans(self.program.core_program)
        self.recorded.append(RecordedStep(kind, _size_of(batch), wall_ns, recorded_spans))
        self._num_bytes += recorded_spans.nbytes
        if len(self.recorded) >= self._num_steps or self._num_bytes >= _MAX_SPAN_BYTES:
            self._is_over = True


def _size_of(batch: StepBatch) -> StepSize:
    starts = batch.positions[batch.request_starts[:-1]]
    lens = np.diff(batch.request_starts)
    width = int(batch.page_tables.shape[2]) if batch.page_tables.ndim == 3 else 0
    return StepSize(tuple(starts.tolist()), tuple(lens.tolist()), width, len(batch.output_rows))


def _kind_of(batch: StepBatch) -> str:
    """Return "decode" if each request has one token, "prefill" if none has, else "mixed"."""
    if len(batch.token_ids) == len(batch.request_starts) - 1:  # most steps; the rest takes some microseconds
        return "decode"
    return "mixed" if 1 in np.diff(batch.request_starts) else "prefill"


def describe_program(program: NativeProgram, limits: Mapping[str, float]) -> dict[str, Any]:
    """Return what the report says of a program; ``limits`` as of ``measure_limits``, or empty."""
    info, plan = program.info, program.info.plan
    return {
        "bundle": str(program.path),
        "network": info.network,
        "scheme": info.scheme,
        "cpu_level": info.cpu_level,
        "num_threads": info.num_threads,
        "kv_cache": program.limits.kv_layout,
        "weights": program.limits.weights,
        "populate_s": program.populate_s,
        "kv_token_bytes": plan.kv_page_bytes / PAGE_TOKENS if plan is not None else 0.0,
        "wanted_only": [node.wanted_only for node in spans.node_infos(program.model)],
        "limits": dict(limits),
    }


def measure_limits(program: NativeProgram) -> dict[str, float]:
    """Measure the peaks and the bandwidth of a program's threads, which takes them for about half a second."""
    from penstock.bench.measure import MachineLimits

    limits = MachineLimits(program.context)
    limits.probe_compute(0.05)
    bandwidth = max(native.probe_bandwidth(program.context, _PROBE_BYTES, _PROBE_PASSES) for _ in range(2))
    return {"memory": bandwidth, **limits.ops_per_s}


def report_of(recorder: StepRecorder, about: Mapping[str, Any]) -> bytes:
    """Return the report of what was recorded, as JSON.  Waits for the process that makes it.

    Raises UnsupportedError if the bundle's file is not there any more, InternalError if the process fails, and the
    error that ended the recording.
    """
    if recorder.error is not None:
        raise recorder.error
    if not Path(about["bundle"]).is_file():
        raise UnsupportedError("The bundle's file is not there any more, so its ops cannot be named. Load it again.")
    buffer = io.BytesIO()
    recorded = recorder.recorded
    arrays = {f"spans{number}": step.spans for number, step in enumerate(recorded)}
    steps = [(step.kind, dataclasses.astuple(step.size), step.wall_ns) for step in recorded]
    text = json.dumps({**about, "steps": steps, "plain": recorder.plain})
    np.savez(buffer, allow_pickle=False, about=np.frombuffer(text.encode(), np.uint8), **arrays)
    result = subprocess.run(
        [sys.executable, "-m", "penstock.bench.live_profile"],
        input=buffer.getvalue(),
        capture_output=True,
        env=env.child_environment(),
        timeout=_REPORT_S,
        check=False,
    )
    if result.returncode != 0:
        raise InternalError(f"The report failed: {result.stderr.decode(errors='replace')[-500:]}")
    return result.stdout


def main() -> int:
    """Read what ``report_of`` sends, and print the report."""
    os.nice(_NICE)
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as arrays:
        about = json.loads(arrays["about"].tobytes())
        recorded = [
            RecordedStep(kind, StepSize(tuple(size[0]), tuple(size[1]), *size[2:]), wall_ns, arrays[f"spans{number}"])
            for number, (kind, size, wall_ns) in enumerate(about["steps"])
        ]
    sys.stdout.write(json.dumps(_to_json(_report(about, recorded))))
    return 0


def _report(about: dict[str, Any], recorded: Sequence[RecordedStep]) -> ProfileReport:
    graph = read_graph(about["bundle"])[0]
    program = ProfiledProgram(
        graph, about["kv_cache"], about["cpu_level"], about["kv_token_bytes"], about["wanted_only"]
    )
    phases = []
    for kind in KINDS:
        own = [step for step in recorded if step.kind == kind]
        if own:
            phases.append(_phase(kind, program, own, about["plain"].get(kind, (0, 0)), about["limits"]))
    names = ("network", "scheme", "cpu_level", "num_threads", "kv_cache", "weights", "populate_s")
    return ProfileReport(**{name: about[name] for name in names}, phases=phases)


def _phase(
    kind: str, program: ProfiledProgram, own: Sequence[RecordedStep], plain: tuple[int, int], limits: dict[str, float]
) -> PhaseReport:
    passes = [add_up_spans([(float(step.wall_ns), step.spans)], len(program.graph.nodes)) for step in own]
    counts = Counter(run.threads for run in passes)
    threads = max(counts, key=lambda number: (counts[number], number))
    alike = [(step, run) for step, run in zip(own, passes, strict=True) if run.threads == threads]
    by_time = sorted(alike, key=lambda pair: pair[1].wall)
    nodes, between = program.rows([step.size for step, _ in alike], [run for _, run in alike])
    for row in nodes:  # sums over the steps become means
        row.num_bytes /= len(alike)
        row.num_ops /= len(alike)
        row.calls = min(row.calls, 1)
    sizes = [step.size for step, _ in alike]
    report = PhaseReport(
        phase=kind,
        num_tokens=round(statistics.fmean(size.num_tokens for size in sizes)),
        num_requests=round(statistics.fmean(len(size.lens) for size in sizes)),
        context=round(statistics.fmean(start for size in sizes for start in size.starts)),
        num_steps=1,
        step_threads=threads,
        passes=len(own),
        alike=len(alike),
        wall_s=statistics.fmean(run.wall for _, run in alike) * 1e-9,
        plain_s=plain[1] / plain[0] * 1e-9 if plain[0] else 0.0,
        read_bytes_per_s=limits.get("memory", 0.0),
        ops_per_s={name: value for name, value in limits.items() if name != "memory"},
        kinds=rows_by_kind(program.graph, nodes),
        nodes=nodes,
        between=between,
        fused=dict(Counter(row.op for row in nodes if not row.calls)),
        spans=by_time[len(by_time) // 2][1].spans,
        seen=len(own) + plain[0],
    )
    if limits:
        for row in [*report.kinds, *report.nodes]:
            compare_with_limits(row, report)
    return report


def _to_json(report: ProfileReport) -> dict[str, Any]:
    phases = []
    for phase in report.phases:
        rows = {name: [dataclasses.asdict(row) for row in getattr(phase, name)] for name in ("kinds", "nodes")}
        phases.append({**vars(phase), **rows, "spans": [step.tolist() for step in phase.spans]})
    return {**vars(report), "phases": phases}


def report_from(fields: Mapping[str, Any]) -> ProfileReport:
    """Return the report of a service's answer."""
    from penstock.bench.phase_report import Row

    phases = []
    for phase in fields["phases"]:
        rows = {name: [Row(**row) for row in phase[name]] for name in ("kinds", "nodes")}
        steps = [np.array([tuple(span) for span in step], spans.SPAN) for step in phase["spans"]]
        phases.append(PhaseReport(**{**phase, **rows, "spans": steps}))
    names = [field.name for field in dataclasses.fields(ProfileReport)]
    return ProfileReport(**{**{name: fields[name] for name in names}, "phases": phases})


if __name__ == "__main__":
    sys.exit(main())
