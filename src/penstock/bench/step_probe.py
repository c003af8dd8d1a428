"""Times real steps at the shapes of a model, without its weights, and scales them to the whole model.

A model of which all weights are quickly read is measured whole.  A larger one is cut to some of its layers, and its
prompt may be shortened; the measured time then grows as the roofline of the steps does, so that what is assumed is only
that the share of the roofline that the kernels reach stays the same from layer to layer.  The engine's own time per
step is measured apart, because it does not grow with the model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from penstock.bench.measure import EngineSteps, MachineLimits
from penstock.bench.node_costs import StepSize
from penstock.bench.step_batch import make_step
from penstock.bench.weightless import Bound, Machine, Weightless
from penstock.core import native
from penstock.core.native import StepBatch
from penstock.graph.ir import Graph
from penstock.graph.without_weights import cut_layers, num_layers
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits, pages_for

__all__ = ["Expectation", "Measured", "Workload", "expect", "machine_of", "probe_steps", "seconds_of"]

STEP_TOKENS = 512
_SHORT_PROMPT = 8
_MAX_STEPS, _MIN_STEPS = 96, 5
_RUN_STEPS, _SHORT_STEP_S = 8, 0.005
"""Steps shorter than 5 ms are measured in runs of 8, because Python and caches are a visible part of them."""
_PREFILL_RUNS = 3
_MIN_PROMPT = 32
_MAX_PROBE_BYTES = 3 << 29
_FILL_BYTES_PER_S = 1e9
"""The approximate rate at which the kernel makes the zeroed pages of a hole."""
_USUAL_SHARE = 0.67
"""The approximate share of the roofline that steps reach.  It decides how much is measured."""


@dataclass(frozen=True)
class Workload:
    """Requests of ``prompt_tokens`` and ``new_tokens``, of which ``concurrency`` run at once."""

    prompt_tokens: int
    new_tokens: int
    concurrency: int

    def limits(self, num_requests: int, kv_layout: str) -> ProgramLimits:
        """Return the limits of a program that runs so many of these requests at once, as a service has them."""
        return ProgramLimits(
            max_tokens=max(STEP_TOKENS, num_requests),
            max_requests=num_requests,
            context_len=self.prompt_tokens + self.new_tokens,
            kv_layout=kv_layout,
        )

    def prefill(self) -> list[StepSize]:
        """Return the steps of one prompt; the last one computes logits."""
        firsts = range(0, self.prompt_tokens, STEP_TOKENS)
        width = pages_for(self.prompt_tokens + self.new_tokens)
        lens = [min(STEP_TOKENS, self.prompt_tokens - at) for at in firsts]
        return [StepSize((at,), (n,), width, int(at == firsts[-1])) for at, n in zip(firsts, lens, strict=True)]

    def decode(self, batch: int) -> StepSize:
        """Return a step of one token for each of ``batch`` requests, in the middle of their answers."""
        context = self.prompt_tokens + self.new_tokens // 2
        return StepSize((context,) * batch, (1,) * batch, pages_for(self.prompt_tokens + self.new_tokens), batch)


@dataclass(frozen=True)
class Measured:
    """A measured phase: its seconds in the core and in the engine's loop, and the roofline of what was measured."""

    native_s: float
    engine_s: float
    bound: Bound


@dataclass(frozen=True)
class Expectation:
    """The expected time of a phase, in seconds, and its roofline.

    ``native_s`` is the part in the core, ``engine_s`` that of the engine's loop in Python.  ``share_of_limit`` is the
    share of the roofline that ``native_s`` reaches; above 1 data comes from CPU caches.
    """

    seconds: float
    native_s: float
    engine_s: float
    bound: Bound

    @property
    def share_of_limit(self) -> float:
        """The least seconds over those in the core."""
        return self.bound.seconds / self.native_s if self.native_s > 0 else 0.0


def seconds_of(expectation: Expectation | None) -> float | None:
    """Return the expected seconds, None if nothing was measured."""
    return None if expectation is None else expectation.seconds


def expect(whole: Bound, measured: Measured, engine_steps: int = 1) -> Expectation:
    """Scale a measurement to the whole model: the core's time as the rooflines, the engine's as the number of steps."""
    native_s = measured.native_s * whole.seconds / measured.bound.seconds
    engine_s = measured.engine_s * engine_steps
    return Expectation(native_s + engine_s, native_s, engine_s, whole)


def machine_of(context: native.Context) -> Machine:
    """Measure the limits of this machine: half a second."""
    peaks = MachineLimits(context)
    peaks.probe_bandwidth()
    peaks.probe_compute()
    peaks.probe_bandwidth()
    return Machine(context.cpu_level, context.num_threads, max(peaks.bandwidths), peaks.ops_per_s)


@dataclass(frozen=True)
class StepProbe:
    """The measurements of a scheme: the first token of a prompt, and a decode step by batch size.

    ``num_layers`` and ``prompt_tokens`` were measured, of a model that may have more.
    """

    num_layers: int
    prompt_tokens: int
    prefill: Measured
    decode: dict[int, Measured]


def probe_steps(
    graph: Graph, folder: Path, work: Workload, kv_layout: str, machine: Machine, seconds: float
) -> StepProbe:
    """Measure steps of a graph whose scheme is assigned, in about ``seconds``; ``folder`` takes temporary files."""
    cut, smaller = _cut(graph, folder, work, kv_layout, machine, seconds)
    try:
        return _Prober(cut, smaller, kv_layout, machine).probe(work, seconds)
    finally:
        cut.close()


