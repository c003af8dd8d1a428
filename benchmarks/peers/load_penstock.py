"""Penstock for load.py: the engine's own loop, in process, on token ids.

Options: those of run_penstock.py.  The measure "...:uncached" opens the engine without its prefix cache.
"""

from __future__ import annotations

from play import play_steps, serve_traces
from protocol import Launch
from run_penstock import chosen
from traces import MAX_BATCH, MAX_LEN, STEP_TOKENS, Event
from traces import Request as Asked

from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.request import Request, ResolvedSampling
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits, pages_for


class Penstock:
    """``model`` is a bundle."""

    def __init__(self, launch: Launch) -> None:
        limits = ProgramLimits(
            max_tokens=STEP_TOKENS,
            max_requests=MAX_BATCH,
            num_pages=MAX_BATCH * pages_for(MAX_LEN),
            context_len=MAX_LEN,
            **chosen(launch),
        )
        self.program = open_program(launch.model, threads=launch.threads, limits=limits).program
        cached = not any(measure.endswith(":uncached") for measure in launch.measures)
        self.engine = Engine(self.program, EngineOptions(prefix_cache=cached))
        self.numbers: dict[int, int] = {}
        self.before = self.engine.figures()

    def submit(self, number: int, request: Asked) -> None:
        made: Request = self.engine.submit(request.prompt, ResolvedSampling(max_tokens=request.num_new))
        self.numbers[made.id] = number

    def step(self) -> list[tuple[int, int]]:
        news = self.engine.step()
        for request in news:
            if request.error is not None:
                raise request.error
        return [(self.numbers[request.id], 1) for request in news]

    def play(self, requests: list[Asked]) -> list[Event]:
        self.before = self.engine.figures()
        return play_steps(self, requests)

    def forget(self) -> None:
        self.engine.forget_prefixes()

    def figures(self) -> dict[str, object]:
        before, after = self.before, self.engine.figures()
        prompt_tokens = after.num_prompt_tokens - before.num_prompt_tokens
        return {
            "hit_rate": (after.num_cached_tokens - before.num_cached_tokens) / prompt_tokens,
            "num_steps": after.num_steps - before.num_steps,
            "num_preemptions": after.num_preemptions - before.num_preemptions,
            "kv_cache": self.program.limits.kv_layout,
            "cpu_level": self.program.info.cpu_level,
        }


if __name__ == "__main__":
    serve_traces(Penstock)
