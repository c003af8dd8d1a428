"""Measures how fast a model runs, and compares that with the limits of the machine.

Each figure is measured through the engine's loop on new random tokens.  The limits are measured, too: the arithmetic
peak, and the read bandwidth before and after each figure, because memory on a shared machine changes speed within
seconds.  A figure is compared with the shortest time in which weights and keys can be read and products computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from penstock.bench.node_costs import kv_token_bytes
from penstock.bench.open_model import BenchModel, check_size, open_model, stored_weights
from penstock.bench.step_costs import StepSeconds
from penstock.core import native
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.errors import InternalError, InvalidArgumentError
from penstock.graph.ir import DType, Graph
from penstock.quant.scheme import rounds_to_int8
from penstock.runtime.build import Progress
from penstock.runtime.energy import EnergyMeter
from penstock.runtime.machine import affinity, peak_rss_bytes, reset_peak_rss
from penstock.runtime.native import NativeProgram
from penstock.runtime.program import ProgramLimits, pages_for
from penstock.validation import refusal

__all__ = ["ABOVE_LIMIT", "STEP_TOKENS", "Bench", "EngineSteps", "MachineLimits", "Report", "bench"]

STEP_TOKENS = 512
PREFILL_RUNS = 3
GENERATION_RUNS = 3
ABOVE_LIMIT = 1.03
"""A share above this is no error of measurement: the data did not come from memory."""
ATTEMPTS = 3


@dataclass(frozen=True)
class Bench(BenchModel):
    """Settings of a measurement.  Sizes in tokens; ``kv_cache`` is the type of keys and values, as in LLM."""

    prompt_tokens: int = 512
    new_tokens: int = 128
    batches: tuple[int, ...] = (1, 8, 32)
    weights: str = "mmap"
    kv_cache: str = "auto"

    def __post_init__(self) -> None:
        """Check the sizes."""
        sizes = [("prompt_tokens", self.prompt_tokens), ("new_tokens", self.new_tokens)]
        for name, value in [*sizes, *(("batch", batch) for batch in self.batches)]:
            check_size(name, value)
        if not self.batches or len(set(self.batches)) != len(self.batches):
            raise refusal("batch", "a list of different sizes", self.batches)

    @property
    def context_len(self) -> int:
        """The tokens of a request, those that it generates while the last prompts of a batch are computed included."""
        largest = max(self.batches)
        lead = -(-largest * self.prompt_tokens // STEP_TOKENS) + 2 if largest > 1 else 0
        return self.prompt_tokens + self.new_tokens + lead + 2

    def limits(self, num_requests: int) -> ProgramLimits:
        """Return the limits of a program that runs so many of these requests at once."""
        return ProgramLimits(
            max_tokens=max(STEP_TOKENS, num_requests),
            max_requests=num_requests,
            num_pages=(pages_for(self.context_len) + 1) * num_requests,  # without the spare one admission waits
            context_len=self.context_len,
            kv_layout=self.kv_cache,
            weights=self.weights,
        )


@dataclass
class Report:
    """The result of a measurement.  Times in seconds, sizes in bytes; the keys of dictionaries are batch sizes.

    ``decode_bound`` is what limits decode, "memory" or the type of an arithmetic peak.  ``inconsistent`` are the batch
    sizes that read faster than memory, because the data fits into CPU caches.  ``num_threads`` is that of each of the
    ``num_ranks`` ranks; bytes are those of all.  ``steps`` are what the simulator needs; ``bench`` leaves them out.
    ``model_bytes``: the weights as the model's file has them.  ``file_bytes_per_token``: those that a token reads, by
    which shares are counted; ``weight_bytes_per_token`` are those in memory.  ``prefill_runs`` and ``generation_runs``:
    tokens per second of each repetition; generation begins with an empty context, as in llama-bench.
    ``joules_per_token`` of "prefill" and "generation", with those of other programs; {} where nothing counts them.
    """

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
    decode_bound: dict[int, str] = field(default_factory=dict)
    inconsistent: list[int] = field(default_factory=list)
    num_ranks: int = 1
    steps: StepSeconds | None = None
    model_bytes: int = 0
    num_parameters: int = 0
    file_bytes_per_token: int = 0
    prefill_runs: list[float] = field(default_factory=list)
    generation_runs: list[float] = field(default_factory=list)
    joules_per_token: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Work:
    """The least work per token: a multiply-add counts as two operations; the head runs only for rows of logits."""

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
        is_int8 = rounds_to_int8(graph.scheme)
        peak = "int8" if is_int8 else "bf16" if graph.scheme == "bf16" else "f32"
        return _Work(body, head, kv_token_bytes(graph, kv_page_bytes), peak)


def bench(settings: Bench, progress: Callable[[Any], None] | None = None) -> Report:
    """Measure a bundle or a checkpoint folder.

    Raises InvalidArgumentError if the sizes do not fit the model, and InternalError if a figure exceeds the arithmetic
    peak of the machine, which means that a clock or a count is wrong.
    """
    largest, context_len = max(settings.batches), settings.context_len
    with open_model(settings, settings.limits(largest), "bench", progress) as (opened, program, graph):
        if program.info.context_len < context_len:
            raise InvalidArgumentError(
                f"prompt_tokens {settings.prompt_tokens} and new_tokens {settings.new_tokens} at batch {largest} need "
                f"a context of {context_len} tokens, but the model has {program.info.context_len}",
                param="prompt_tokens",
            )
        work = _Work.of(graph, sum(plan.kv_page_bytes for plan in program.info.plans))
        with native.Model.open(opened.bundle or opened.source) as whole:  # the program may be that of one rank
            info = whole.info
        stored = stored_weights(settings.model, graph)
        read_bytes = min(info.weight_bytes_per_token, int(info.weight_bytes_per_token * stored.share))
        measurement = _Measurement(settings, program, work, read_bytes)
        report = measurement.report(opened.load_s, progress or (lambda _: None))
        report.populate_s, report.weight_bytes_per_token = opened.populate_s, info.weight_bytes_per_token
        report.model_bytes, report.num_parameters = stored.num_bytes or info.weight_bytes, stored.num_values
        return report


class EngineSteps:
    """Runs endless answers to random prompts through the engine's loop."""

    def __init__(self, program: NativeProgram) -> None:
        self._vocab_size, self._num_added = program.info.vocab_size, int(program.info.prefix_token >= 0)
        self._engine = Engine(
            program, EngineOptions(max_mixed_tokens=0)
        )  # answers begin together, as the number of pages assumes
        self._random = np.random.default_rng()

    def submit(self, batch: int, prompt_tokens: int) -> list[Request]:
        """Submit new random prompts, whose tokens include the one that the engine adds behind a prefix."""
        size = (batch, max(1, prompt_tokens - self._num_added))
        prompts = self._random.integers(0, self._vocab_size, size).tolist()
        endless = ResolvedSampling(max_tokens=self._engine.max_len)
        return [self._engine.submit(prompt, endless) for prompt in prompts]

    def start(self, batch: int, prompt_tokens: int) -> list[Request]:
        """Submit prompts and run them up to the first token of each."""
        requests = self.submit(batch, prompt_tokens)
        while not all(request.output_ids for request in requests):
            self.step()
        return requests

    def prefill(self, prompt_tokens: int) -> float:
        """Return the seconds from a prompt to its first token."""
        begin = time.perf_counter()
        requests = self.start(1, prompt_tokens)
        seconds = time.perf_counter() - begin
        self.abort(requests)
        return seconds

    def generate(self, num_tokens: int) -> float:
        """Return the seconds of ``num_tokens`` tokens behind a prompt of one token."""
        requests = self.start(1, 1)
        seconds = sum(self.decode(1) for _ in range(num_tokens))
        self.abort(requests)
        return seconds

    def step(self) -> float:
        """Run one step and return its seconds."""
        begin = time.perf_counter()
        for request in self._engine.step():
            if request.error is not None:
                raise request.error
        return time.perf_counter() - begin

    def decode(self, batch: int) -> float:
        """Run the steps that give each of ``batch`` answers a token, and return their seconds: one for each stage."""
        return sum(self.step() for _ in range(min(batch, self._engine.program.info.num_stages)))

    def abort(self, requests: Sequence[Request]) -> None:
        """End the requests and free their pages."""
        for request in requests:
            self._engine.abort(request)


