"""Quantize a checkpoint with calibration data: weighted rounding (imatrix) and GPTQ."""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.calibration.arguments import MethodArguments
from penstock.calibration.awq import scaling_of
from penstock.calibration.bundle import open_calibrated
from penstock.calibration.collect import CalibrationProgram, LinearNode, linear_groups, product_sums
from penstock.calibration.keys import check_family, smooth_keys
from penstock.calibration.outputs import check_outputs
from penstock.calibration.smooth import NO_SMOOTHING, find_folds, smoothing_of
from penstock.calibration.texts import (
    DEFAULT_TOKENS,
    MIN_TOKENS,
    CalibrationData,
    calibration_data,
    check_max_tokens,
    check_num_tokens,
)
from penstock.calibration.unfinished import UnfinishedWeights
from penstock.checkpoint.folder import Checkpoint
from penstock.checkpoint.gguf.imatrix import is_imatrix, read_imatrix, write_imatrix
from penstock.checkpoint.quantize import QuantizeReport, check_float_weights, plan_weights, quantize_checkpoint
from penstock.config import check_choice
from penstock.core.native import Context, QuantizedRows
from penstock.errors import InvalidArgumentError
from penstock.models.mapped import open_mapped
from penstock.quant.folder import check_new_folder
from penstock.quant.hadamard import rotate_inputs, rotate_products, rotate_weight, spread_squares
from penstock.quant.input_statistics import InputStatistics
from penstock.quant.matrix import quantize_rows
from penstock.quant.methods.gptq import gptq_round, inverse_factor
from penstock.quant.methods.weighted import normalized, round_weighted
from penstock.quant.mixed_schemes import is_head
from penstock.quant.product_sums import ProductSums
from penstock.quant.scheme import Scheme, quantizing_scheme
from penstock.runtime.build import Progress, ProgressCallback

__all__ = [
    "METHODS", "MIN_EXPERT_TOKENS", "SCALING_METHODS", "DataOptions", "DataReport", "check_amount", "check_data",
    "quantize_with_data",
]  # fmt: skip

METHODS: Final = (
    "imatrix", "gptq", "smooth", "smooth+imatrix", "smooth+gptq", "awq", "awq+imatrix", "awq+gptq",
)  # fmt: skip
SCALING_METHODS: Final = ("smooth", "awq")
"""Methods that fold scales into weights and then round to nearest; experts have no folds."""


MIN_EXPERT_TOKENS: Final = 32
"""With fewer, the mean square of an input is off by a quarter and more: sqrt(2 / n) of a normal one."""


@dataclass(frozen=True)
class DataOptions:
    """How to quantize with data.

    ``method``: one of ``METHODS``.  ``calibration``: a file of texts (``calibration.texts``); None samples texts from
    the model.  For imatrix it may be an importance matrix of llama.cpp.
    ``num_tokens``: use this many tokens of it at most.  ``threads``: 0 is all allowed cores.  ``imatrix_out``: a file
    to which the statistics are written, as an importance matrix in GGUF.  ``data``: sequences to use instead of
    ``calibration``.  ``arguments``: those of single methods.  ``blacklist``: of ``checkpoint.quantize.plan_weights``.
    ``smooth_keys``: also make the dimensions of keys more equal, for KV pages of int8 (``calibration.keys``).
    ``head``, ``embedding``: the schemes of the output head and of an embedding that is not the head, of
    ``checkpoint.quantize.plan_weights``.  ``exportable``: of ``quant.scheme.quantizing_scheme``.
    """

    method: str
    calibration: Path | None = None
    num_tokens: int = DEFAULT_TOKENS
    threads: int = 0
    imatrix_out: Path | None = None
    data: CalibrationData | None = None
    arguments: MethodArguments = field(default_factory=MethodArguments)
    blacklist: tuple[str, ...] = ()
    smooth_keys: bool = False
    head: str | None = None
    exportable: bool = False
    embedding: str | None = None

    def __post_init__(self) -> None:
        """Refuse an unknown method, and too few tokens."""
        check_choice("method", self.method, METHODS)
        check_max_tokens(self.num_tokens)

    @property
    def steps(self) -> tuple[str, ...]:
        """The methods that are applied one after another."""
        return tuple(self.method.split("+"))


