"""Compare a network with what it was made from, and find the first node that computes something else."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.draft import Draft, Origin, Tensor
from penstock.graph.general.examples import example_sizes
from penstock.graph.general.lower import write_network
from penstock.graph.general.passes import optimise
from penstock.graph.general.sizes import as_text, evaluate, symbols_of
from penstock.graph.general.source import DraftSource
from penstock.graph.ir import DType
from penstock.networks.predictor import open_predictor

__all__ = ["Difference", "Inputs", "NetworkCheck", "check_network"]

Inputs = Sequence[npt.ArrayLike] | Mapping[str, npt.ArrayLike]
_Arrays = list[npt.NDArray[Any]]
_AT_ONCE: Final = 60
"""Values that are compared in one run: a program has at most 64 outputs."""
_LEAST_SCALE: Final = 1e-6
_MASK: Final = 1e30  # larger numbers are masks: they are no measure of the others


@dataclass(frozen=True)
class Difference:
    """How far a tensor is from that of the source.

    ``place`` is the output's name, or the place of a node in the source: the path of a module, or the name of a node of
    a file.  ``absolute`` is the largest difference, ``relative`` that divided by the largest number of the source,
    ``count`` how many of ``size`` numbers differ by more than the tolerance.
    """

    place: str
    absolute: float
    relative: float
    count: int
    size: int
    shape: tuple[int, ...]
    expected_shape: tuple[int, ...]

    def text(self) -> str:
        """Return a line."""
        if self.shape != self.expected_shape:
            return f"{self.place}: expected the shape {list(self.expected_shape)}, got {list(self.shape)}"
        return (
            f"{self.place}: {self.count} of {self.size} numbers differ, by up to {self.absolute:.3g} "
            f"({self.relative:.2g} of the largest)"
        )


@dataclass(frozen=True)
class NetworkCheck:
    """The result of ``CapturedNetwork.check``.

    ``outputs``: the largest difference of each output.  ``first``: the first node whose result differs by more than
    ``tolerance``, or the first output where every node before it agrees; None if all outputs agree.  ``is_rewritten``:
    the nodes agree one by one, and the network that is written, whose nodes are joined, does not.
    """

    source: str
    tolerance: float
    outputs: list[Difference]
    first: Difference | None = None
    is_rewritten: bool = False

    @property
    def passed(self) -> bool:
        """True if every output agrees."""
        return self.first is None

    def text(self) -> str:
        """Return what was compared, and what was found, in a line or two."""
        if self.first is None:
            most = max((output.relative for output in self.outputs), default=0.0)
            return f"as in {self.source}: the outputs differ by at most {most:.1e} of the largest number"
        lines = [output.text() for output in self.outputs if output.count]
        what = "the first node that differs, after nodes were joined" if self.is_rewritten else "the first that differs"
        return (
            f"not as in {self.source} (tolerance {self.tolerance:g}): {'; '.join(lines)}; {what}: {self.first.text()}"
        )

    def expect_passed(self) -> None:
        """Raise UnsupportedError (code "network_differs") with the first node that differs, if one does."""
        if self.first is not None:
            raise UnsupportedError(f"the network computes something else: {self.text()}", code="network_differs")


def check_network(
    draft: Draft, inputs: Inputs | None, tolerance: float | None, seed: int, *, winograd: bool = True
) -> NetworkCheck:
    """Compare a draft, which is not changed, with its source.  ``winograd``: as ``optimise`` takes it."""
    source = draft.source
    if source is None:
        raise UnsupportedError("check: the network has no source that can run", param="check")
    if tolerance is not None and not tolerance >= 0:
        raise InvalidArgumentError(f"tolerance: expected a number from 0, got {tolerance!r}", param="tolerance")
    cases = [_in_order(draft, inputs)] if inputs is not None else list(_seeded(draft, source, seed))
    worst: dict[str, Difference] = {}
    for number, arrays in enumerate(cases):
        try:
            expected = source.run(arrays)
        except Exception as error:  # of any class: it is the user's module, or a runtime's
            if number:
                continue  # sizes that the source does not take
            raise UnsupportedError(
                f"check: {source.name} fails on these inputs: {error}; give others", param="inputs"
            ) from error
        names = draft.source_outputs()
        for name, theirs in zip(names, expected, strict=False):
            if np.size(theirs) and np.asarray(theirs).dtype.kind == "f" and np.isnan(theirs).all():
                raise UnsupportedError(
                    f"check: output {name} of {source.name} is NaN throughout with these inputs; give others",
                    param="inputs",
                )
        limit = source.tolerance if tolerance is None else tolerance
        (found,) = _run([_optimised(draft, winograd)], arrays)
        differences = [
            _difference(f"output {name}", ours, theirs, limit)
            for name, ours, theirs in zip(names, _of_source(draft, found), expected, strict=True)
        ]
        for item in differences:
            worst[item.place] = max(worst.get(item.place, item), item, key=lambda d: (d.count > 0, d.relative))
        if any(item.count for item in differences):
            first, is_rewritten = _first(draft, source, arrays, limit, winograd)
            first = first or next(item for item in differences if item.count)
            return NetworkCheck(source.name, limit, list(worst.values()), first, is_rewritten)
    limit = source.tolerance if tolerance is None else tolerance
    return NetworkCheck(source.name, limit, list(worst.values()))


def _first(
    draft: Draft, source: DraftSource, arrays: _Arrays, limit: float, winograd: bool
) -> tuple[Difference | None, bool]:
    """Return the first node that differs: in the network as it was read, or else as it is written."""
    plain = draft.copy()
    plain.prune()
    difference = _first_in(plain, draft.origins, source, arrays, limit)
    if difference is not None:
        return difference, False
    difference = _first_in(_optimised(draft, winograd), draft.origins, source, arrays, limit)
    return difference, difference is not None


def _first_in(
    draft: Draft, origins: Sequence[Origin], source: DraftSource, arrays: _Arrays, limit: float
) -> Difference | None:
    computed = {id(tensor) for call in draft.calls for tensor in call.outputs}
    seen: dict[int, Origin] = {}
    for origin in origins:
        if id(origin.tensor) in computed:
            seen.setdefault(id(origin.tensor), origin)
    wanted = list(seen.values())
    for at in range(0, len(wanted), _AT_ONCE):
        part = wanted[at : at + _AT_ONCE]
        probe = draft.copy()
        probe.outputs = [origin.tensor for origin in part]
        probe.output_names = [probe.free_name(f"check.{i}") for i in range(len(part))]
        probe.prune()
        (found,) = _run([probe], arrays)
        expected = source.values(arrays, [origin.key for origin in part])
        for origin, ours in zip(part, found, strict=True):
            item = _difference(origin.place, _plain(origin.tensor, ours), expected[origin.key], limit)
            if item.count:
                return item
    return None


def _optimised(draft: Draft, winograd: bool) -> Draft:
    copy = draft.copy()
    optimise(copy, winograd=winograd)
    return copy


def _run(drafts: Sequence[Draft], arrays: _Arrays) -> list[_Arrays]:
    """Return the outputs of drafts, which are written as they are."""
    results = []
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        for number, draft in enumerate(drafts):
            path = Path(folder) / f"{number}.psm"
            write_network(draft, path, optimised=False)
            with open_predictor(path) as predictor:
                results.append(predictor.run(arrays))
    return results


def _plain(tensor: Tensor, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the numbers of a result of the core, which gives the bits of bf16."""
    if tensor.dtype != DType.BF16:
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)


