"""Measures where the time of a step goes, op by op, and compares each op with the limits of the machine.

Steps run on the program without the engine's loop: prompts of random tokens, and decode steps after a context.  The
spans that the core records are added up, so that the rows of a table are the complete time of the step: work per op,
waits for other threads, time between ops, and the call into the core.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.measure import MachineLimits
from penstock.bench.node_costs import StepSize
from penstock.bench.open_model import BenchModel, check_size, open_model
from penstock.bench.phase_report import PhaseReport, ProfiledProgram, ProfileReport, compare_with_limits, rows_by_kind
from penstock.bench.span_totals import Pass, add_up_spans
from penstock.bench.step_batch import StepArrays, make_step
from penstock.core import native, spans
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits, pages_for
from penstock.validation import refusal

__all__ = ["PHASES", "Profile", "profile"]

PHASES = ("prefill", "decode")
STEP_TOKENS = 512
_PROMPT_TOKENS, _CONTEXT = 512, 128
_MAX_STEPS = 10_000
_WARM_PASSES = 2
_SECONDS = 1.0
"""The duration of the passes if ``steps`` is 0."""


@dataclass(frozen=True)
class Profile(BenchModel):
    """Settings of a profile.

    ``prompt_tokens`` None is 512 and ``context`` None is 128, or as many as the model's context holds.  ``steps`` 0 is
    as many passes as fit into one second, at least three.
    """

    phases: tuple[str, ...] = PHASES
    prompt_tokens: int | None = None
    context: int | None = None
    batch: int = 1
    kv_cache: str = "auto"
    weights: str = "mmap"
    steps: int = 0

    def __post_init__(self) -> None:
        """Check the sizes and the phases."""
        minimums = {"prompt_tokens": 1, "context": 0, "batch": 1, "steps": 0}
        for name, minimum in minimums.items():
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), minimum)
        if self.steps > _MAX_STEPS:  # the spans of all passes are kept until the median is known
            raise InvalidArgumentError(f"steps: expected at most {_MAX_STEPS:,}, got {self.steps:,}", param="steps")
        if not self.phases or any(phase not in PHASES for phase in self.phases):
            raise refusal("phases", f"some of {', '.join(PHASES)}", self.phases)


def profile(settings: Profile, progress: Callable[[Any], None] | None = None) -> ProfileReport:
    """Profile a bundle or a checkpoint folder.

    Raises InvalidArgumentError if the sizes do not fit the model, UnsupportedError for several ranks, and the errors of
    ``open_program``.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        if getattr(settings, name) != 1:
            raise UnsupportedError(f"{name}: expected 1 for a profile, got {getattr(settings, name)!r:.20}", param=name)
    num_prompt, num_context = _sizes(settings, None)
    longest = _longest(settings, num_prompt, num_context)
    limits = ProgramLimits(
        max_tokens=max(min(STEP_TOKENS, longest), settings.batch),
        max_requests=settings.batch,
        num_pages=pages_for(longest) * settings.batch,
        context_len=longest,
        kv_layout=settings.kv_cache,
        weights=settings.weights,
    )
    with open_model(settings, limits, "profile", progress) as (opened, program, graph):
        settings, max_len = _possible(settings, program), program.info.context_len
        num_prompt, num_context = _sizes(settings, max_len)
        if _longest(settings, num_prompt, num_context) > max_len:
            is_prompt = "prefill" in settings.phases and num_prompt > max_len
            sizes = f"prompt_tokens {num_prompt}" if is_prompt else f"context {num_context} plus one token"
            raise InvalidArgumentError(
                f"{sizes} is more than the model's context of {max_len} tokens",
                param="prompt_tokens" if is_prompt else "context",
            )
        return _Profiler(settings, program, graph, pages_for(longest)).report(opened.populate_s)


def _possible(settings: Profile, program: NativeProgram) -> Profile:
    """Return the settings without the phase decode by default, if a network's prompt has to run in one step.

    Raises UnsupportedError for settings of that phase.
    """
    if not program.info.whole_prompts or "decode" not in settings.phases:
        return settings
    for name, is_set in (("batch", settings.batch != 1), ("context", settings.context is not None)):
        if is_set or settings.phases == ("decode",):
            raise UnsupportedError(
                f"{name if is_set else 'phase'}: expected prefill only, because attention to both sides needs a prompt "
                "in one step",
                param=name if is_set else "phase",
            )
    return replace(settings, phases=("prefill",))


def _sizes(settings: Profile, context_len: int | None) -> tuple[int, int]:
    """Return the tokens of the prompt and of the context: as set, or the defaults limited by the model's context."""
    limit = _PROMPT_TOKENS if context_len is None else context_len
    num_prompt = min(_PROMPT_TOKENS, limit) if settings.prompt_tokens is None else settings.prompt_tokens
    num_context = min(_CONTEXT, limit - 1) if settings.context is None else settings.context
    return num_prompt, num_context


def _longest(settings: Profile, num_prompt: int, num_context: int) -> int:
    return max(num_prompt if "prefill" in settings.phases else 1, num_context + 1 if "decode" in settings.phases else 1)


