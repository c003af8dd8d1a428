"""Measures the processor time per request of the batcher of servables: entering a request and taking batches.

python benchmarks/batcher.py
"""

from __future__ import annotations

import time

from penstock.servables.api.batch_rules import BatchRules
from penstock.servables.schedule.batcher import Batcher

NUM_REQUESTS = 100_000
CASES = (
    ("batches of 1, one waits", BatchRules(1), 1),
    ("batches of 1, 256 wait", BatchRules(1), 256),
    ("batches of 32, 32 wait", BatchRules(32), 32),
    ("batches of 64 or 2 ms, 256 wait", BatchRules(64, max_delay_s=0.002), 256),
    ("preferred 8 of 32, 8 wait", BatchRules(32, (8,), 0.002), 8),
    ("batches of 64, 4,096 wait, ten priorities", BatchRules(64), 4096),
)


def cost(rules: BatchRules, waiting: int) -> float:
    """Return the microseconds per request, the lowest of three."""
    found = []
    for _ in range(3):
        batcher: Batcher[int] = Batcher(rules)
        began, number = time.process_time(), 0
        while number < NUM_REQUESTS:
            for _ in range(waiting):
                batcher.add(number, 1, number * 1e-6, priority=number % 10 if waiting > 1000 else 0)
                number += 1
            while batcher.take(number * 1e-6 + 1) is not None:
                pass
            batcher.wake_at()
        found.append((time.process_time() - began) / number * 1e6)
    return min(found)


def main() -> None:
    for name, rules, waiting in CASES:
        print(f"{name:<42} {cost(rules, waiting):5.1f} us a request")


if __name__ == "__main__":
    main()