def _of_source(draft: Draft, found: _Arrays) -> _Arrays:
    """Return the outputs that the source has, without what is behind selected boxes."""
    arrays = dict(zip(draft.output_names, map(_plain, draft.outputs, found), strict=True))
    for name, (axis, count) in draft.counts.items():
        arrays[name] = np.take(arrays[name], np.arange(int(arrays[count][0])), axis)
    return [arrays[name] for name in draft.source_outputs()]


def _difference(place: str, ours: npt.NDArray[Any], theirs: npt.NDArray[Any], limit: float) -> Difference:
    shapes = tuple(ours.shape), tuple(np.shape(theirs))
    size = int(np.size(theirs))
    if shapes[0] != shapes[1]:
        return Difference(place, np.inf, np.inf, max(size, 1), size, *shapes)
    if not size:
        return Difference(place, 0.0, 0.0, 0, 0, *shapes)
    x, y = np.asarray(ours).astype(np.float64), np.asarray(theirs).astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    gap[np.isnan(gap)] = np.inf  # NaN or infinity on one side
    if ours.dtype.kind in "iub" and np.asarray(theirs).dtype.kind in "iub":  # float64 rounds large integers
        gap = np.where(np.asarray(ours) == np.asarray(theirs), 0.0, np.maximum(gap, 1.0))
    finite = np.abs(y[np.isfinite(y) & (np.abs(y) < _MASK)])
    scale = max(float(finite.max(initial=0.0)), _LEAST_SCALE)
    is_float = np.asarray(ours).dtype.kind == "f"
    count = int(np.count_nonzero(gap > (limit * scale if is_float else 0.0)))
    return Difference(place, float(gap.max()), float(gap.max()) / scale, count, size, *shapes)


