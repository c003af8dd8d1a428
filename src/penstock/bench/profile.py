"""Where the time of a step goes, op by op, and how near each op is to what the machine can do.

Steps run on the program itself, without the engine's loop: prompts of random tokens, and steps of one token for each of
some requests after a context.  The spans that the core notes are added up so that the rows of a table are the step's
whole time: work per op, waits for other threads, what lies between ops, and the call into the core.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench.machine_limits import MachineLimits
from penstock.bench.node_costs import Cost, StepSize, kind_keys, kind_labels, node_costs, peak_of
from penstock.bench.open_model import check_size, open_model
from penstock.bench.span_totals import Pass, tally
from penstock.core import native, spans
from penstock.errors import InvalidArgumentError
from penstock.graph.ir import Graph
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits, pages_for

__all__ = ["PHASES", "PhaseReport", "Profile", "ProfileReport", "Row", "profile"]

PHASES = ("prefill", "decode")
STEP_TOKENS = 512
_PROMPT_TOKENS, _CONTEXT = 512, 128
_MAX_STEPS = 10_000
_WARM_PASSES = 2
_SECONDS = 1.0
"""Passes go on for about so long when their number was not given."""


@dataclass(frozen=True)
class Profile:
    """What to profile.

    ``prompt_tokens`` None: 512, ``context`` None: 128, or what the model's context holds.  ``steps`` 0: as many as fit
    into a second, three at least.
    """

    model: Path | str
    scheme: str | None = None
    phases: tuple[str, ...] = PHASES
    prompt_tokens: int | None = None
    context: int | None = None
    batch: int = 1
    threads: int = 0
    kv_cache: str = "auto"
    weights: str = "mmap"
    steps: int = 0
    network: str | None = None
    verify: str = "once"

    def __post_init__(self) -> None:
        """Refuse what cannot be profiled."""
        leasts = {"prompt_tokens": 1, "context": 0, "batch": 1, "steps": 0}
        for name, least in leasts.items():
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), least)
        if self.steps > _MAX_STEPS:  # the spans of all passes are kept until the middle one is known
            raise InvalidArgumentError(f"steps: expected at most {_MAX_STEPS:,}, found {self.steps:,}", param="steps")
        if not self.phases or any(phase not in PHASES for phase in self.phases):
            raise InvalidArgumentError(
                f"phases must be some of {', '.join(PHASES)}, not {self.phases!r}", param="phases"
            )


@dataclass
class Row:
    """One kind of op, or one node.

    ``seconds`` and ``wait_seconds`` (for other threads, before it) are of the mean thread, so that the rows of a phase
    add up; ``busy_seconds`` is of its busiest thread, which the rates and ``share_of_limit`` go by.  ``limit`` is what
    binds: "memory", or the arithmetic "int8", "bf16" or "f32".  A share above 1 means that bytes came from the cache.
    """

    name: str
    op: str
    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    busy_seconds: float = 0.0
    num_bytes: float = 0.0
    num_ops: float = 0.0
    peak: str = "f32"
    limit: str = ""
    share_of_limit: float = 0.0


@dataclass
class PhaseReport:
    """A pass (a prompt, or a step of decode): its size and time, and where it went; times in seconds.

    Of ``passes``, ``alike`` were walked by ``step_threads`` threads, the others by more or fewer: a step goes on
    without a thread that comes late.  ``wall_s`` is the mean of the middle half by time of those alike, ``plain_s`` the
    median of as many passes that noted nothing.  ``read_bytes_per_s`` and ``ops_per_s``, by type, are what so many
    threads can do at most, measured with the phase.  ``kinds`` plus ``between`` are ``wall_s``.  ``fused`` are ops that
    others do in their stores, with their number.  ``spans`` are those of the steps of the median pass.
    """

    phase: str
    num_tokens: int
    num_requests: int
    context: int
    num_steps: int
    step_threads: int
    passes: int
    alike: int
    wall_s: float
    plain_s: float
    read_bytes_per_s: float
    ops_per_s: dict[str, float]
    kinds: list[Row]
    nodes: list[Row]
    between: dict[str, float]
    fused: dict[str, int]
    spans: list[NDArray[np.void]] = field(repr=False, default_factory=list)


@dataclass
class ProfileReport:
    """What was profiled, and its phases; ``populate_s``: seconds of copying weights, 0 where they are mapped."""

    network: str
    scheme: str
    cpu_level: str
    num_threads: int
    kv_cache: str
    weights: str
    populate_s: float
    phases: list[PhaseReport]


@dataclass(frozen=True)
class _Step:
    batch: native.StepBatch
    size: StepSize


def profile(what: Profile, progress: Callable[[Any], None] | None = None) -> ProfileReport:
    """Profile a bundle or a folder.

    Raises InvalidArgumentError when the sizes do not fit the model, and what ``open_program`` raises.
    """
    num_prompt, num_context = _sizes(what, None)
    longest = _longest(what, num_prompt, num_context)
    limits = ProgramLimits(
        max_tokens=max(min(STEP_TOKENS, longest), what.batch),
        max_requests=what.batch,
        num_pages=pages_for(longest) * what.batch,
        context_len=longest,
        kv_layout=what.kv_cache,
        weights=what.weights,
    )
    with open_model(what, limits, "profile", progress) as (opened, program, graph):
        most = program.info.context_len
        num_prompt, num_context = _sizes(what, most)
        if _longest(what, num_prompt, num_context) > most:
            is_prompt = "prefill" in what.phases and num_prompt > most
            asked = f"prompt_tokens {num_prompt}" if is_prompt else f"context {num_context} and one more"
            message = f"{asked} is over the model's context of {most} tokens"
            raise InvalidArgumentError(message, param="prompt_tokens" if is_prompt else "context")
        return _Profiler(what, program, graph, pages_for(longest)).report(opened.populate_s)


def _sizes(what: Profile, context_len: int | None) -> tuple[int, int]:
    """Tokens of the prompt and of the context: those asked for, else the default as far as the model takes it."""
    most = _PROMPT_TOKENS if context_len is None else context_len
    num_prompt = min(_PROMPT_TOKENS, most) if what.prompt_tokens is None else what.prompt_tokens
    num_context = min(_CONTEXT, most - 1) if what.context is None else what.context
    return num_prompt, num_context


def _longest(what: Profile, num_prompt: int, num_context: int) -> int:
    return max(num_prompt if "prefill" in what.phases else 1, num_context + 1 if "decode" in what.phases else 1)


class _Profiler:
    def __init__(self, what: Profile, program: NativeProgram, graph: Graph, width: int) -> None:
        self.what, self.program, self.graph, self.width = what, program, graph, width
        self.num_prompt, self.num_context = _sizes(what, program.info.context_len)
        self.groups = len(program.info.page_windows)
        self.random = np.random.default_rng(0)
        plan = program.info.plan
        self.kv_token_bytes = plan.kv_page_bytes / PAGE_TOKENS if plan is not None else 0.0
        self.kept = [node.wanted_only for node in spans.node_infos(program.model)]
        self.peaks = MachineLimits(program.context)
        self.fewer: dict[int, dict[str, float]] = {}  # the highest peaks of so many threads, of all phases

    def report(self, populate_s: float) -> ProfileReport:
        info = self.program.info
        phases = [self._phase(phase) for phase in PHASES if phase in self.what.phases]
        for phase in phases:  # the peaks are known now
            for row in [*phase.kinds, *phase.nodes]:
                _compare(row, phase)
        return ProfileReport(
            info.network, info.scheme, info.cpu_level, info.num_threads, self.program.limits.kv_layout,
            self.what.weights, populate_s, phases,
        )  # fmt: skip

    def _phase(self, phase: str) -> PhaseReport:
        steps = self._prompt(self.num_prompt) if phase == "prefill" else self._decode()
        bandwidth = _probe(self.peaks)
        passes, plain = self._passes(steps)
        bandwidth, ops_per_s = max(bandwidth, _probe(self.peaks)), self.peaks.ops_per_s
        counts = Counter(one.threads for one in passes)
        threads = max(counts, key=lambda number: (counts[number], number))
        if threads < self.program.info.num_threads:  # a step too short to be shared
            with native.Context(threads, self.program.info.cpu_level) as context:
                peaks = MachineLimits(context)
                bandwidth = max(_probe(peaks), _probe(peaks))
            ops_per_s = self.fewer.setdefault(threads, peaks.ops_per_s)
            for name, value in peaks.ops_per_s.items():
                ops_per_s[name] = max(ops_per_s[name], value)
        kept = sorted((one for one in passes if one.threads == threads), key=lambda one: one.wall)
        quarter = len(kept) // 4
        kept = kept[quarter : len(kept) - quarter]
        nodes, between = self._rows(steps, kept)
        first, middle = steps[-1].size, kept[len(kept) // 2]
        return PhaseReport(
            phase=phase,
            num_tokens=sum(step.size.num_tokens for step in steps),
            num_requests=len(first.lens),
            context=self.num_context if phase == "decode" else 0,
            num_steps=len(steps),
            step_threads=threads,
            passes=len(passes),
            alike=counts[threads],
            wall_s=statistics.fmean(one.wall for one in kept) * 1e-9,
            plain_s=statistics.median(plain) * 1e-9,
            read_bytes_per_s=bandwidth,
            ops_per_s=ops_per_s,
            kinds=_kinds(self.graph, nodes),
            nodes=nodes,
            between=between,
            fused=dict(Counter(row.op for row in nodes if not row.calls)),
            spans=middle.spans,
        )

    def _batch(self, starts: Sequence[int], lens: Sequence[int], num_rows: int) -> _Step:
        """A step: request i has ``lens[i]`` random tokens from position ``starts[i]`` and pages of its own."""
        num_tokens, num_requests = sum(lens), len(lens)
        tables = np.arange(num_requests * self.width, dtype=np.int32).reshape(1, num_requests, self.width)
        ends = np.cumsum([0, *lens], dtype=np.int32)
        batch = native.StepBatch(
            token_ids=self.random.integers(0, self.program.info.vocab_size, num_tokens, np.int32),
            positions=np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, lens, strict=True)]),
            request_starts=ends,
            page_tables=np.ascontiguousarray(np.broadcast_to(tables, (self.groups, num_requests, self.width))),
            output_rows=np.ascontiguousarray(ends[1:] - 1)[num_requests - num_rows :],
        )
        return _Step(batch, StepSize(tuple(starts), tuple(lens), self.width, num_rows))

    def _prompt(self, num_tokens: int) -> list[_Step]:
        """One request's prompt in steps; the last makes logits."""
        most = self.program.limits.max_tokens
        firsts = range(0, num_tokens, most)
        return [self._batch([at], [min(most, num_tokens - at)], int(at == firsts[-1])) for at in firsts]

    def _decode(self) -> list[_Step]:
        """A token for each request, once their contexts are there: the first one's pages are copied to the others."""
        batch, context = self.what.batch, self.num_context
        if context:
            for step in self._prompt(context):
                self.program.run(step.batch)
            for state in range(self.program.model.info.num_states):
                pages = self.program.core_program.kv(state)
                for request in range(1, batch):
                    pages[request * self.width : (request + 1) * self.width] = pages[: self.width]
        return [self._batch([context] * batch, [1] * batch, batch)]

    def _passes(self, steps: list[_Step]) -> tuple[list[Pass], list[float]]:
        """Passes that noted their spans, and the nanoseconds of those that did not, in turn."""
        noted: list[Pass] = []
        plain: list[float] = []
        program = self.program.core_program
        for _ in range(_WARM_PASSES):
            self._run(steps)
        begin = time.monotonic()
        while len(noted) < (self.what.steps or 3) or (not self.what.steps and time.monotonic() - begin < _SECONDS):
            plain.append(sum(wall for wall, _ in self._run(steps)))
            spans.set_profiling(program, True)
            noted.append(tally(self._run(steps), len(self.graph.nodes)))
            spans.set_profiling(program, False)
        return noted, plain

    def _run(self, steps: list[_Step]) -> list[tuple[float, NDArray[np.void]]]:
        """Nanoseconds and spans of each step."""
        found = []
        for step in steps:
            begin = time.monotonic_ns()
            self.program.run(step.batch)
            wall = float(time.monotonic_ns() - begin)
            found.append((wall, spans.last_spans(self.program.core_program)))
        return found

    def _rows(self, steps: list[_Step], kept: list[Pass]) -> tuple[list[Row], dict[str, float]]:
        """Rows of the nodes, and seconds between them, of the mean pass."""

        def mean(name: str) -> Any:
            return sum(getattr(one, name) for one in kept) / len(kept) * 1e-9

        noted = {int(node) for one in kept[0].spans for node in np.unique(one["node"])}
        costs = [Cost() for _ in self.graph.nodes]
        for step in steps:
            for cost, more in zip(
                costs, node_costs(self.graph, step.size, self.kv_token_bytes, self.kept), strict=True
            ):
                cost.add(more)
        rows: list[Row] = []
        for node, cost, work, wait, busy in zip(
            self.graph.nodes, costs, mean("work"), mean("wait"), mean("busy"), strict=True
        ):
            row = Row(node.name, node.op, seconds=float(work), wait_seconds=float(wait), busy_seconds=float(busy))
            if len(rows) in noted:  # else another node's store does its work
                row.calls, row.num_bytes, row.num_ops, row.peak = (
                    len(steps),
                    cost.num_bytes,
                    cost.num_ops,
                    peak_of(node, self.program.limits.kv_layout, self.program.info.cpu_level),
                )
            rows.append(row)
        between = {
            "waiting for other threads": float(mean("wait").sum()) + mean("ending"),
            "starting the threads": mean("starting"),
            "between ops": mean("gaps"),
            "calling the core": mean("calling"),
        }
        return rows, between


def _probe(peaks: MachineLimits) -> float:
    """Read bandwidth now, and a look at the arithmetic."""
    peaks.probe_compute(0.05)
    return peaks.probe_bandwidth()


def _compare(row: Row, phase: PhaseReport) -> None:
    memory, arithmetic = row.num_bytes / phase.read_bytes_per_s, row.num_ops / phase.ops_per_s[row.peak]
    row.limit = "memory" if memory >= arithmetic else row.peak
    row.share_of_limit = max(memory, arithmetic) / row.busy_seconds if row.busy_seconds > 0 else 0.0


def _kinds(graph: Graph, nodes: list[Row]) -> list[Row]:
    """The nodes added up by kind, the slowest first."""
    keys = kind_keys(graph.nodes)
    labels = kind_labels(keys)
    rows: dict[str, Row] = {}
    for key, node in zip(keys, nodes, strict=True):
        if not node.calls:
            continue
        row = rows.setdefault(key, Row(labels[key], node.op, peak=node.peak))
        row.calls += node.calls
        for name in ("seconds", "wait_seconds", "busy_seconds", "num_bytes", "num_ops"):
            setattr(row, name, getattr(row, name) + getattr(node, name))
    return sorted(rows.values(), key=lambda row: -row.seconds)
