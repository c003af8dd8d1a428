"""How fast a model runs here, and how near that is to what the machine can do.

Every figure is measured through the engine's own loop on fresh random tokens.  The limits are measured too: read
bandwidth around each figure, because memory on a shared machine changes within seconds, and the arithmetic peak.
A figure is compared with the time that reading the weights and keys, or the multiplications, must take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.machine_limits import MachineLimits
from penstock.bench.open_model import check_size, open_model
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, Status
from penstock.errors import InternalError, InvalidArgumentError
from penstock.graph.ir import Graph
from penstock.runtime.machine import peak_rss_bytes, reset_peak_rss
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits, pages_for

__all__ = ["Bench", "Report", "bench"]

STEP_TOKENS = 512
PREFILL_RUNS = 3
BANDWIDTH_SLACK = 1.03
ATTEMPTS = 3


@dataclass(frozen=True)
class Bench:
    """What to measure."""

    model: Path | str
    scheme: str | None = None
    prompt_tokens: int = 512
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 8, 32)
    threads: int = 0
    network: str | None = None
    weights: str = "mmap"
    verify: str = "once"

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        sizes = [("prompt_tokens", self.prompt_tokens), ("new_tokens", self.new_tokens)]
        for name, value in [*sizes, *(("batch", batch) for batch in self.batches)]:
            check_size(name, value)
        if not self.batches or len(set(self.batches)) != len(self.batches):
            raise InvalidArgumentError(f"batch must name different sizes, not {self.batches!r}", param="batch")


@dataclass
class Report:
    """What was measured.  Times in seconds, sizes in bytes; dictionaries are by batch size."""

    network: str
    scheme: str
    cpu_level: str
    num_threads: int
    prompt_tokens: int
    new_tokens: int
    load_s: float = 0.0
    populate_s: float = 0.0
    first_token_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: dict[int, float] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    weight_bytes_per_token: int = 0
    limits: dict[str, Any] = field(default_factory=dict)
    share_of_limit: dict[str, Any] = field(default_factory=dict)
    inconsistent: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Work:
    """What a token costs at least: multiply-adds count two; the head runs for rows that are wanted."""

    body_ops: int
    head_ops: int
    kv_bytes_per_token: int
    peak: str

    @staticmethod
    def of(graph: Graph, kv_page_bytes: int) -> _Work:
        head = body = 0
        for node in graph.nodes:
            for operand in node.inputs if node.op.split(".")[0] == "linear" else ():
                if operand.kind == "weight" and graph.weights[operand.name].rows > 1:
                    ops = 2 * graph.weights[operand.name].rows * graph.weights[operand.name].cols
                    is_head = graph.values[node.outputs[0]].shape[0].symbol == "R"
                    head, body = head + ops * is_head, body + ops * (not is_head)
        peak = "int8" if graph.scheme.endswith("a8") else "bf16" if graph.scheme == "bf16" else "f32"
        return _Work(body, head, kv_page_bytes // PAGE_TOKENS, peak)


def bench(what: Bench, progress: Callable[[Any], None] | None = None) -> Report:
    """Measure a bundle or a folder.

    Raises InvalidArgumentError when the sizes do not fit the model, InternalError when a figure is above what the
    machine can compute: then a clock or a count is wrong.
    """
    largest = max(what.batches)
    # While the last prompts of a batch are computed, the first requests make tokens already.
    lead = -(-largest * what.prompt_tokens // STEP_TOKENS) + 2 if largest > 1 else 0
    context_len = what.prompt_tokens + what.new_tokens + lead + 2
    limits = ProgramLimits(
        max_tokens=max(STEP_TOKENS, largest),
        max_requests=largest,
        num_pages=(pages_for(context_len) + 1) * largest,  # one to spare for each, or admission waits
        context_len=context_len,
        weights=what.weights,
    )
    with open_model(what, limits, "bench", progress) as (opened, program, graph):
        if program.info.context_len < context_len:
            raise InvalidArgumentError(
                f"prompt_tokens {what.prompt_tokens} and new_tokens {what.new_tokens} at batch {largest} take a "
                f"context of {context_len} tokens, but the model's is {program.info.context_len}",
                param="prompt_tokens",
            )
        plan = program.info.plan
        work = _Work.of(graph, plan.kv_page_bytes if plan is not None else 0)
        report = _Measurement(what, program, work).report(opened.load_s)
        report.populate_s = opened.populate_s
        return report


class _Measurement:
    def __init__(self, what: Bench, program: NativeProgram, work: _Work) -> None:
        self.what, self.program, self.work = what, program, work
        self.engine = Engine(program, EngineOptions(max_mixed_tokens=0))  # answers begin together, as pages are planned
        self.random = np.random.default_rng()
        self.peak_rss = 0
        self.peaks = MachineLimits(program.context)

    def report(self, load_s: float) -> Report:
        info, what = self.program.info, self.what
        report = Report(
            info.network, info.scheme, info.cpu_level, info.num_threads, what.prompt_tokens, what.new_tokens, load_s
        )
        report.weight_bytes_per_token = info.weight_bytes_per_token
        self._prefill()  # the first run faults pages in and wakes clocks
        report.first_token_s, prefill_share = self._prefill_within_limit()
        report.prefill_tokens_per_s = what.prompt_tokens / report.first_token_s
        decode_shares: dict[int, float] = {}
        for batch in what.batches:
            seconds, share = self._decode_within_limit(batch)
            report.decode_tokens_per_s[batch] = batch / seconds
            decode_shares[batch] = share
            if share > BANDWIDTH_SLACK:
                report.inconsistent.append(batch)
        report.share_of_limit = {"prefill": prefill_share, "decode": decode_shares}
        report.limits = {
            "read_bytes_per_s": {"lowest": min(self.peaks.bandwidths), "highest": max(self.peaks.bandwidths)},
            "ops_per_s": self.peaks.ops_per_s,
            "prefill_peak": self.work.peak,
        }
        report.peak_rss_bytes = max(self.peak_rss, peak_rss_bytes())
        return report

    def _probe_compute(self) -> float:
        """The peak that counts for this scheme."""
        self.peaks.probe_compute()
        return self.peaks.ops_per_s[self.work.peak]

    def _prefill_within_limit(self) -> tuple[float, float]:
        """Seconds to the first token and their share of the peak."""
        ops = self.what.prompt_tokens * self.work.body_ops + self.work.head_ops
        for _ in range(ATTEMPTS):
            self._probe_compute()
            seconds = statistics.median(self._prefill() for _ in range(PREFILL_RUNS))
            share = ops / self._probe_compute() / seconds
            if share <= 1.0:
                return seconds, share
        raise self._impossible("prefill", share)

    def _impossible(self, name: str, share: float) -> InternalError:
        return InternalError(
            f"{name} came out at {share:.2f} of the {self.work.peak} peak, which cannot be: the figure is wrong"
        )

    def _submit(self, batch: int) -> list[Request]:
        sizes = (batch, self.what.prompt_tokens)
        prompts = self.random.integers(0, self.program.info.vocab_size, sizes).tolist()
        endless = ResolvedSampling(max_tokens=self.engine.max_len)
        return [self.engine.submit(prompt, endless) for prompt in prompts]

    def _prefill(self) -> float:
        """Seconds from a prompt to its first token."""
        start = time.perf_counter()
        request = self._submit(1)[0]
        while not request.output_ids:
            self._step()
        seconds = time.perf_counter() - start
        self.engine.abort(request)
        return seconds

    def _step(self) -> None:
        for request in self.engine.step():
            if request.error is not None:
                raise request.error

    def _decode_within_limit(self, batch: int) -> tuple[float, float]:
        """Seconds of a decode step and its share of the limit; measured again when the first is above it."""
        ops = batch * (self.work.body_ops + self.work.head_ops)
        for attempt in range(ATTEMPTS):
            seconds, bandwidth, context_len = self._decode(batch)
            compute = ops / self.peaks.ops_per_s[self.work.peak] / seconds
            read = self.program.info.weight_bytes_per_token + batch * context_len * self.work.kv_bytes_per_token
            share = max(compute, read / bandwidth / seconds)
            if compute <= 1.0 and (share <= BANDWIDTH_SLACK or attempt > 0):
                return seconds, share
            self._probe_compute()
        raise self._impossible(f"decode at batch {batch}", compute)

    def _decode(self, batch: int) -> tuple[float, float, float]:
        """Median seconds of a step of ``batch`` answers, the highest bandwidth around it, the mean context."""
        requests = self._submit(batch)
        while not all(request.output_ids for request in requests):
            self._step()
        before = self._bandwidth()
        times = []
        first = sum(r.num_tokens for r in requests) / batch
        for _ in range(self.what.new_tokens):
            start = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - start)
        if any(r.status is not Status.RUNNING or r.num_preemptions for r in requests):
            raise InternalError("decode: a request ended or was preempted while it was measured")
        bandwidth = max(before, self._bandwidth())
        for request in requests:
            self.engine.abort(request)
        return statistics.median(times), bandwidth, first + self.what.new_tokens / 2

    def _bandwidth(self) -> float:
        self.peak_rss = max(self.peak_rss, peak_rss_bytes())
        bandwidth = self.peaks.probe_bandwidth()
        reset_peak_rss()  # the probe's buffer is not the model's memory
        return bandwidth
