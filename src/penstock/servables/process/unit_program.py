"""Runs a unit of Python stages in its process: rows in, functions called, rows or failures out.

If a stage that takes one instance at a time fails, only the request of that instance fails.  If a stage that takes a
batch fails, the primary reruns the batch by request to find the one at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.columns import encode_rows, pad_rows, read_column, texts_of
from penstock.servables.process.failures import InvalidResultError, failure_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.manifest_builder import StageCall, StageProgram
    from penstock.servables.api.specs import Spec

__all__ = ["run_batch", "to_spec_array"]


def to_spec_array(value: Any, spec: Spec, count: int | None, name: str) -> Any:
    """Convert a returned value to a new array [count, ...] of a spec.

    If ``count`` is None the value is that of one instance: the result is an array, or a single number, ``str`` or
    ``bytes``.  Numbers are cast within their kind (float64 to FP32, int64 to INT32) if they fit.  Raises
    InvalidResultError.
    """
    if spec.is_bytes:
        array = _to_bytes_array(value, spec, name)
    else:
        try:
            array = np.array(value)
        except (ValueError, TypeError) as error:
            raise InvalidResultError(f"{name} is not an array: {error}") from None
        if array.dtype != spec.dtype:
            array = _cast(array, spec, name)
    shape = array.shape
    if count is not None:
        if not shape or shape[0] != count:
            raise InvalidResultError(f"{name} has {shape[0] if shape else 'no'} rows for {count} instances")
        shape = shape[1:]
    if not spec.fits(shape):
        raise InvalidResultError(f"{name}: expected {spec}, got the shape {list(shape)} per instance")
    return array if array.ndim else array[()]


def _cast(array: NDArray[Any], spec: Spec, name: str) -> NDArray[Any]:
    if spec.datatype == "BF16" and array.dtype.kind == "f":
        raise InvalidResultError(f"{name}: expected the bits of BF16 as uint16, got {array.dtype}")
    if array.dtype.kind in "fiub" and (array.dtype.kind == "b" or spec.dtype.kind != "b"):
        with np.errstate(all="ignore"):
            cast = array.astype(spec.dtype)
        both_integer = array.dtype.kind in "iub" and spec.dtype.kind in "iu"
        if both_integer and np.array_equal(cast, array) and not ((cast < 0) != (array < 0)).any():
            return cast
        if spec.dtype.kind == "f":
            overflows = np.isinf(cast) & np.isfinite(array)
            if overflows.any():
                raise InvalidResultError(
                    f"{name} contains {array[overflows].flat[0]:g}, which overflows {spec.datatype}"
                )
            return cast
    if array.dtype.kind in "fiubc":
        raise InvalidResultError(f"{name}: expected {spec.datatype}, got {array.dtype}; the cast would lose data")
    raise InvalidResultError(f"{name}: expected {spec.datatype}, got {_describe(array)}")


def _describe(array: NDArray[Any]) -> str:
    """Describe an array that holds no numbers."""
    if array.dtype == object and array.size:
        odd = next((element for element in array.flat if not isinstance(element, Number)), array.flat[0])
        is_number = isinstance(odd, Number)  # a number without a numpy type, or in an array of objects
        return f"an array of objects such as {type(odd).__name__:.100}" if is_number else _describe_element(odd, array)
    kind = {"U": "text ", "S": "bytes "}.get(array.dtype.kind, "")
    return f"{kind}(numpy {array.dtype})" if kind else f"{array.dtype}"


def _describe_element(element: Any, array: NDArray[Any]) -> str:
    """Describe an element of an array, or the whole value if it has no dimensions."""
    kind = "None" if element is None else type(element).__name__
    return f"{'an array that contains ' if array.ndim else ''}{kind:.100}"


def _to_bytes_array(value: Any, spec: Spec, name: str) -> NDArray[Any]:
    expected = str if spec.datatype == "TEXT" else bytes
    array = np.empty((), object)
    if isinstance(value, str | bytes):
        array[()] = value
    else:
        array = np.array(value, object)
    for element in array.reshape(-1):
        if not isinstance(element, expected):
            raise InvalidResultError(
                f"{name}: expected {expected.__name__} for {spec.datatype}, got {_describe_element(element, array)}"
            )
    return array


def run_batch(program: StageProgram, batch: pb.Batch, note: Callable[[int, int], None]) -> pb.Result:
    """Return the outputs of a batch, or its failures.  ``note(call, instance)`` records the progress."""
    result = pb.Result()
    counts = tuple(batch.counts)
    unit = program.unit
    parts = [
        read_column(spec, column, counts) for spec, column in zip(unit.inputs, batch.inputs, strict=True)
    ]  # for each input, an array for each part
    if unit.rules is None:
        _run_each(program, counts, parts, result, note)
    else:
        _run_whole(program, counts, batch.size, parts, result, note)
    return result


def _own_copy(array: NDArray[Any], spec: Spec) -> NDArray[Any]:
    """Return a copy that a stage may change, with texts as ``str``."""
    return texts_of(array) if spec.datatype == "TEXT" else array.copy()


def _run_each(
    program: StageProgram,
    counts: Sequence[int],
    parts: list[list[NDArray[Any]]],
    result: pb.Result,
    note: Callable[[int, int], None],
) -> None:
    """Run the stages for one instance after the other."""
    columns: list[list[list[Any]]] = [[] for _ in program.outputs]  # for each output and each part, its rows
    position = 0
    for part, count in enumerate(counts):
        rows: list[list[Any]] = [[] for _ in program.outputs]
        stage = program.calls[0].stage.name
        failure: pb.Failure | None = None
        try:
            inputs = [_own_copy(arrays[part], spec) for arrays, spec in zip(parts, program.unit.inputs, strict=True)]
        except UnicodeDecodeError:
            failure = pb.Failure(part=part, instance=-1, stage=stage, kind="input", text="a text is not UTF-8")
            count = 0
        for index in range(count):
            values: dict[int, Any] = {value: array[index] for value, array in zip(program.inputs, inputs, strict=True)}
            failure = _call_stages(program.calls, values, None, 0, partial(_note_call, note, position + index))
            if failure is not None:
                failure.part, failure.instance = part, index
                break
            for value, row in zip(program.outputs, rows, strict=True):
                row.append(values[value])
        position += counts[part]
        if failure is None:
            failure = _check_equal_shapes(rows, part, stage)
        if failure is not None:
            result.failures.append(failure)
            continue
        for all_rows, row in zip(columns, rows, strict=True):
            all_rows.append(row)
    for spec, all_rows in zip(program.unit.outputs, columns, strict=True):
        column = result.outputs.add(data=encode_rows([row for part_rows in all_rows for row in part_rows], spec))
        if not spec.is_fixed:
            for part_rows in all_rows:
                column.sizes.extend(np.shape(part_rows[0]))


def _note_call(note: Callable[[int, int], None], instance: int, call: int) -> None:
    note(call, instance)


def _check_equal_shapes(rows: list[list[Any]], part: int, stage: str) -> pb.Failure | None:
    """Check that the instances of a request, which are rows of one tensor, have the same shape."""
    for output_rows in rows:
        shapes = {np.shape(row) for row in output_rows}
        if len(shapes) > 1:
            text = (
                f"its instances returned different shapes, {' and '.join(map(str, shapes))[:100]}; "
                "send one instance per request"
            )
            return pb.Failure(part=part, instance=-1, stage=stage, kind="input", text=text)
    return None


def _run_whole(
    program: StageProgram,
    counts: Sequence[int],
    size: int,
    parts: list[list[NDArray[Any]]],
    result: pb.Result,
    note: Callable[[int, int], None],
) -> None:
    """Run the stages once for the whole batch, padded to ``size`` rows."""
    num_rows = sum(counts)
    values: dict[int, Any] = {}
    try:
        for value, arrays, spec in zip(program.inputs, parts, program.unit.inputs, strict=True):
            values[value] = _own_copy(pad_rows(arrays, size - num_rows), spec)
    except UnicodeDecodeError:
        stage = program.calls[0].stage.name
        result.failures.add(part=-1, instance=-1, stage=stage, kind="input", text="a text is not UTF-8")
        return
    failure = _call_stages(program.calls, values, size, num_rows, partial(_note_call, note, -1))
    if failure is not None:
        failure.part = -1
        result.failures.append(failure)
        return
    for spec, value in zip(program.unit.outputs, program.outputs, strict=True):
        array = values[value][:num_rows]
        column = result.outputs.add(data=encode_rows([array], spec))
        if not spec.is_fixed:
            column.sizes.extend([*array.shape[1:]] * len(counts))


def _call_stages(
    calls: Sequence[StageCall], values: dict[int, Any], size: int | None, num_rows: int, note: Callable[[int], None]
) -> pb.Failure | None:
    """Call the stages in order; return the first failure.

    ``size``: the rows of the batch, of which ``num_rows`` are not padding; None for a single instance.
    """
    for index, call in enumerate(calls):
        note(index)
        stage = call.stage
        try:
            returned = stage.function(**_arguments(call, values))
            _store_outputs(call, returned, values, size)
        except Exception as error:
            return failure_of(error, stage.name, num_rows)
    return None


def _arguments(call: StageCall, values: dict[int, Any]) -> dict[str, Any]:
    arguments = {}
    for name, index, is_shared in zip(call.names, call.inputs, call.shared, strict=True):
        value = values[index]
        arguments[name] = value.copy() if is_shared and isinstance(value, np.ndarray) else value
    return arguments


def _store_outputs(call: StageCall, returned: Any, values: dict[int, Any], size: int | None) -> None:
    """Check what a stage returned, and store it in ``values``."""
    names = [*call.stage.outputs]
    if len(names) == 1 and not isinstance(returned, dict):
        outputs = [returned]
    elif isinstance(returned, dict):
        if set(returned) != set(names):
            raise InvalidResultError(f"it returned {', '.join(map(str, returned))}; its outputs are {', '.join(names)}")
        outputs = [returned[name] for name in names]
    elif isinstance(returned, tuple | list) and len(returned) == len(names):
        outputs = [*returned]
    else:
        raise InvalidResultError(f"it must return {len(names)} values ({', '.join(names)})")
    for name, index, spec, value in zip(names, call.outputs, call.specs, outputs, strict=True):
        values[index] = to_spec_array(value, spec, size, name)
