"""Traces for ``penstock simulate``: prompts with shared beginnings, caches short or ample.

    python benchmarks/simulated_traces.py short > short.jsonl
    python benchmarks/simulated_traces.py ample --requests 4000 > ample.jsonl
    python benchmarks/simulated_traces.py large --requests 1000000 > large.jsonl

``short`` has the parameters of the llm-d project's study of routing by prefix (blog of September 2025): 150 customers
with a common beginning of 6,000 tokens each, and 8 replicas whose caches together hold the beginnings while no single
one does: the beginnings take 73 % of all caches, and six times one cache.  ``ample`` has 20 beginnings of 1,000 tokens,
which every cache holds.  ``large`` is for 1,000 replicas: 1,000 beginnings of 1,000 tokens and answers of 64 tokens on
average.  The same seed gives the same trace.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

__all__ = ["TRACES", "TraceShape", "requests"]


@dataclass(frozen=True)
class TraceShape:
    """A trace and the cluster that it is for.

    ``num_prefixes`` beginnings of ``prefix_tokens`` tokens; questions and answers of random lengths with these means;
    ``rate`` requests per second; ``replicas`` with ``pages`` pages each.
    """

    num_prefixes: int
    prefix_tokens: int
    question_tokens: int
    output_tokens: int
    rate: float
    replicas: int
    pages: int

    @property
    def options(self) -> list[str]:
        """The options of ``penstock simulate`` for its cluster."""
        return ["--replicas", str(self.replicas), "--pages", str(self.pages)]


TRACES: Final = {
    # 150 x 6000 / 32 = 28,125 pages: 73 % of 8 x 4,816
    "short": TraceShape(150, 6000, 1200, 64, rate=6.0, replicas=8, pages=4816),
    "ample": TraceShape(20, 1000, 200, 64, rate=25.0, replicas=8, pages=4816),
    "large": TraceShape(1000, 1000, 200, 64, rate=2500.0, replicas=1000, pages=2048),
}


def requests(shape: TraceShape, num_requests: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Return the lines of a trace: arrivals at random (Poisson), each with one of the beginnings at random."""
    draw, now = random.Random(seed), 0.0
    for number in range(num_requests):
        now += draw.expovariate(shape.rate)
        prefix = f"prefix {draw.randrange(shape.num_prefixes)}"
        question = draw.randint(1, 2 * shape.question_tokens - 1)
        yield {
            "time": round(now, 6),
            "segments": [[prefix, shape.prefix_tokens], [f"question {number}", question]],
            "output_tokens": draw.randint(1, 2 * shape.output_tokens - 1),
        }


def main() -> None:
    """Print a trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", choices=[*TRACES], help="which trace (required)")
    parser.add_argument("--requests", type=int, default=2000, help="number of requests (default: 2000)")
    parser.add_argument("--rate", type=float, help="requests per second (default: that of the trace)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers (default: 0)")
    args = parser.parse_args()
    shape = TRACES[args.trace]
    if args.rate is not None:
        shape = replace(shape, rate=args.rate)
    for request in requests(shape, args.requests, args.seed):
        print(json.dumps(request))


if __name__ == "__main__":
    main()