class _Profiler:
    def __init__(self, settings: Profile, program: NativeProgram, graph: Graph, width: int) -> None:
        self.settings, self.program, self.graph, self.width = settings, program, graph, width
        self.num_prompt, self.num_context = _sizes(settings, program.info.context_len)
        self.random = np.random.default_rng(0)
        plan = program.info.plan
        self.profiled = ProfiledProgram(
            graph,
            program.limits.kv_layout,
            program.info.cpu_level,
            plan.kv_page_bytes / PAGE_TOKENS if plan is not None else 0.0,
            [node.wanted_only for node in spans.node_infos(program.model)],
        )
        self.peaks = MachineLimits(program.context)
        self.fewer: dict[int, dict[str, float]] = {}  # the highest peaks of all phases, by number of threads

    def report(self, populate_s: float) -> ProfileReport:
        info = self.program.info
        phases = [self._phase(phase) for phase in PHASES if phase in self.settings.phases]
        for phase in phases:  # the peaks of all phases are known now
            for row in [*phase.kinds, *phase.nodes]:
                compare_with_limits(row, phase)
        return ProfileReport(
            info.network, info.scheme, info.cpu_level, info.num_threads, self.program.limits.kv_layout,
            self.settings.weights, populate_s, phases,
        )  # fmt: skip

    def _phase(self, phase: str) -> PhaseReport:
        steps = self._prompt(self.num_prompt) if phase == "prefill" else self._decode()
        bandwidth = _probe(self.peaks)
        passes, plain = self._passes(steps)
        bandwidth, ops_per_s = max(bandwidth, _probe(self.peaks)), self.peaks.ops_per_s
        counts = Counter(run.threads for run in passes)
        threads = max(counts, key=lambda number: (counts[number], number))
        if threads < self.program.info.num_threads:  # the step is too short for all threads
            with native.Context(threads, self.program.info.cpu_level) as context:
                peaks = MachineLimits(context)
                bandwidth = max(_probe(peaks), _probe(peaks))
            ops_per_s = self.fewer.setdefault(threads, peaks.ops_per_s)
            for name, value in peaks.ops_per_s.items():
                ops_per_s[name] = max(ops_per_s[name], value)
        middle_passes = sorted((run for run in passes if run.threads == threads), key=lambda run: run.wall)
        quarter = len(middle_passes) // 4
        middle_passes = middle_passes[quarter : len(middle_passes) - quarter]
        nodes, between = self.profiled.rows([step.size for step in steps], middle_passes)
        first, middle = steps[-1].size, middle_passes[len(middle_passes) // 2]
        return PhaseReport(
            phase=phase,
            num_tokens=sum(step.size.num_tokens for step in steps),
            num_requests=len(first.lens),
            context=self.num_context if phase == "decode" else 0,
            num_steps=len(steps),
            step_threads=threads,
            passes=len(passes),
            alike=counts[threads],
            wall_s=statistics.fmean(run.wall for run in middle_passes) * 1e-9,
            plain_s=statistics.median(plain) * 1e-9,
            read_bytes_per_s=bandwidth,
            ops_per_s=ops_per_s,
            kinds=rows_by_kind(self.graph, nodes),
            nodes=nodes,
            between=between,
            fused=dict(Counter(row.op for row in nodes if not row.calls)),
            spans=middle.spans,
        )

    def _batch(self, starts: Sequence[int], lens: Sequence[int], num_rows: int) -> StepArrays:
        return make_step(self.program.info, StepSize(tuple(starts), tuple(lens), self.width, num_rows), self.random)

    def _prompt(self, num_tokens: int) -> list[StepArrays]:
        """Return the steps of one prompt; the last one computes logits."""
        max_tokens = self.program.limits.max_tokens
        firsts = range(0, num_tokens, max_tokens)
        return [self._batch([at], [min(max_tokens, num_tokens - at)], int(at == firsts[-1])) for at in firsts]

    def _decode(self) -> list[StepArrays]:
        """Fill the contexts (the pages of the first request are copied to the others); return a decode step."""
        batch, context = self.settings.batch, self.num_context
        if context:
            for step in self._prompt(context):
                self.program.run(step.batch)
            for state in range(self.program.model.info.num_states):
                pages = self.program.core_program.kv(state)
                for request in range(1, batch):
                    pages[request * self.width : (request + 1) * self.width] = pages[: self.width]
        return [self._batch([context] * batch, [1] * batch, batch)]

    def _passes(self, steps: list[StepArrays]) -> tuple[list[Pass], list[float]]:
        """Return passes with spans, and the nanoseconds of passes without, which run alternately."""
        profiled: list[Pass] = []
        plain: list[float] = []
        program = self.program.core_program
        for _ in range(_WARM_PASSES):
            self._run(steps)
        begin = time.monotonic()
        while len(profiled) < (self.settings.steps or 3) or (
            not self.settings.steps and time.monotonic() - begin < _SECONDS
        ):
            plain.append(sum(wall for wall, _ in self._run(steps)))
            spans.set_profiling(program, True)
            profiled.append(add_up_spans(self._run(steps), len(self.graph.nodes)))
            spans.set_profiling(program, False)
        return profiled, plain

    def _run(self, steps: list[StepArrays]) -> list[tuple[float, NDArray[np.void]]]:
        """Run the steps; return the nanoseconds and the spans of each."""
        results = []
        for step in steps:
            begin = time.monotonic_ns()
            self.program.run(step.batch)
            wall = float(time.monotonic_ns() - begin)
            results.append((wall, spans.last_spans(self.program.core_program)))
        return results


def _probe(peaks: MachineLimits) -> float:
    """Measure the arithmetic peaks and the read bandwidth; return the latter."""
    peaks.probe_compute(0.05)
    return peaks.probe_bandwidth()
