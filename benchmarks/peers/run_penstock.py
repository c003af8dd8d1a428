"""Penstock for run.py: the engine's own loop, in process, on the same prompts as its peers.

Options: ``kv-cache`` (f32, bf16, int8) and ``weights`` (mmap, huge); the defaults of ``penstock run`` unless given.
"""

from __future__ import annotations

import statistics
import time

from protocol import CONTEXT_LEN, START_TEXT, Launch, batch_of, measure_one, prompt, serve, steps_of

from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request, RequestStatus
from penstock.runtime.open import open_program
from penstock.runtime.program import PAGE_TOKENS, ProgramLimits, pages_for

STEP_TOKENS = 512


def positions_of(measure: str) -> int:
    """Return the largest number of tokens of one request of a measure."""
    kind, _, size = measure.partition(":")
    if kind == "prefill":
        return int(size) + 2
    batch = batch_of(measure)
    lead = -(-batch * CONTEXT_LEN // STEP_TOKENS) + 2  # steps in which the first requests wait for the last prompts
    return CONTEXT_LEN + steps_of(batch) + lead + 2


def limits_of(launch: Launch) -> ProgramLimits:
    """Return limits that are just enough for the measures."""
    context_len = max(positions_of(measure) for measure in launch.measures)
    num_pages = max(batch_of(measure) * (pages_for(positions_of(measure)) + 1) for measure in launch.measures)
    batch = max(batch_of(measure) for measure in launch.measures)
    return ProgramLimits(
        max_tokens=max(STEP_TOKENS, batch),
        max_requests=batch,
        num_pages=num_pages,
        context_len=context_len,
        **chosen(launch),
    )


def chosen(launch: Launch) -> dict[str, str]:
    """Return the limits that the caller chose; the others are Penstock's defaults."""
    fields = {"kv-cache": "kv_layout", "weights": "weights"}
    return {fields[name]: value for name, value in launch.options.items() if name in fields}


class Penstock:
    """``model`` is a bundle."""

    def __init__(self, launch: Launch) -> None:
        self.program = open_program(launch.model, threads=launch.threads, limits=limits_of(launch)).program
        self.engine = Engine(self.program, EngineOptions(max_mixed_tokens=0))  # all answers begin together
        self.decode_step_s([prompt(16, 0)], 4)

    def _step(self) -> None:
        for request in self.engine.step():
            if request.error is not None:
                raise request.error

    def _submit(self, prompts: list[list[int]]) -> list[Request]:
        """Submit requests and wait for their first token."""
        endless = ResolvedSampling(max_tokens=self.engine.max_len)
        requests = [self.engine.submit(ids, endless) for ids in prompts]
        while not all(request.output_ids for request in requests):
            self._step()
        return requests

    def prefill_s(self, ids: list[int]) -> float:
        start = time.perf_counter()
        requests = self._submit([ids])
        seconds = time.perf_counter() - start
        self.engine.abort(requests[0])
        return seconds

    def decode_step_s(self, prompts: list[list[int]], num_steps: int) -> float:
        requests = self._submit(prompts)
        times = []
        for _ in range(num_steps):
            start = time.perf_counter()
            self._step()
            times.append(time.perf_counter() - start)
        if any(request.status is not RequestStatus.RUNNING or request.num_preemptions for request in requests):
            raise SystemExit("a request ended or was preempted while it was measured")
        for request in requests:
            self.engine.abort(request)
        return statistics.median(times)


def measure(peer: Penstock, name: str) -> dict[str, object]:
    info = peer.program.info
    page_bytes = 0 if info.plan is None else info.plan.kv_page_bytes
    return {
        **measure_one(peer, name),
        "weight_bytes_per_token": info.weight_bytes_per_token,
        "kv_bytes_per_position": page_bytes // PAGE_TOKENS,
        "kv_cache": peer.program.limits.kv_layout,
        "cpu_level": info.cpu_level,
    }


def first_token(launch: Launch) -> None:
    from penstock.engine.params import SamplingParams
    from penstock.llm.llm import LLM

    limits = ProgramLimits(max_requests=1, **chosen(launch))
    with LLM(launch.model, threads=launch.threads, limits=limits) as llm:
        llm.generate(START_TEXT, SamplingParams(max_tokens=1, temperature=0.0))


if __name__ == "__main__":
    serve(Penstock, first_token, measure)