@dataclass(frozen=True)
class DataReport:
    """The result of ``quantize_with_data``: the files, the calibration data, and the weights that it said nothing of.

    ``without_data`` are rounded to nearest, experts that saw fewer than ``MIN_EXPERT_TOKENS`` tokens included.
    ``without_gptq`` are rounded by weighted rounding, since their Hessian has no factor, or since the expert saw fewer
    tokens than it has columns.  ``expert_tokens``: how many each routed expert saw, by weight.
    """

    files: QuantizeReport
    recipe: Mapping[str, Any]
    without_data: tuple[str, ...]
    without_gptq: tuple[str, ...]
    seconds: float
    expert_tokens: Mapping[str, int] = field(default_factory=dict)


def quantize_with_data(
    source: Path | str, out: Path | str, scheme: str, options: DataOptions, progress: ProgressCallback | None = None
) -> DataReport:
    """Write the folder ``out`` from a checkpoint folder or GGUF file, with integers chosen by calibration data.

    A killed run of GPTQ leaves its finished weights in a hidden folder beside ``out``; the same command continues with
    them.  Raises what ``quantize_checkpoint`` raises, and InvalidArgumentError for calibration data that is too small.
    """
    start = time.monotonic()
    row, final = quantizing_scheme(scheme, options.exportable), Path(out)
    check_new_folder(final)
    checkpoint = open_mapped(source)
    plan = check_data(checkpoint, final, scheme, options)
    tell = progress or _ignore
    file = options.calibration
    if file is not None and is_imatrix(file):
        statistics = _read_statistics(file, checkpoint, plan)
        rounding = _DataRounding(statistics, _recipe(options, statistics), plan)
    else:
        rounding = _calibrated(checkpoint, Path(source), final, (row, plan), options, progress)
    if options.imatrix_out is not None:
        write_imatrix(options.imatrix_out, rounding.statistics, checkpoint.config.str("model_type"))
    names = tuple(name for name in plan if not rounding.has_data(name))
    rounding.note_left(options.steps, names)
    report = quantize_checkpoint(
        checkpoint,
        final,
        row,
        lambda done, total: tell(Progress("quantize", done, total)),
        rounding,
        options.blacklist,
        options.head,
        options.embedding,
    )
    if rounding.unfinished is not None:
        rounding.unfinished.remove()
    seconds = time.monotonic() - start
    tokens = {name: count for name, count in rounding.statistics.expert_tokens.items() if name in plan}
    return DataReport(report, rounding.recipe, names, tuple(rounding.without_gptq), seconds, tokens)


def check_data(checkpoint: Checkpoint, final: Path, scheme: str, options: DataOptions) -> dict[str, Scheme]:
    """Return the scheme of each weight after checking all options and files; errors of ``quantize_with_data``."""
    check_outputs(final, options.imatrix_out)
    _check_calibration(options)
    check_float_weights(checkpoint)
    if options.smooth_keys:
        check_family(checkpoint)
    row = quantizing_scheme(scheme, options.exportable)
    plan = plan_weights(checkpoint, row, options.blacklist, options.head, options.embedding)
    if options.data is None:
        check_amount(checkpoint, plan, options.steps, options.calibration, options.num_tokens)
    return plan


