"""``penstock serve`` whose workers compute nothing: each open request gets a token at a fixed rate.

    python benchmarks/paced_worker.py primary RATE CORE serve MODEL.psm [OPTION ...]

A benchmark of the primary needs workers that are no limit.  They open the model, because the service describes it, and
join as others do, but no step runs: the text of a token is its number in the answer and the time at which it was made
("12:3456789 ", microseconds of ``time.perf_counter``).  The primary runs on one core, and its workers on the others.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock.engine.params import SamplingParams
from penstock.llm import engine_thread
from penstock.llm.engine_thread import Started, StepEvent
from penstock.llm.llm import LLM

TOKEN_ID = 5


class PacedEngine:
    """The parts of EngineThread that a worker uses, without an engine; ``rate``: tokens per second and request."""

    def __init__(self, rate: float, llm: LLM, deliver: Callable[[list[StepEvent]], None], soon: object = None) -> None:
        self.llm, self.last_turn = llm, time.monotonic()
        self._rate, self._deliver = rate, deliver
        self._open: dict[int, list[int]] = {}  # by key: tokens made, tokens wanted, tokens of the prompt
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._drive, daemon=True)
        self._thread.start()

    def submit(self, key: int, prompt_ids: Sequence[int], params: SamplingParams, *_: object) -> None:
        """Begin an answer with the next step."""
        with self._lock:
            self._open[key] = [0, params.max_tokens or 1, len(prompt_ids)]

    def abort(self, key: int) -> None:
        """End an answer."""
        with self._lock:
            self._open.pop(key, None)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function."""
        with self._lock:
            function()

    def close(self) -> None:
        """End the thread, and free the memory of the model."""
        self._closing.set()
        self._thread.join()
        self.llm.close()

    def _drive(self) -> None:
        due = time.monotonic()
        while not self._closing.is_set():
            due = max(due + 1 / self._rate, time.monotonic())
            self._closing.wait(due - time.monotonic())
            self.last_turn = time.monotonic()
            with self._lock:
                if events := [self._event(key) for key in [*self._open]]:
                    self._deliver(events)

    def _event(self, key: int) -> StepEvent:
        made, wanted, num_prompt = self._open[key]
        event = StepEvent(key, 0, f"{made}:{time.perf_counter() * 1e6:.0f} ", [TOKEN_ID])
        self._open[key][0] = made + 1
        if not made:
            event.started = Started(seed=1, num_prompt_tokens=num_prompt)
        if made + 1 == wanted:
            event.finish_reason, event.is_last = "length", True
            event.timings = dict.fromkeys(
                ("queued_s", "prefill_s", "first_token_s", "total_s", "per_token_s", "decode_tokens_per_s"), 0.0
            )
            del self._open[key]
        return event


def run_primary(rate: str, core: str, arguments: Sequence[str]) -> int:
    """Run the command on one core, with workers of this file."""
    from penstock.cli import main as cli
    from penstock.cluster.placement.local import LocalPlacement
    from penstock.serving.workers import primary

    others = os.sched_getaffinity(0) - {int(core)} or {int(core)}
    os.sched_setaffinity(0, {int(core)})
    command = (sys.executable, __file__, "worker", rate, ",".join(map(str, others)))
    placed: Any = partial(LocalPlacement, command)
    vars(primary)["LocalPlacement"] = placed
    return cli.main(arguments)


def run_worker(rate: float, cores: set[int]) -> int:
    """Run the worker that standard input describes, on the other cores."""
    from penstock.serving.workers import worker

    os.sched_setaffinity(0, cores)
    paced: Any = partial(PacedEngine, rate)
    vars(engine_thread)["EngineThread"] = paced
    return worker.main()


if __name__ == "__main__":
    role, token_rate, cores_of_it, *rest = sys.argv[1:]
    if role == "primary":
        sys.exit(run_primary(token_rate, cores_of_it, rest))
    sys.exit(run_worker(float(token_rate), set(map(int, cores_of_it.split(",")))))