class _Measurement:
    def __init__(self, settings: Bench, program: NativeProgram, work: _Work, read_bytes: int) -> None:
        self.settings, self.program, self.work, self.read_bytes = settings, program, work, read_bytes
        self.engine = EngineSteps(program)
        self.peak_rss = 0
        self.prefill_times: list[float] = []
        self._ranks = program.group.pids if program.group is not None else []
        num_threads = program.info.num_ranks * program.info.num_threads
        self._machine = native.Context(min(num_threads, len(affinity()))) if self._ranks else program.context
        self.peaks = MachineLimits(self._machine)

    def report(self, load_s: float, progress: Callable[[Any], None]) -> Report:
        info, settings = self.program.info, self.settings
        total = 1 + len(settings.batches)
        report = Report(
            info.network,
            info.scheme,
            info.cpu_level,
            info.num_threads,
            settings.prompt_tokens,
            settings.new_tokens,
            load_s,
            num_ranks=info.num_ranks,
        )
        report.file_bytes_per_token = self.read_bytes
        progress(Progress("measure", 0, total, "figures", "prefill"))
        self._prefill()  # the first run loads pages into memory and raises clock speeds
        report.first_token_s, prefill_share = self._prefill_within_limit()
        report.prefill_tokens_per_s = settings.prompt_tokens / report.first_token_s
        report.prefill_runs = [settings.prompt_tokens / seconds for seconds in self.prefill_times]
        report.generation_runs = [
            settings.new_tokens / self.engine.generate(settings.new_tokens) for _ in range(GENERATION_RUNS)
        ]
        report.joules_per_token = self._joules_per_token()
        decode_shares: dict[int, float] = {}
        for number, batch in enumerate(settings.batches, 1):
            progress(Progress("measure", number, total, "figures", f"decode, batch {batch}"))
            seconds, share, report.decode_bound[batch] = self._decode_within_limit(batch)
            report.decode_tokens_per_s[batch] = batch / seconds
            decode_shares[batch] = share
            if share > ABOVE_LIMIT:
                report.inconsistent.append(batch)
        report.share_of_limit = {"prefill": prefill_share, "decode": decode_shares}
        report.limits = {
            "read_bytes_per_s": {"lowest": min(self.peaks.bandwidths), "highest": max(self.peaks.bandwidths)},
            "ops_per_s": self.peaks.ops_per_s,
            "prefill_peak": self.work.peak,
        }
        report.peak_rss_bytes = max(self.peak_rss, peak_rss_bytes(self._ranks))
        return report

    def _probe_compute(self) -> float:
        """Measure and return the arithmetic peak that bounds this scheme."""
        self.peaks.probe_compute()
        return self.peaks.ops_per_s[self.work.peak]

    def _prefill_within_limit(self) -> tuple[float, float]:
        """Return the seconds to the first token, and the reached share of the peak."""
        ops = self.settings.prompt_tokens * self.work.body_ops + self.work.head_ops
        for _ in range(ATTEMPTS):
            self._probe_compute()
            self.prefill_times = [self._prefill() for _ in range(PREFILL_RUNS)]
            seconds = statistics.median(self.prefill_times)
            share = ops / self._probe_compute() / seconds
            if share <= 1.0:
                return seconds, share
        raise self._impossible("prefill", share)

    def _joules_per_token(self) -> dict[str, float]:
        """Return the energy of a token of each kind; {} where the machine does not count it."""
        works = {
            "prefill": (self.settings.prompt_tokens, self._prefill),
            "generation": (self.settings.new_tokens, lambda: self.engine.generate(self.settings.new_tokens)),
        }
        if EnergyMeter().joules() is None:
            return {}
        joules = {}
        for name, (num_tokens, run) in works.items():
            meter = EnergyMeter()
            run()
            joules[name] = (meter.joules() or 0.0) / num_tokens
        return joules

    def _impossible(self, name: str, share: float) -> InternalError:
        return InternalError(
            f"{name}: measured {share:.2f} of the {self.work.peak} peak, which is impossible; the figure is wrong"
        )

    def _prefill(self) -> float:
        return self.engine.prefill(self.settings.prompt_tokens)

    def _decode_within_limit(self, batch: int) -> tuple[float, float, str]:
        """Return the seconds of a decode step, the reached share of the limit, and which limit that is.

        Repeats a result above the limit.
        """
        ops = batch * (self.work.body_ops + self.work.head_ops)
        for attempt in range(ATTEMPTS):
            seconds, bandwidth, context_len = self._decode(batch)
            compute = ops / self.peaks.ops_per_s[self.work.peak] / seconds
            read = self.read_bytes + batch * context_len * self.work.kv_bytes_per_token
            share, bound = max((compute, self.work.peak), (read / bandwidth / seconds, "memory"))
            if compute <= 1.0 and (share <= ABOVE_LIMIT or attempt > 0):
                return seconds, share, bound
            self._probe_compute()
        raise self._impossible(f"decode at batch {batch}", compute)

    def _decode(self, batch: int) -> tuple[float, float, float]:
        """Return the median seconds of a step of ``batch`` answers, the higher bandwidth of two, the mean context."""
        requests = self.engine.start(batch, self.settings.prompt_tokens)
        before = self._bandwidth()
        first = sum(r.num_tokens for r in requests) / batch
        times = [self.engine.decode(batch) for _ in range(self.settings.new_tokens)]
        if any(r.status is not RequestStatus.RUNNING or r.num_preemptions for r in requests):
            raise InternalError("decode: a request ended or was preempted during the measurement")
        bandwidth = max(before, self._bandwidth())
        self.engine.abort(requests)
        return statistics.median(times), bandwidth, first + self.settings.new_tokens / 2

    def _bandwidth(self) -> float:
        self.peak_rss = max(self.peak_rss, peak_rss_bytes(self._ranks))
        bandwidth = self.peaks.probe_bandwidth()
        reset_peak_rss()  # the probe's buffer is not the model's memory
        return bandwidth


_DTYPES: Final = {"f32": DType.F32, "bf16": DType.BF16, "int8": DType.I8}


class MachineLimits:
    """The arithmetic peaks and read bandwidths of a context's threads, as measured so far.

    ``ops_per_s`` keeps the highest peak per type, because another process may have used the cores.  ``bandwidths``
    keeps every bandwidth, in bytes per second, because memory on a shared machine changes speed within seconds.
    """

    def __init__(self, context: native.Context) -> None:
        self._context = context
        self.ops_per_s = dict.fromkeys(_DTYPES, 0.0)
        self.bandwidths: list[float] = []

    def probe_compute(self, seconds: float = 0.1) -> None:
        """Measure the peak of each type for ``seconds``."""
        for name, dtype in _DTYPES.items():
            self.ops_per_s[name] = max(self.ops_per_s[name], native.probe_compute(self._context, int(dtype), seconds))

    def probe_bandwidth(self) -> float:
        """Measure, record and return the read bandwidth."""
        self.bandwidths.append(native.probe_bandwidth(self._context))
        return self.bandwidths[-1]
