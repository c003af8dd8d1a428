"""Penstock for load.py: the engine's own loop, in process, on token ids; or what a service is built on, AsyncLLM.

Options: those of run_penstock.py; ``interface`` (engine, async).  AsyncLLM makes the text of every answer beside its
tokens.  The measure "...:uncached" opens the engine without its prefix cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from play import play_steps, serve_traces
from protocol import Launch
from run_penstock import chosen
from traces import MAX_BATCH, MAX_LEN, STEP_TOKENS, Event
from traces import Request as Asked

from penstock.engine.engine import Engine
from penstock.engine.options import EngineOptions
from penstock.engine.params import ResolvedSampling, SamplingParams
from penstock.engine.request import Request
from penstock.llm.async_llm import AsyncLLM
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits, pages_for


def limits_of(launch: Launch) -> ProgramLimits:
    return ProgramLimits(
        max_tokens=STEP_TOKENS,
        max_requests=MAX_BATCH,
        num_pages=MAX_BATCH * pages_for(MAX_LEN),
        **chosen(launch),
    )


def is_cached(launch: Launch) -> bool:
    return not any(measure.endswith(":uncached") for measure in launch.measures)


class Penstock:
    """``model`` is a bundle."""

    def __init__(self, launch: Launch) -> None:
        program = open_program(launch.model, threads=launch.threads, limits=limits_of(launch)).program
        self._start(Engine(program, EngineOptions(prefix_cache=is_cached(launch))))

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self.numbers: dict[int, int] = {}
        self.before = engine.figures()

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
            "kv_cache": self.engine.program.limits.kv_layout,
            "cpu_level": self.engine.program.info.cpu_level,
        }


class AsyncPenstock(Penstock):
    """The same through AsyncLLM: a reader for each request in one event loop, beside the engine's thread."""

    def __init__(self, launch: Launch) -> None:
        self.runner = asyncio.Runner()  # an AsyncLLM belongs to one event loop
        self.llm = self.runner.run(
            AsyncLLM.open(
                launch.model, threads=launch.threads, limits=limits_of(launch), prefix_cache=is_cached(launch)
            )
        )
        self._start(self.llm.llm.engine)

    def play(self, requests: Sequence[Asked]) -> list[Event]:
        self.before = self.engine.figures()
        return self.runner.run(self._play(requests))

    async def _play(self, requests: Sequence[Asked]) -> list[Event]:
        events: list[Event] = []
        start = time.perf_counter()

        async def read(number: int, request: Asked) -> None:
            await asyncio.sleep(max(0.0, start + request.due_s - time.perf_counter()))
            params = SamplingParams(max_tokens=request.num_new, temperature=0.0, ignore_eos=True)
            async for delta in await self.llm.stream(request.prompt, params):
                if delta.token_ids:
                    events.append(Event(time.perf_counter() - start, number, len(delta.token_ids)))

        await asyncio.gather(*(read(number, request) for number, request in enumerate(requests)))
        return events


def open_penstock(launch: Launch) -> Penstock:
    kinds = {"engine": Penstock, "async": AsyncPenstock}
    return kinds[launch.options.get("interface", "engine")](launch)


if __name__ == "__main__":
    serve_traces(open_penstock)
