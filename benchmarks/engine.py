"""Measures the cost of the engine without the model, in milliseconds per step, with a program that computes nothing.

    python benchmarks/engine.py

``schedule``: only the scheduler, with 256 running requests and 1,000 waiting ones that find no slot.  ``whole step``:
the scheduler, pages, layout, sampling arrays and update, which is all of a step in Python.  Both are medians of 300
steps in which each request gets one token.  The slowest tenth of whole steps is shown, too, because those allocate new
pages.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from penstock.core.native import Sampled, Sampling, StepBatch
from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling
from penstock.runtime.program import ProgramInfo, ProgramLimits

NUM_RUNNING, NUM_WAITING, NUM_STEPS, PROMPT_LEN = 256, 1000, 300, 200


class EmptyProgram:
    """A program that answers each row with the same token."""

    def __init__(self) -> None:
        self.limits = ProgramLimits(
            max_tokens=2048,
            max_requests=NUM_RUNNING,
            max_rows=NUM_RUNNING,
            num_pages=32 * NUM_RUNNING,
            context_len=4096,
        )
        self.info = ProgramInfo("empty", "f32", "graph", 32000, 4096, (0,), 1, 1, 1, "generic")

    def run(self, batch: StepBatch) -> None:
        """Do nothing."""

    def logits(self) -> np.ndarray:
        return np.zeros((0, 1), np.float32)

    def sample(self, sampling: Sampling) -> Sampled:
        zeros = np.zeros(len(sampling.temperature), np.int32)
        empty = np.zeros((len(zeros), 0), np.int32)
        return Sampled(zeros + 7, zeros.astype(np.float32), zeros + 1, zeros, empty, empty.astype(np.float32))

    def step(self, batch: StepBatch, sampling: Sampling) -> Sampled:
        return self.sample(sampling)

    def page_memory(self) -> list[list[np.ndarray]]:
        return []

    def end_exchanges(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def filled_engine(prefix_cache: bool) -> Engine:
    """Return an engine with 256 requests after their prompts and 1,000 waiting ones."""
    engine = Engine(EmptyProgram(), EngineOptions(prefix_cache=prefix_cache))
    random = np.random.default_rng(0)
    for _ in range(NUM_RUNNING + NUM_WAITING):
        prompt = random.integers(0, 32000, PROMPT_LEN).tolist()
        engine.submit(prompt, ResolvedSampling(max_tokens=4000, temperature=0.7, top_k=20, seed=1))
    while len(engine.scheduler.running) < NUM_RUNNING or any(not r.output_ids for r in engine.scheduler.running):
        engine.step()
    return engine


def main() -> None:
    for prefix_cache in (True, False):
        engine = filled_engine(prefix_cache)
        spent: list[float] = []
        honest = engine.scheduler.schedule

        def schedule():
            start = time.perf_counter()
            try:
                return honest()  # noqa: B023
            finally:
                spent.append(time.perf_counter() - start)  # noqa: B023

        engine.scheduler.schedule = schedule
        steps = []
        for _ in range(NUM_STEPS):
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        assert len(engine.scheduler.running) == NUM_RUNNING
        assert len(engine.scheduler.waiting) == NUM_WAITING
        tenth = statistics.quantiles(steps, n=10)[-1]
        print(
            f"prefix cache {'on ' if prefix_cache else 'off'}  schedule {statistics.median(spent) * 1e3:.3f} ms  "
            f"whole step {statistics.median(steps) * 1e3:.3f} ms (slowest tenth from {tenth * 1e3:.3f})"
        )


if __name__ == "__main__":
    main()
