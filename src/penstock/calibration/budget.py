"""Budgets of mixed precision, and the choice of schemes that keeps them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.units import WeightUnit
from penstock.validation import refusal

__all__ = [
    "Budget",
    "BudgetStep",
    "Costs",
    "apply_steps",
    "choose_schemes",
    "greedy_steps",
    "parse_size_budget",
    "parse_speed",
    "smallest_prefix",
]

_SIZES: Final = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_PARTS: Final = 4096
"""The parts of a budget that sizes are rounded up to."""
_NUMBER: Final = r"(\d+(?:\.\d+)?|\.\d+)"


@dataclass(frozen=True)
class Budget:
    """A limit that a mix must keep; one of the four is set.

    ``bits``: bits per weight of the whole model, as ``penstock eval`` counts them.  ``num_bytes``: of all weights.
    ``max_kl``: the divergence in nats per token.  ``min_speed``: tokens per second of decoding at batch 1.
    """

    bits: float | None = None
    num_bytes: int | None = None
    max_kl: float | None = None
    min_speed: float | None = None

    def __post_init__(self) -> None:
        """Refuse more or less than one limit, and limits that are not positive."""
        limits = [limit for limit in (self.bits, self.num_bytes, self.max_kl, self.min_speed) if limit is not None]
        if len(limits) != 1:
            raise refusal("budget", "one of a size, a divergence and a speed", f"{len(limits)} of them")
        if not (math.isfinite(limits[0]) and limits[0] > 0):
            raise refusal("max_kl" if self.max_kl is not None else "budget", "a number above 0", limits[0])

    @property
    def text(self) -> str:
        """The budget in words, for the recipe."""
        if self.bits is not None:
            return f"{self.bits:g} bits"
        if self.num_bytes is not None:
            return f"{self.num_bytes} bytes"
        return f"KL {self.max_kl:g}" if self.max_kl is not None else f"{self.min_speed:g} tokens/s"


def parse_size_budget(text: str) -> Budget:
    """Return the budget of "4.8bits", "600MB" or "0.5GiB"; InvalidArgumentError names ``budget``."""
    match = re.fullmatch(_NUMBER + r" ?(bits?|[kmg]i?b|b)", text.strip().lower())
    if match is None:
        raise refusal("budget", "bits per weight or a size, such as 4.8bits, 600MB or 1.5GiB", text)
    value, unit = float(match[1]), match[2]
    if not math.isfinite(value * _SIZES.get(unit, 1)):
        raise refusal("budget", "a smaller number", text)
    return Budget(bits=value) if unit.startswith("bit") else Budget(num_bytes=int(value * _SIZES[unit]))


def parse_speed(text: str) -> Budget:
    """Return the budget of "50tok/s" or "50"; InvalidArgumentError names ``min_speed``."""
    match = re.fullmatch(_NUMBER + r" ?(?:tok(?:en)?s?/s)?", text.strip().lower())
    if match is None or not 0 < float(match[1]) < math.inf:
        raise refusal("min_speed", "tokens per second, such as 50tok/s", text)
    return Budget(min_speed=float(match[1]))


Costs = Mapping[str, Mapping[str, float]]
"""By the name of a unit and its scheme, the divergence that the unit adds if only it has the scheme."""


@dataclass(frozen=True)
class BudgetStep:
    """A unit gets a higher scheme: the divergence that this takes away, and the bytes that it adds."""

    unit: WeightUnit
    scheme: str
    gain: float
    num_bytes: int


def greedy_steps(
    units: Sequence[WeightUnit],
    schemes: Callable[[WeightUnit], Sequence[str]],
    costs: Costs,
    max_bytes: float = math.inf,
) -> list[BudgetStep]:
    """Return the steps from the lowest scheme of each unit, the most divergence per byte first.

    ``schemes``: those of a unit, the lowest first.  ``max_bytes``: the bytes that all steps may add; a step that does
    not fit is left out, and cheaper ones follow.  Only steps that take divergence away are made.
    """
    current = {unit.name: 0 for unit in units}
    steps: list[BudgetStep] = []
    left = max_bytes
    while True:
        best: tuple[float, BudgetStep, int] | None = None
        for unit in units:
            row, own = schemes(unit), current[unit.name]
            for place in range(own + 1, len(row)):
                gain = costs[unit.name][row[own]] - costs[unit.name][row[place]]
                extra = unit.num_bytes[row[place]] - unit.num_bytes[row[own]]
                if gain <= 0 or extra > left:
                    continue
                rate = gain / max(extra, 1)
                if best is None or rate > best[0]:
                    best = rate, BudgetStep(unit, row[place], gain, extra), place
        if best is None:
            return steps
        _, step, place = best
        steps.append(step)
        left -= step.num_bytes
        current[step.unit.name] = place


def apply_steps(
    units: Sequence[WeightUnit], schemes: Callable[[WeightUnit], Sequence[str]], steps: Sequence[BudgetStep]
) -> dict[str, str]:
    """Return the scheme of each unit, by name, after steps from the lowest."""
    return {unit.name: schemes(unit)[0] for unit in units} | {step.unit.name: step.scheme for step in steps}


def choose_schemes(
    units: Sequence[WeightUnit], schemes: Callable[[WeightUnit], Sequence[str]], costs: Costs, max_bytes: float
) -> dict[str, str]:
    """Return the scheme of each unit, by name, that adds at most ``max_bytes`` to the lowest schemes.

    The first steps of ``greedy_steps`` are the best at their own size.  Where a large unit, such as the head, does not
    fit behind them, the knapsack over all units is better; the lower sum of both is taken.
    """
    greedy = apply_steps(units, schemes, greedy_steps(units, schemes, costs, max_bytes))
    packed = _knapsack(units, schemes, costs, max_bytes)
    return min((greedy, packed), key=lambda chosen: math.fsum(costs[name][own] for name, own in chosen.items()))


def _knapsack(
    units: Sequence[WeightUnit], schemes: Callable[[WeightUnit], Sequence[str]], costs: Costs, max_bytes: float
) -> dict[str, str]:
    """Return the schemes with the least sum of costs, by dynamic programming; sizes are rounded up to parts."""
    part = max(max_bytes, 1) / _PARTS
    least = np.zeros(_PARTS + 1)
    picks: list[tuple[list[int], NDArray[np.int64]]] = []
    for unit in units:
        row = schemes(unit)
        sizes = [math.ceil((unit.num_bytes[scheme] - unit.num_bytes[row[0]]) / part) for scheme in row]
        totals = np.full((len(row), _PARTS + 1), np.inf)
        for place, (scheme, size) in enumerate(zip(row, sizes, strict=True)):
            if size <= _PARTS:
                totals[place, size:] = least[: _PARTS + 1 - size] + costs[unit.name][scheme]
        picks.append((sizes, totals.argmin(axis=0)))
        least = totals.min(axis=0)
    chosen, left = {}, _PARTS
    for unit, (sizes, places) in zip(reversed(units), reversed(picks), strict=True):
        place = int(places[left])
        chosen[unit.name] = schemes(unit)[place]
        left -= sizes[place]
    return chosen


def smallest_prefix(num_steps: int, is_enough: Callable[[int], bool]) -> int | None:
    """Return the least number of first steps that are enough, found by bisection; None if all of them are not."""
    if not is_enough(num_steps):
        return None
    low, high = -1, num_steps
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