def check_amount(
    checkpoint: Checkpoint, plan: Mapping[str, Scheme], steps: Collection[str], file: Path | None, limit: int
) -> None:
    """Refuse too few tokens for the methods ``steps`` before anything is computed; InvalidArgumentError.

    ``plan``: the scheme of each weight.  ``file``: the texts; None samples ``limit`` tokens, the most that are used.
    """
    rounded = [name for name in plan if "gptq" in steps and not plan[name].in_blocks and ".experts." not in name]
    cols = max((checkpoint.tensors[name].shape[1] for name in rounded if not is_head(name)), default=0)
    num_tokens = limit
    if file is not None and not is_imatrix(file):
        num_tokens = min(limit, check_num_tokens(checkpoint.side_files(), file, max(cols, MIN_TOKENS)))
    _check_tokens(cols, num_tokens, limit)


def _check_tokens(cols: int, num_tokens: int, limit: int | None) -> None:
    """Refuse fewer tokens than the widest weight that GPTQ rounds has columns: its Hessian would have no inverse."""
    if num_tokens >= cols:
        return
    param = "calibration_tokens" if limit is not None and limit < cols else "calibration"
    found = f"{limit}; raise it" if param == "calibration_tokens" else f"{num_tokens}; pass more text"
    raise InvalidArgumentError(
        f"{param}: expected at least {cols} tokens for gptq, as many as the widest weight has columns, got "
        f"{found}, or use --method imatrix",
        param=param,
        code="too_few_tokens",
    )


def _check_calibration(options: DataOptions) -> None:
    """Refuse a file that does not exist or does not fit the method."""
    file = options.calibration
    if file is None:
        return
    if not is_imatrix(file):
        return
    reason = "smooth_keys" if options.smooth_keys else None if options.method == "imatrix" else options.method
    if reason is not None:
        raise InvalidArgumentError(
            f"calibration: expected texts for {reason}, got the importance matrix {file}", param="calibration"
        )


def _read_statistics(file: Path, checkpoint: Checkpoint, plan: Mapping[str, Scheme]) -> InputStatistics:
    """Read an importance matrix, and compare its columns with the checkpoint's."""
    statistics = read_imatrix(file, checkpoint.config.str("model_type"))
    for name in plan:
        inputs, cols = statistics.weights.get(name), checkpoint.tensors[name].shape[1]
        if inputs is not None and len(inputs.squares) != cols:
            raise InvalidArgumentError(
                f"calibration: expected {cols} columns of {name}, got {len(inputs.squares)} in {file}, which is of "
                "another model",
                param="calibration",
            )
    return statistics


def _calibrated(
    checkpoint: Checkpoint,
    source: Path,
    final: Path,
    weights: tuple[Scheme, Mapping[str, Scheme]],
    options: DataOptions,
    progress: ProgressCallback | None,
) -> _DataRounding:
    """Run the calibration data, and for GPTQ choose the integers of each weight."""
    scheme, plan = weights
    with open_calibrated(source, options.threads, progress) as (bundle, llm):
        data = options.data or calibration_data(llm, options.calibration, options.num_tokens)
        llm.close()  # its pages of the bundle would count as memory of this process a second time
        with CalibrationProgram(bundle, data, options.threads) as program:
            passes = _Passes(data.num_tokens, progress or _ignore)
            products = _first_products(program, plan, options)
            statistics = program.statistics(passes.begin("statistics"), products)
            rounding = _DataRounding(statistics, _recipe(options, statistics), plan)
            if "smooth" in options.steps:
                strength = options.arguments.strength
                rounding.smoothing = smoothing_of(checkpoint, find_folds(program.graph), statistics, strength, plan)
            if "awq" in options.steps:
                grid = options.arguments.grid
                rounding.smoothing = scaling_of(checkpoint, program, plan, grid, passes.begin)
            if options.smooth_keys:
                rounding.smoothing = smooth_keys(checkpoint, program, rounding.smoothing, passes.begin("keys"))
            if "imatrix" in options.steps and scheme.hadamard:
                rounding.rotated_squares = _rotated_squares(program, rounding, passes, plan)
            if "gptq" in options.steps:
                unfinished = UnfinishedWeights(final, _unfinished_key(scheme, options, rounding), checkpoint)
                _GptqWork(checkpoint, plan, rounding, unfinished, options).run(program, passes, products)
    return rounding


