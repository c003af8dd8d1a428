"""Run by test_planted_faults.py: an engine over a core in which a step of 13 tokens fails.  Prints what was made."""

from __future__ import annotations

import json
import sys

from penstock.engine.engine import Engine
from penstock.engine.params import ResolvedSampling
from penstock.engine.request import Request
from penstock.runtime.open import open_program
from penstock.runtime.program import ProgramLimits

PROMPTS = {"first": 40, "second": 7, "third": 11, "waiting": 9, "later": 40}


def submit(engine: Engine, name: str) -> Request:
    prompt = [(7 * i) % 90 + 2 for i in range(PROMPTS[name])]
    return engine.submit(prompt, ResolvedSampling(max_tokens=6))


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check_integrity()


def main(bundle: str) -> None:
    program = open_program(bundle, threads=2, limits=ProgramLimits(max_requests=3, num_pages=24)).program
    engine = Engine(program)
    first, second = submit(engine, "first"), submit(engine, "second")
    engine.step()
    third, waiting = submit(engine, "third"), submit(engine, "waiting")  # two decodes and 11 tokens: 13
    engine.step()
    named = engine.figures().num_named_pages
    drain(engine)
    later = submit(engine, "later")
    drain(engine)
    found = {
        "errors": [None if r.error is None else f"{type(r.error).__name__}: {r.error}" for r in (first, second, third)],
        "made": [len(r.output_ids) for r in (first, second, third)],
        "waiting": waiting.output_ids,
        "later": later.output_ids,
        "named_pages": named,
        "held_pages": engine.figures().num_held_pages,
    }
    engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