# Inputs.


def _in_order(draft: Draft, inputs: Inputs) -> _Arrays:
    names = [tensor.name for tensor in draft.inputs]
    by_name = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=False))
    if set(by_name) != set(names) or (not isinstance(inputs, Mapping) and len(inputs) != len(names)):
        raise InvalidArgumentError(f"inputs: expected {', '.join(names)}, got {', '.join(by_name)}", param="inputs")
    return [np.asarray(by_name[name]) for name in names]


def _seeded(draft: Draft, source: DraftSource, seed: int) -> Iterator[_Arrays]:
    """Yield inputs at the sizes of the example, and at others: those elements of an example, in another order."""
    random = np.random.default_rng(seed)
    examples = source.examples
    sizes = example_sizes(draft) if examples is None else _sizes_of(draft, examples)
    others = dict(sizes)
    for step, item in enumerate(draft.symbols(), 1):
        others[item.name] = min(sizes[item.name] + step, item.max)
    for chosen in (sizes, others):
        arrays = []
        for at, tensor in enumerate(draft.inputs):
            shape = tuple(evaluate(as_text(size), chosen) for size in tensor.shape)
            example = None if examples is None else examples[at]
            arrays.append(_numbers(tensor, shape, example, random))
        yield arrays


def _numbers(
    tensor: Tensor, shape: tuple[int, ...], example: npt.NDArray[Any] | None, random: np.random.Generator
) -> npt.NDArray[Any]:
    if example is not None and example.size:
        flat = example.reshape(-1)
        if example.dtype.kind != "f" or np.any(flat != flat[0]):
            return random.choice(flat, shape).reshape(shape)
    if tensor.dtype in (DType.F32, DType.F16, DType.BF16):
        numbers = random.standard_normal(shape, np.float32).reshape(shape)
        if tensor.dtype == DType.BF16:
            return (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return numbers.astype(np.float16 if tensor.dtype == DType.F16 else np.float32)
    types = {DType.BOOL: np.bool_, DType.I64: np.int64, DType.I32: np.int32, DType.I8: np.int8, DType.U8: np.uint8}
    return random.integers(0, 2, shape).astype(types[tensor.dtype]).reshape(shape)


def _sizes_of(draft: Draft, examples: Sequence[npt.NDArray[Any]]) -> dict[str, int]:
    """Return the named sizes of examples: each is that of an axis, or a multiple of it."""
    sizes: dict[str, int] = {}
    for tensor, example in zip(draft.inputs, examples, strict=True):
        for size, number in zip(tensor.shape, example.shape, strict=True):
            for item in symbols_of(size):
                sizes[item.name] = number // evaluate(as_text(size), {item.name: 1})
    return sizes
