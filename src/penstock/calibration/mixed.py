"""Mixed precision by measurement: a scheme for each unit of weights, chosen by what the unit costs the whole model.

A unit's sensitivity is the divergence of the model with only this unit in a lower scheme, and all others in the
highest.  Errors of several units are nearly independent, so their divergences add up while they are small.  With all
others in the lowest scheme instead, the difference that a unit makes would be hidden behind the product of its error
with theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from penstock.calibration.budget import (
    Budget,
    Costs,
    apply_steps,
    choose_schemes,
    greedy_steps,
    smallest_prefix,
)
from penstock.calibration.divergence import MeanDivergence
from penstock.calibration.judge import Judge, check_texts, file_stamp
from penstock.calibration.levels import METHODS, Levels, default_levels, make_levels, write_checkpoint
from penstock.calibration.outputs import check_outputs
from penstock.calibration.quantize import check_amount
from penstock.calibration.texts import DEFAULT_TOKENS, check_max_tokens
from penstock.calibration.unfinished import Workspace
from penstock.calibration.units import WeightUnit, find_units, has_experts
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.quantize import check_float_weights, plan_weights
from penstock.config import check_choice
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.bundle import read_graph
from penstock.graph.ir import Graph
from penstock.models.mapped import open_mapped
from penstock.quant.folder import check_new_folder
from penstock.quant.mixed_schemes import HEAD_BLOCKS
from penstock.quant.scheme import find_scheme, quantizing_scheme
from penstock.runtime.build import Progress, ProgressCallback

__all__ = ["MixedOptions", "MixedReport", "SpeedProbe", "UnitResult", "check_mixed", "quantize_mixed"]

SpeedProbe = Callable[[Path], float]
"""Returns the tokens per second of decoding with a bundle, at batch 1."""
_UNITS: Final = ("fused", "tensor")


@dataclass(frozen=True)
class MixedOptions:
    """How to mix schemes.

    ``budget``: what the mix must keep.  ``method``: one of ``METHODS``.  ``levels``: the schemes of a unit, the lowest
    first; empty is ``default_levels``.  ``units``: "fused" weights, or each "tensor".  ``calibration``: a file of
    texts, of which a quarter is held out to measure divergence; None samples texts from the model.  ``num_tokens``: use
    this many tokens of it at most.  ``threads``: 0 is all allowed cores.
    """

    budget: Budget
    method: str = "rtn"
    levels: tuple[str, ...] = ()
    units: str = "fused"
    calibration: Path | None = None
    num_tokens: int = DEFAULT_TOKENS
    threads: int = 0

    def __post_init__(self) -> None:
        """Refuse unknown methods and units, and too few tokens."""
        check_choice("method", self.method, METHODS)
        check_choice("units", self.units, _UNITS)
        check_max_tokens(self.num_tokens)


@dataclass(frozen=True)
class UnitResult:
    """A unit: its layer and kind, the divergence that it adds in each scheme, and the scheme that it got."""

    layer: str
    kind: str
    costs: Mapping[str, float]
    scheme: str


@dataclass(frozen=True)
class MixedReport:
    """The result: figures of the mix, and those of the lowest and the highest scheme in all units.

    ``bits``: bits per weight.  ``predicted``: the divergence by the sum of the units.  ``speed``: measured tokens per
    second, for a budget of speed.
    """

    levels: tuple[str, ...]
    units: tuple[UnitResult, ...]
    num_bytes: int
    bits: float
    divergence: MeanDivergence
    predicted: float
    lowest: tuple[float, MeanDivergence]
    highest: tuple[float, MeanDivergence]
    judged_tokens: int
    speed: float | None
    recipe: Mapping[str, Any]
    seconds: float

    def counts(self) -> dict[str, int]:
        """Return the number of units in each scheme."""
        return _counts(self.levels, self.units)


def quantize_mixed(
    source: Path | str,
    out: Path | str,
    scheme: str,
    options: MixedOptions,
    progress: ProgressCallback | None = None,
    speed: SpeedProbe | None = None,
) -> MixedReport:
    """Write the folder ``out`` in which ``scheme`` is the lowest of several, within a budget.

    A killed run leaves its finished measurements in a hidden folder beside ``out``; the same command continues.
    ``speed`` is needed for a budget of speed.  Raises what ``quantize_with_data`` raises, and InvalidArgumentError with
    the code ``budget_unreachable``, which names the nearest value that can be reached.
    """
    start, final, source = time.monotonic(), Path(out), Path(source)
    check_new_folder(final)
    checkpoint = open_mapped(source)
    levels = check_mixed(checkpoint, final, scheme, options)
    inputs = {**asdict(options), "levels": levels, "calibration": file_stamp(options.calibration)}
    inputs |= {"budget": None, "threads": None}  # the measurements do not depend on them
    work = Workspace(final, inputs, checkpoint)
    judge = Judge(source, work, options.threads, progress)
    judge.prepare(options.calibration, options.num_tokens)
    made = make_levels(source, checkpoint, work.folder, levels, options.method, (judge.seen, options.threads), progress)
    mix = _Mix(made, judge, work, options, progress)
    mix.measure()
    schemes, predicted = mix.choose(options.budget, speed)
    report = mix.finish(final, schemes, predicted, options.budget, speed)
    work.remove()
    return MixedReport(**report, seconds=time.monotonic() - start)


def check_mixed(checkpoint: Checkpoint, final: Path, scheme: str, options: MixedOptions) -> Sequence[str]:
    """Return the levels after checking all options and the files that they name; errors of ``quantize_mixed``."""
    quantizing_scheme(scheme)
    check_float_weights(checkpoint)
    levels = options.levels or default_levels(scheme, checkpoint.dtype)
    _check_levels(levels, scheme, options.method, checkpoint)
    if options.calibration is not None:
        check_texts(options.calibration)
    check_outputs(final, None)
    plan = plan_weights(checkpoint, quantizing_scheme(scheme))
    check_amount(checkpoint, plan, options.method.split("+"), options.calibration, options.num_tokens)
    return levels


def _check_levels(levels: Sequence[str], scheme: str, method: str, checkpoint: Checkpoint) -> None:
    """Refuse levels that do not begin with the scheme, do not rise, or that nothing can be put together from."""
    rows = [find_scheme(level) for level in levels]
    own = checkpoint.dtype
    is_known = all(row.quantized or row.name == own for row in rows)
    if levels[0] != scheme or len(levels) < 2 or not is_known or len(set(levels)) < len(levels):
        raise InvalidArgumentError(
            f"levels: expected {scheme} and higher schemes, of w8a16, w8a8, w8a8_h32, w4a16 and {own}, the type of the "
            f"checkpoint; got {','.join(levels)}",
            param="levels",
        )
    bits = [row.weight_bits for row in rows]
    if bits != sorted(set(bits)):
        raise InvalidArgumentError(
            f"levels: expected schemes with ever more bits, got {','.join(levels)}", param="levels"
        )
    if "smooth" in method and not all(row.quantized for row in rows):
        raise InvalidArgumentError(
            f"levels: expected schemes of integers with --method {method}, which changes other tensors too, got {own}",
            param="levels",
        )


class _Mix:
    """The measurements of a model's units, and the choice by them."""

    def __init__(
        self, levels: Levels, judge: Judge, work: Workspace, options: MixedOptions, progress: ProgressCallback | None
    ) -> None:
        self._levels, self._judge, self._work, self._options, self._tell = levels, judge, work, options, progress
        self._known: dict[str, list[float]] = work.read("divergences.json") or {}
        self._graph: Graph | None = None
        self.units: list[WeightUnit] = []
        self.costs: Costs = {}

    def _rows(self, unit: WeightUnit) -> tuple[str, ...]:
        """Return the schemes that a unit may have, the lowest first."""
        return self._levels.schemes_of(unit.tensors)

    def _uniform(self, place: int) -> dict[str, str]:
        """Return the lowest (0) or the highest (-1) scheme of each unit, by its name."""
        return {unit.name: self._rows(unit)[place] for unit in self.units}

    def _divergence(self, key: str, schemes: Mapping[str, str]) -> MeanDivergence:
        """Return the divergence with a scheme for each unit, measured once."""
        if key not in self._known:
            value = self._judge.divergence(self._compose(schemes))
            self._known[key] = [value.mean, value.error, value.same_top]
            self._work.write("divergences.json", self._known)
        return MeanDivergence(*self._known[key])

    def _compose(self, schemes: Mapping[str, str], recipe: Mapping[str, Any] | None = None) -> Checkpoint:
        named = {name: schemes[unit.name] for unit in self.units for name in unit.tensors}
        return self._levels.compose(named, recipe)

    def _key(self, schemes: Mapping[str, str]) -> str:
        return ",".join(f"{name}={scheme}" for name, scheme in sorted(schemes.items()))

    def measure(self) -> None:
        """Measure the divergence that each unit adds in each scheme below the highest."""

        def see(bundle: Path) -> None:
            self._graph = read_graph(bundle)[0]

        self._judge.look(self._levels.base, see)
        schemes = dict.fromkeys((*self._levels.schemes, find_scheme(self._levels.schemes[0]).head, HEAD_BLOCKS))
        self.units = find_units(
            self.graph, tuple(schemes), self._levels.quantized_names(), self._options.units == "tensor"
        )
        if not self.units:
            raise UnsupportedError("model: expected weights to quantize, got none", param="model")
        top = self._uniform(-1)
        highest = self._divergence("highest", top).mean
        trials = [(unit, scheme) for unit in self.units for scheme in self._rows(unit)[:-1]]
        costs: dict[str, dict[str, float]] = {unit.name: {self._rows(unit)[-1]: 0.0} for unit in self.units}
        for done, (unit, scheme) in enumerate(trials):
            if self._tell is not None:
                self._tell(Progress("sensitivity", done, len(trials), "units", f"{unit.name} in {scheme}"))
            value = self._divergence(f"{unit.name} {scheme}", top | {unit.name: scheme}).mean
            costs[unit.name][scheme] = value - highest
        self.costs = costs

    @property
    def graph(self) -> Graph:
        """The graph of the lowest scheme."""
        if self._graph is None:
            raise UnsupportedError("model: expected a graph", param="model")
        return self._graph

    def _num_bytes(self, schemes: Mapping[str, str]) -> int:
        """Return the bytes of all weights with a scheme for each unit."""
        total = sum(weight.num_bytes for weight in self.graph.weights.values())
        stored = {unit.name: self._stored_scheme(unit) for unit in self.units}
        return total + sum(
            unit.num_bytes[schemes[unit.name]] - unit.num_bytes[stored[unit.name]] for unit in self.units
        )

    def _stored_scheme(self, unit: WeightUnit) -> str:
        """Return the scheme of a unit in the folder of the lowest scheme, whose head has 8 bits."""
        lowest = find_scheme(self._levels.schemes[0])
        is_head = self._levels.base.tensors[unit.tensors[0]].dtype == "i8" and lowest.weight_bits == 4
        return lowest.head if is_head else lowest.name

    def _bits(self, num_bytes: float) -> float:
        return 8 * num_bytes / sum(weight.rows * weight.cols for weight in self.graph.weights.values())

    def _predict(self, schemes: Mapping[str, str]) -> float:
        """Return the divergence by the sum of the units."""
        highest = self._divergence("highest", self._uniform(-1)).mean
        return highest + sum(self.costs[name][scheme] for name, scheme in schemes.items())

    def choose(self, budget: Budget, speed: SpeedProbe | None) -> tuple[dict[str, str], float]:
        """Return the scheme of each unit, by name, and the divergence that the units add up to."""
        if budget.max_kl is not None:
            schemes = self._within_divergence(budget.max_kl)
        elif budget.min_speed is not None:
            schemes = self._at_speed(budget.min_speed, speed)
        else:
            schemes = self._within_bytes(budget)
        return schemes, self._predict(schemes)

    def _within_bytes(self, budget: Budget) -> dict[str, str]:
        lowest = self._num_bytes(self._uniform(0))
        limit = budget.num_bytes if budget.num_bytes is not None else self._bytes_of_bits(budget.bits or 0.0)
        if limit < lowest:
            in_words = f"{self._bits(lowest):.3f} bits" if budget.bits is not None else f"{lowest:,} bytes"
            raise _unreachable("budget", f"at least {in_words}, all weights in {self._levels.schemes[0]}", budget.text)
        return choose_schemes(self.units, self._rows, self.costs, limit - lowest)

    def _bytes_of_bits(self, bits: float) -> int:
        return int(bits * sum(weight.rows * weight.cols for weight in self.graph.weights.values()) / 8)

    def _within_divergence(self, limit: float) -> dict[str, str]:
        """Return the first steps whose measured divergence is small enough."""
        steps = greedy_steps(self.units, self._rows, self.costs)

        def schemes_of(count: int) -> dict[str, str]:
            return apply_steps(self.units, self._rows, steps[:count])

        def is_enough(count: int) -> bool:
            schemes = schemes_of(count)
            return self._divergence(self._key(schemes), schemes).mean <= limit

        count = smallest_prefix(len(steps), is_enough)
        if count is not None:
            return schemes_of(count)
        best = self._divergence(self._key(schemes_of(len(steps))), schemes_of(len(steps))).mean
        top = self._levels.schemes[-1]
        raise _unreachable("max_kl", f"at least {best:.3g}, with weights up to {top}", f"{limit:g}")

    def _at_speed(self, wanted: float, speed: SpeedProbe | None) -> dict[str, str]:
        """Return the steps that the time per token allows, which grows evenly with the bytes that are read.

        It is measured with all units in the lowest and in the highest scheme.
        """
        if speed is None or has_experts(self.graph):
            raise UnsupportedError(
                "min_speed: expected a model that reads all of its weights for each token, got a mixture of experts",
                param="min_speed",
            )
        ends = [self._uniform(0), self._uniform(-1)]
        speeds = [self._judge.look(self._compose(end), speed) for end in ends]
        low, high = (1 / value for value in speeds)
        if wanted > speeds[0]:
            fastest = f"at most {speeds[0]:.1f} tokens/s, measured with all weights in {self._levels.schemes[0]}"
            raise _unreachable("min_speed", fastest, f"{wanted:g}")
        share = 1.0 if high <= low else min(1.0, (1 / wanted - low) / (high - low))
        extra = self._num_bytes(ends[1]) - self._num_bytes(ends[0])
        return choose_schemes(self.units, self._rows, self.costs, share * extra)

    def finish(
        self, final: Path, schemes: dict[str, str], predicted: float, budget: Budget, speed: SpeedProbe | None
    ) -> dict[str, Any]:
        """Measure the mix, write its folder, and return the fields of the report."""
        divergence = self._divergence(self._key(schemes), schemes)
        ends = [
            (self._bits(self._num_bytes(end)), self._divergence(key, end))
            for key, end in ((self._key(self._uniform(0)), self._uniform(0)), ("highest", self._uniform(-1)))
        ]
        num_bytes = self._num_bytes(schemes)
        results = [UnitResult(unit.layer, unit.kind, self.costs[unit.name], schemes[unit.name]) for unit in self.units]
        recipe = {
            **self._levels.recipe,
            "budget": budget.text,
            "mix": ", ".join(f"{level} {count}" for level, count in _counts(self._levels.schemes, results).items()),
            "bits_per_weight": round(self._bits(num_bytes), 4),
            "divergence": float(f"{divergence.mean:.4g}"),
            "judged_tokens": self._judge.held.num_tokens,
            "judged_sha256": self._judge.held.digest,
            "units": {
                unit.name: {
                    "scheme": schemes[unit.name],
                    "costs": {key: float(f"{value:.4g}") for key, value in self.costs[unit.name].items()},
                }
                for unit in self.units
            },
        }
        mixed = self._compose(schemes, recipe)
        measured = self._judge.look(mixed, speed) if budget.min_speed is not None and speed is not None else None
        if measured is not None and budget.min_speed is not None and measured < budget.min_speed:
            raise _unreachable("min_speed", f"at most {measured:.1f} tokens/s, measured with the mix", budget.text)
        write_checkpoint(mixed, final)
        return {
            "levels": self._levels.schemes, "units": tuple(results), "num_bytes": num_bytes,
            "bits": self._bits(num_bytes), "divergence": divergence, "predicted": predicted, "lowest": ends[0],
            "highest": ends[1], "judged_tokens": self._judge.held.num_tokens, "speed": measured, "recipe": recipe,
        }  # fmt: skip


def _counts(levels: Sequence[str], units: Sequence[UnitResult]) -> dict[str, int]:
    """Return the number of units in each of the levels, and of a head in blocks."""
    schemes = [*levels, *(unit.scheme for unit in units)]
    return {scheme: sum(unit.scheme == scheme for unit in units) for scheme in schemes}


def _unreachable(field: str, expected: str, found: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{field}: expected {expected}; got {found}", param=field, code="budget_unreachable")