def _cut(
    graph: Graph, folder: Path, work: Workload, kv_layout: str, machine: Machine, seconds: float
) -> tuple[Weightless, Workload]:
    """Return as many layers, and as long a prompt, as can be measured in the time."""
    count = num_layers(graph)
    while True:
        model = Weightless(folder / "probe.psm", cut_layers(graph, count))
        with native.Context(machine.num_threads, machine.cpu_level) as context:
            plan = model.plan(context, work.limits(work.concurrency, kv_layout))
        needed = plan.weight_bytes / _FILL_BYTES_PER_S
        for times, steps in (
            (2, work.prefill()),
            (2 * _MIN_STEPS, [work.decode(batch) for batch in {1, work.concurrency}]),
        ):
            least = model.bound(steps, plan.kv_page_bytes, kv_layout, machine).seconds
            needed += times * least / _USUAL_SHARE
        is_small = count <= 2 and work.prompt_tokens <= _MIN_PROMPT
        if is_small or (needed <= seconds and plan.weight_bytes <= _MAX_PROBE_BYTES):
            return model, work
        model.close()
        if count > 2:
            count = max(2, count // 2)
        else:
            shorter = max(_MIN_PROMPT, work.prompt_tokens // 2)
            work = Workload(shorter, work.new_tokens + work.prompt_tokens - shorter, work.concurrency)


class _Prober:
    """Runs the engine's loop and native steps on one program."""

    def __init__(self, model: Weightless, work: Workload, kv_layout: str, machine: Machine) -> None:
        self.model, self.work, self.kv_layout, self.machine = model, work, kv_layout, machine

    def probe(self, work: Workload, seconds: float) -> StepProbe:
        """Measure for about ``seconds``; decode steps have the context of ``work``."""
        batches = {1, work.concurrency}
        context_len = max(work.prompt_tokens + work.new_tokens, _SHORT_PROMPT + _MAX_STEPS + work.concurrency + 2)
        context_len = min(context_len, self.model.model.info.context_len)
        limits = ProgramLimits(
            max_tokens=max(STEP_TOKENS, work.concurrency),
            max_requests=work.concurrency,
            num_pages=(pages_for(context_len) + 1) * work.concurrency,
            context_len=context_len,
            kv_layout=self.kv_layout,
        )
        begin = time.monotonic()
        program, _ = NativeProgram.open(self.model.path, threads=self.machine.num_threads, limits=limits)
        try:
            for state in range(program.model.info.num_states):
                program.core_program.kv(state)[:] = 0  # memory that was never written reads faster, from one zero page
            engine = EngineSteps(program)
            engine.prefill(self.work.prompt_tokens)  # makes the pages of the hole, and raises clock speeds
            runs: list[float] = []
            while not runs or (len(runs) < _PREFILL_RUNS and time.monotonic() - begin < seconds * 0.5):
                runs.append(engine.prefill(self.work.prompt_tokens))
            seconds_each = max(0.0, seconds - (time.monotonic() - begin)) / len(batches)
            decode = {batch: self._decode(program, engine, batch, seconds_each) for batch in sorted(batches)}
        finally:
            program.close()
        steps = self.work.prefill()
        engine_s = decode[1].engine_s
        first = max(0.0, statistics.median(runs) - engine_s * len(steps))
        return StepProbe(
            num_layers(self.model.graph),
            self.work.prompt_tokens,
            Measured(first, engine_s, self._bound(program, steps)),
            decode,
        )

    def _bound(self, program: NativeProgram, sizes: Sequence[StepSize]) -> Bound:
        plan = program.info.plan
        return self.model.bound(sizes, plan.kv_page_bytes if plan is not None else 0, self.kv_layout, self.machine)

    def _decode(self, program: NativeProgram, engine: EngineSteps, batch: int, seconds: float) -> Measured:
        """Measure a decode step: in the core, and what the engine adds to an equal step.

        Runs of the three steps alternate, so that a change of the machine's speed meets them alike.
        """
        size = self.work.decode(batch)
        requests = engine.start(batch, min(_SHORT_PROMPT, self.work.prompt_tokens))
        short = StepSize((requests[0].num_tokens,) * batch, (1,) * batch, size.width, batch)
        random = np.random.default_rng(0)
        steps = [make_step(program.info, step_size, random).batch for step_size in (short, size)]
        kinds: list[Callable[[], float]] = [engine.step, *(partial(_timed, program, step) for step in steps)]
        run_len = _RUN_STEPS if engine.step() < _SHORT_STEP_S else 1
        room = program.info.context_len - max(request.num_tokens for request in requests) - 2
        times: list[list[float]] = []
        begin = time.monotonic()
        while (len(times) + 1) * run_len <= min(_MAX_STEPS, room) and (
            len(times) < _MIN_STEPS or time.monotonic() - begin < seconds
        ):
            # The first step of a run starts with another step's cache contents, so it is not counted.
            runs = [[kind() for _ in range(run_len)] for kind in kinds]
            times.append([statistics.median(run[1:] or run) for run in runs])
        engine.abort(requests)
        in_engine = statistics.median(whole - equal for whole, equal, _ in times)
        native_s = statistics.median(row[2] for row in times)
        return Measured(native_s, max(0.0, in_engine), self._bound(program, [size]))


def _timed(program: NativeProgram, batch: StepBatch) -> float:
    begin = time.perf_counter()
    program.run(batch)
    return time.perf_counter() - begin