def _first_products(
    program: CalibrationProgram, plan: Mapping[str, Scheme], options: DataOptions
) -> dict[LinearNode, ProductSums]:
    """Return empty sums for the linears of GPTQ whose Hessians the pass of the statistics adds up, too.

    There are none beside awq, whose own products need the memory, and none of experts, of which the statistics tell
    whether their tokens suffice.
    """
    if options.steps not in (("gptq",), ("smooth", "gptq")):
        return {}
    rounded = [
        own
        for own in program.linears
        if own.expert < 0 and any(name in plan and not plan[name].in_blocks for name in own.names)
    ]
    groups = linear_groups(rounded, program.max_len)
    return product_sums(groups[0]) if groups else {}


def _rotated_squares(
    program: CalibrationProgram, rounding: _DataRounding, passes: _Passes, plan: Mapping[str, Scheme]
) -> dict[str, NDArray[np.float32]]:
    """Return the mean squares of the columns of the inputs, folded and rotated, by the names of the weights."""
    linears = [own for own in program.linears if any(name in plan and plan[name].hadamard for name in own.names)]
    squares = {linear: np.zeros(linear.cols) for linear in linears}
    factors = {linear: rounding.smoothing.factors_of(linear.names[0], linear.cols) for linear in linears}
    for inputs in program.inputs(linears, passes.begin("rotated statistics")):
        for own, x in inputs.items():
            squares[own] += np.square(rotate_inputs(x * factors[own])).sum(axis=0, dtype=np.float64)
    return {
        name: (squares[own] / max(rounding.statistics.weights[name].count, 1)).astype(np.float32)
        for own in linears
        for name in own.names
    }


def _unfinished_key(scheme: Scheme, options: DataOptions, rounding: _DataRounding) -> dict[str, Any]:
    """Return what finished weights depend on, the factors that were folded into them included."""
    digest = hashlib.sha256()
    for part in (rounding.smoothing.columns, rounding.smoothing.rows):
        for name in sorted(part):
            digest.update(name.encode() + part[name].tobytes())
    key = {"scheme": scheme.name, **rounding.recipe, "blacklist": list(options.blacklist), "head": options.head}
    return {**key, "factors": digest.hexdigest()}


def _ignore(progress: Progress) -> None:
    del progress


def _recipe(options: DataOptions, statistics: InputStatistics) -> dict[str, Any]:
    recipe: dict[str, Any] = {
        "method": options.method,
        "calibration": statistics.source,
        "calibration_tokens": statistics.num_tokens,
        "calibration_sha256": statistics.digest,
    }
    recipe |= {"exportable": True} if options.exportable else {}
    recipe |= {"smooth_keys": True} if options.smooth_keys else {}
    recipe |= {"strength": options.arguments.strength} if "smooth" in options.steps else {}
    if counts := list(statistics.expert_tokens.values()):
        recipe |= {"expert_tokens_least": min(counts), "expert_tokens_median": int(np.median(counts))}
    return recipe | ({"damping": options.arguments.damping} if "gptq" in options.steps else {})


class _Passes:
    """The progress of passes over the calibration data."""

    def __init__(self, num_tokens: int, tell: ProgressCallback) -> None:
        self._num_tokens, self._tell = num_tokens, tell

    def begin(self, stage: str, note: str = "") -> Callable[[int], None]:
        """Return a function that counts the tokens of a pass."""
        done = 0

        def count(length: int) -> None:
            nonlocal done
            done += length
            self._tell(Progress(stage, done, self._num_tokens, "tokens", note))

        return count


def _kinds(names: Collection[str]) -> list[str]:
    """Return the kinds of weights with their numbers: "layers.*.mlp.experts.*.up_proj (64)"."""
    kinds = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names)
    return [f"{kind.removeprefix('model.')} ({count})" for kind, count in kinds.items()]


