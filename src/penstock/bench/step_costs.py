"""Measures what the steps of a model cost by their tokens and contexts, for the simulator."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

__all__ = ["StepSeconds", "Steps", "fit", "measure_steps", "middle"]

_SHORT_PROMPT: Final = 16
_MIN_DIFFERENCE: Final = 64
"""Contexts that differ by fewer tokens do not show what a token of context costs."""
_PREFILL_RUNS: Final = 5
_LEAST_S: Final = 1e-9
"""The unit of the simulator's clock: what a step costs at least."""


class Steps(Protocol):
    """A worker whose steps are timed where its tokens arrive, as ``penstock.cli.measure.worker_steps`` does it."""

    def prefill(self, prompt_tokens: int) -> float:
        """Return the seconds from a prompt to its first token."""

    def decode(self, batch: int, prompt_tokens: int, num_steps: int) -> tuple[float, float]:
        """Return the seconds of a step of ``batch`` answers, and the mean tokens before those of its requests, in all.

        ``num_steps`` steps are measured after the first tokens.
        """

    def added_request(self, batch: int, prompt_tokens: int) -> float:
        """Return the seconds by which a request of one token delays ``batch`` answers that run."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of steps, with the meaning of the same fields of ``penstock.cluster.costs.StepCosts``."""

    prefill_step_s: float
    prefill_token_s: float
    prefill_context_s: float
    decode_step_s: dict[int, float]
    decode_context_s: float
    request_s: float


def measure_steps(
    steps: Steps,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int,
    step_tokens: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> StepSeconds:
    """Measure prompts of three lengths up to ``prompt_tokens``, decodes of each batch in two contexts, and requests.

    ``new_tokens``: decode steps per measurement.  ``step_tokens``: the most prompt tokens of a step.  ``progress`` is
    called with the measurements that are done, and their number.
    """
    total = len(batches) + 2
    progress(0, total)
    lengths = sorted({max(1, prompt_tokens // 16), max(1, prompt_tokens // 4), prompt_tokens})
    steps.prefill(lengths[0])
    prompts = {n: statistics.median(steps.prefill(n) for _ in range(_PREFILL_RUNS)) for n in lengths}
    has_contexts = prompt_tokens - _SHORT_PROMPT >= _MIN_DIFFERENCE
    rows = [(-(-n // step_tokens), n, n * (n - 1) / 2 * has_contexts) for n in lengths]
    step_s, token_s, context_s = fit(rows, [prompts[n] for n in lengths])
    contexts = (_SHORT_PROMPT, prompt_tokens) if has_contexts else (prompt_tokens,)
    # One line for all batches: the cost of a token of context does not depend on the request that it belongs to.
    decode_rows: list[list[float]] = []
    seconds: list[float] = []
    for place, batch in enumerate(batches):
        progress(1 + place, total)
        for length in contexts:
            decode_s, context = steps.decode(batch, length, new_tokens)
            own = [float(i == place) for i in range(len(batches))]
            decode_rows.append([*own, context if has_contexts else 0.0])
            seconds.append(decode_s)
    *steps_s, decode_context_s = fit(decode_rows, seconds)
    decode_s_of = {batch: max(_LEAST_S, value) for batch, value in zip(batches, steps_s, strict=True)}
    progress(total - 1, total)
    added = max(1, prompt_tokens // 4)
    tokens_s = token_s * added + context_s * added * (added - 1) / 2
    request_s = max(0.0, steps.added_request(middle(batches), added) - tokens_s)
    return StepSeconds(step_s, max(_LEAST_S, token_s), context_s, decode_s_of, decode_context_s, request_s)


def middle(batches: Sequence[int]) -> int:
    """Return the batch beside which the cost of a request is measured."""
    return sorted(batches)[len(batches) // 2]


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the factors, none below 0, with which sums over rows are nearest to ``seconds``, relative to each.

    A factor that would fall below 0 is 0, and the others are fitted without it.
    """
    weights = 1 / np.asarray(seconds, np.float64)
    matrix = np.asarray(rows, np.float64) * weights[:, None]
    active = list(range(matrix.shape[1]))
    while True:
        scale = np.abs(matrix[:, active]).max(axis=0)
        scale[scale == 0] = 1
        coefficients = np.linalg.lstsq(matrix[:, active] / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        lowest = int(np.argmin(coefficients)) if active else 0
        if not active or coefficients[lowest] >= 0:
            break
        del active[lowest]
    factors = [0.0] * matrix.shape[1]
    for place, value in zip(active, coefficients, strict=True):
        factors[place] = float(value)
    return factors
