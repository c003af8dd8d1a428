"""A worker with a fault planted in its engine: ``python faulty_worker.py FAULT``.

"tokens": a prompt with DEADLY kills the process when a step would run it, one with STUCK makes the step hang, one with
LATE kills it when three tokens of the answer are out, one with NAP makes a step take 0.8 s in which the process
runs.  "scheduled": one with DEADLY kills it when it has a place in a
step.  "waits": the weights are read once a file of the bundle's name with .go lies beside it.  "exits": the process
ends when its model is loaded for the second time, as told by a file that the first one leaves beside the bundle.
"slow": a step takes 10 ms longer, so that what a test does to a running request finds it running.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

DEADLY, STUCK, LATE, NAP = 250, 251, 252, 253


def main() -> int:
    from penstock.engine.engine import Engine
    from penstock.engine.scheduler import Scheduler
    from penstock.serving import worker

    fault = sys.argv[1]
    honest_step, honest_open, honest_schedule = Engine.step, worker.open_llm, Scheduler.schedule

    def step(engine):
        for request in engine._everyone():
            if LATE in request.prompt_ids:
                time.sleep(0.1)  # what came before is sent
            if DEADLY in request.prompt_ids or (LATE in request.prompt_ids and len(request.output_ids) >= 3):
                os.kill(os.getpid(), signal.SIGKILL)
            if STUCK in request.prompt_ids:
                time.sleep(1000)
            if NAP in request.prompt_ids and len(request.output_ids) == 1:
                for _ in range(80):
                    time.sleep(0.01)
        return honest_step(engine)

    def open_llm(config, on_plan):
        mark = Path(config.path).with_suffix(".loaded")
        if mark.exists():
            os._exit(3)
        mark.touch()
        return honest_open(config, on_plan)

    def slow_step(engine):
        time.sleep(0.01)
        return honest_step(engine)

    def schedule(scheduler):
        chunks = honest_schedule(scheduler)
        if any(DEADLY in chunk.request.prompt_ids for chunk in chunks):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return chunks

    def open_after(config, on_plan):
        def wait(plan):
            on_plan(plan)
            while not Path(config.path).with_suffix(".go").exists():
                time.sleep(0.01)

        return honest_open(config, wait)

    if fault == "scheduled":
        Scheduler.schedule = schedule
    if fault == "waits":
        worker.open_llm = open_after
    if fault == "slow":
        Engine.step = slow_step
    if fault == "tokens":
        Engine.step = step
    if fault == "exits":
        worker.open_llm = open_llm
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
