"""A worker with injected faults: ``python faulty_worker.py FAULT[+FAULT]``.

"tokens": acts on tokens of a prompt.  DEADLY crashes the process at the next step.  LATER crashes it after three tokens
of the answer.  KILLED has it killed at the next step, as from outside.  STUCK makes the step hang.  NAP makes a step
take 0.8 s, during which the process runs.
"scheduled": a prompt with DEADLY crashes the process when it is scheduled into a step.
"waits": the weights are read after a file with the bundle's name and the suffix .go exists.
"exits": the process exits when its model is loaded a second time, which a file beside the bundle shows.
"crowd": the first process of a bundle begins after CROWD requests have arrived, and hangs once two have a token.
"clock": the time of day is an hour ahead and an hour behind in turn, at each reading.
"slow": a step takes 10 ms longer, so that a test finds a request still running.
"fifth": the first process of a model is killed at its fifth step with requests.
"resumed": the first process that is to compute a request which another one began is killed.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
import sys
import time
from pathlib import Path

DEADLY, STUCK, NAP, KILLED, LATER = 250, 251, 253, 254, 255
CROWD = 10


def crash() -> None:
    """Fault in this thread, as a wrong address does.  One for the process would wait for its main thread; the engine's
    thread would run further steps meanwhile."""
    signal.raise_signal(signal.SIGSEGV)


def main() -> int:
    from penstock.engine.engine import Engine
    from penstock.engine.scheduler import Scheduler
    from penstock.serving.workers import worker

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faults = sys.argv[1].split("+")
    real_step, real_open, real_schedule = Engine.step, worker.open_llm, Scheduler.schedule

    def step(engine):
        for request in engine._everyone():
            if DEADLY in request.prompt_ids or (LATER in request.prompt_ids and len(request.output_ids) >= 3):
                crash()
            if KILLED in request.prompt_ids:
                os.kill(os.getpid(), signal.SIGKILL)
            if STUCK in request.prompt_ids:
                time.sleep(1000)
            if NAP in request.prompt_ids and len(request.output_ids) == 1:
                for _ in range(80):
                    time.sleep(0.01)
        return real_step(engine)

    def open_llm(config, on_plan):
        mark = Path(config.path).with_suffix(".loaded")
        if mark.exists():
            os._exit(3)
        mark.touch()
        return real_open(config, on_plan)

    def crowded_step(engine):
        while len(engine._everyone()) < CROWD:
            time.sleep(0.01)
        if sum(bool(request.output_ids) for request in engine._everyone()) == 2:
            time.sleep(1000)
        return real_step(engine)

    def open_first(config, on_plan):
        mark = Path(config.path).with_suffix(".first")
        found = real_open(config, on_plan)  # warms up without other requests
        if not mark.exists():
            mark.touch()
            Engine.step = crowded_step
        return found

    def slow_step(engine):
        time.sleep(0.01)
        return real_step(engine)

    def open_killed(config, on_plan):
        mark, num_steps = Path(config.path).with_suffix(".fifth"), itertools.count(1)
        found = real_open(config, on_plan)  # warms up without other requests

        def kill_at_fifth(engine):
            if engine._everyone() and next(num_steps) == 5:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return real_step(engine)

        if not mark.exists():
            Engine.step = kill_at_fifth
        return found

    def open_marked(config, on_plan):
        mark = Path(config.path).with_suffix(".killed")

        def schedule_until_resumed(scheduler):
            chunks = real_schedule(scheduler)
            if any(chunk.request.num_resumed for chunk in chunks) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return chunks

        Scheduler.schedule = schedule_until_resumed
        return real_open(config, on_plan)

    def schedule(scheduler):
        chunks = real_schedule(scheduler)
        if any(DEADLY in chunk.request.prompt_ids for chunk in chunks):
            crash()
        time.sleep(0.01)
        return chunks

    def open_after(config, on_plan):
        def wait(plan):
            on_plan(plan)
            while not Path(config.path).with_suffix(".go").exists():
                time.sleep(0.01)

        return real_open(config, wait)

    if "clock" in faults:
        steps, real_time = itertools.cycle((3600.0, -3600.0)), time.time
        time.time = lambda: real_time() + next(steps)
        time.time_ns = lambda: int(time.time() * 1e9)
    if "scheduled" in faults:
        Scheduler.schedule = schedule
    if "waits" in faults:
        worker.open_llm = open_after
    if "slow" in faults:
        Engine.step = slow_step
    if "tokens" in faults:
        Engine.step = step
    if "crowd" in faults:
        worker.open_llm = open_first
    if "exits" in faults:
        worker.open_llm = open_llm
    if "fifth" in faults:
        worker.open_llm = open_killed
    if "resumed" in faults:
        worker.open_llm = open_marked
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