class _DataRounding:
    """Rounds each weight with its statistics; GPTQ's results are taken as they are."""

    def __init__(self, statistics: InputStatistics, recipe: Mapping[str, Any], plan: Mapping[str, Scheme]) -> None:
        self.statistics, self.recipe, self._plan = statistics, recipe, plan
        self.unfinished: UnfinishedWeights | None = None
        self.smoothing = NO_SMOOTHING
        self.without_gptq: list[str] = []
        self.rotated_squares: dict[str, NDArray[np.float32]] = {}
        """The mean squares of the columns of rotated inputs, which those of the inputs do not tell."""

    def note_left(self, steps: Collection[str], without_data: Collection[str]) -> None:
        """Add to the recipe what the methods ``steps`` left as it was, with the numbers of weights by kind."""
        left: dict[str, Collection[str]] = {
            step: [name for name in self._plan if name not in self.smoothing.columns and not is_head(name)]
            for step in SCALING_METHODS
            if step in steps
        }
        left |= {"gptq": self.without_gptq} if "gptq" in steps else {}
        left["data"] = without_data
        named = {step: ", ".join(_kinds(names)) for step, names in left.items()}
        self.recipe = {**self.recipe, **{f"without_{step}": kinds for step, kinds in named.items() if kinds}}

    def has_data(self, name: str) -> bool:
        """Return True if the weight had an input that was not zero, and a routed expert saw enough of them."""
        if self._plan[name].in_blocks:
            return self.column_weights(name) is not None
        inputs = self.statistics.weights.get(name)
        if self.statistics.expert_tokens.get(name, MIN_EXPERT_TOKENS) < MIN_EXPERT_TOKENS:
            return False
        return inputs is not None and bool(inputs.squares.any())

    def values(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[np.float32]:
        """Return the values of a matrix, smoothed."""
        return self.smoothing.values(name, data, dtype)

    def column_weights(self, name: str) -> NDArray[np.float32] | None:
        """Return the weights of the columns of a head in blocks: the mean squares of its inputs, if there are any."""
        inputs = self.statistics.heads.get(name, self.statistics.weights.get(name))
        if inputs is None or not inputs.squares.any() or self.recipe["method"] in SCALING_METHODS:
            return None
        return normalized(self.smoothing.inputs_of(name, inputs).mean_squares)

    def tensor(self, name: str, data: NDArray[Any], dtype: str) -> NDArray[Any]:
        """Return a tensor that keeps its type, smoothed; ``rows`` smooths those that it rounds."""
        return data if name in self._plan else self.smoothing.apply(name, data, dtype)

    def rows(
        self, context: Context, name: str, matrix: NDArray[Any], dtype: str, scheme: Scheme
    ) -> Iterator[QuantizedRows]:
        """Yield the integers of a weight."""
        finished = None if self.unfinished is None else self.unfinished.read(name, matrix.shape, scheme)
        if finished is not None:
            yield finished
        elif self.has_data(name) and self.recipe["method"] not in SCALING_METHODS:
            yield self.weighted(context, name, self.smoothing.values(name, matrix, dtype), scheme)
        elif name in self.smoothing.columns or name in self.smoothing.rows:
            yield from quantize_rows(context, scheme, self.smoothing.values(name, matrix, dtype), "f32")
        else:
            yield from quantize_rows(context, scheme, matrix, dtype)

    def weighted(self, context: Context, name: str, matrix: NDArray[np.float32], scheme: Scheme) -> QuantizedRows:
        """Return the integers of a weight, rounded with its statistics."""
        inputs = self.smoothing.inputs_of(name, self.statistics.weights[name])
        if not scheme.hadamard:
            return round_weighted(context, matrix, scheme, inputs.mean_squares)
        squares = self.rotated_squares.get(name)
        means = spread_squares(inputs.mean_squares) if squares is None else squares
        return round_weighted(context, rotate_weight(matrix), scheme, means)


class _GptqWork:
    """GPTQ over all weights with data, as many at a time as there is memory for their Hessians."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Mapping[str, Scheme],
        rounding: _DataRounding,
        unfinished: UnfinishedWeights,
        options: DataOptions,
    ) -> None:
        self._checkpoint, self._plan, self._rounding, self._options = checkpoint, plan, rounding, options
        self._unfinished = rounding.unfinished = unfinished

    def run(self, program: CalibrationProgram, passes: _Passes, products: dict[LinearNode, ProductSums]) -> None:
        """Compute the integers of each weight, and keep them in files.

        ``products``: the Hessians that are known already; they are taken out, so that their memory becomes free.
        """
        linears = [linear for linear in program.linears if self._open_names(linear)]
        cols = max((linear.cols for linear in linears if linear.expert < 0), default=0)
        limit = None if self._options.data is not None else self._options.num_tokens
        _check_tokens(cols, program.data.num_tokens, limit)
        few = {linear for linear in linears if self._num_tokens(linear, program) < linear.cols}
        self._rounding.without_gptq += [
            name for linear in linears if linear in few for name in self._open_names(linear)
        ]
        linears = [linear for linear in linears if linear not in few]
        groups = linear_groups([linear for linear in linears if linear not in products], program.max_len)
        with Context(program.threads) as context:
            self._round_all(context, program, linears, products)
            for number, group in enumerate(groups, 1):
                note = f"pass {number} of {len(groups)}"
                hessians = dict(program.hessians(group, passes.begin("hessians", note)))
                self._round_all(context, program, group, hessians)

    def _round_all(
        self,
        context: Context,
        program: CalibrationProgram,
        linears: Sequence[LinearNode],
        products: dict[LinearNode, ProductSums],
    ) -> None:
        """Round the linears whose Hessians are known, and free these."""
        program.rest()
        for linear in linears:
            if linear in products:
                self._round(context, linear, products.pop(linear).matrix())
        products.clear()

    def _open_names(self, linear: LinearNode) -> list[str]:
        return [
            name
            for name in linear.names
            if name in self._plan and not self._plan[name].in_blocks
            if self._rounding.has_data(name) and not self._is_finished(name)
        ]

    def _num_tokens(self, linear: LinearNode, program: CalibrationProgram) -> int:
        return self._rounding.statistics.expert_tokens.get(linear.names[0], program.data.num_tokens)

    def _is_finished(self, name: str) -> bool:
        return self._unfinished.read(name, self._checkpoint.tensors[name].shape, self._plan[name]) is not None

    def _round(self, context: Context, linear: LinearNode, hessian: NDArray[np.float32]) -> None:
        """Round the tensors of a weight together: their rows do not depend on each other."""
        names = self._open_names(linear)
        scheme = self._plan[names[0]]
        hessian = self._rounding.smoothing.hessian_of(names[0], hessian)
        if scheme.hadamard:
            hessian = rotate_products(hessian)
        try:
            factor, _ = inverse_factor(hessian, self._options.arguments.damping)
        except InvalidArgumentError:
            self._rounding.without_gptq += names
            return
        parts = [self._floats(name) for name in names]
        matrix = np.concatenate(parts)
        rows = gptq_round(context, rotate_weight(matrix) if scheme.hadamard else matrix, scheme, hessian, factor)
        start = 0
        for name, part in zip(names, parts, strict=True):
            own = slice(start, start + len(part))
            groups = None if rows.groups is None else rows.groups[own]
            self._unfinished.write(name, QuantizedRows(rows.q[own], rows.scales[own], groups))
            start += len(part)

    def _floats(self, name: str) -> NDArray[np.float32]:
        dtype = self._checkpoint.tensors[name].dtype
        values = self._rounding.smoothing.values(name, self._checkpoint.read(name), dtype).copy()
        self._checkpoint.release(name)
        return values
