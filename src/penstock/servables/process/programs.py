"""Units of Python stages as their process runs them: rows in, functions called, rows out, and who failed.

A stage that takes one instance at a time fails for the request whose instance it is, and the others go on.  Where one
that takes a batch fails, the primary finds out whose fault it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.columns import encode_bytes, read_column
from penstock.servables.process.failures import MisfitResultError, failure_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.servables.api.plan_builder import Call, Program
    from penstock.servables.api.specs import Spec

__all__ = ["as_spec", "column_data", "run_batch", "texts_of"]


def as_spec(value: Any, spec: Spec, count: int | None, name: str) -> Any:
    """A returned value as an array of its own [count, ...]; where ``count`` is None one instance's: an array, or a
    single number, ``str`` or ``bytes``.

    Numbers are cast within their kind (float64 to FP32, int64 to INT32) where they fit; MisfitResultError.
    """
    if spec.is_bytes:
        found = _as_bytes(value, spec, name)
    else:
        try:
            found = np.array(value)
        except (ValueError, TypeError) as error:
            raise MisfitResultError(f"{name} is no array: {error}") from None
        if found.dtype != spec.dtype:
            found = _cast(found, spec, name)
    shape = found.shape
    if count is not None:
        if not shape or shape[0] != count:
            raise MisfitResultError(f"{name} has {shape[0] if shape else 'no'} rows for {count} instances")
        shape = shape[1:]
    if not spec.fits(shape):
        raise MisfitResultError(f"{name} has the shape {list(shape)} per instance, not {spec}")
    return found if found.ndim else found[()]


def _cast(found: NDArray[Any], spec: Spec, name: str) -> NDArray[Any]:
    if spec.datatype == "BF16" and found.dtype.kind == "f":
        raise MisfitResultError(f"{name} is {found.dtype}: BF16 is held as its bits, in uint16")
    if found.dtype.kind in "fiub" and (found.dtype.kind == "b" or spec.dtype.kind != "b"):
        with np.errstate(all="ignore"):
            cast = found.astype(spec.dtype)
        both_whole = found.dtype.kind in "iub" and spec.dtype.kind in "iu"
        if both_whole and np.array_equal(cast, found) and not ((cast < 0) != (found < 0)).any():
            return cast
        if spec.dtype.kind == "f":
            lost = np.isinf(cast) & np.isfinite(found)
            if lost.any():
                raise MisfitResultError(f"{name} holds {found[lost].flat[0]:g}, which {spec.datatype} cannot hold")
            return cast
    if found.dtype.kind in "fiubc":
        raise MisfitResultError(f"{name} is {found.dtype}, which is not {spec.datatype} without loss")
    raise MisfitResultError(f"{name} {_told(found)}, expected {spec.datatype}")


def _told(found: NDArray[Any]) -> str:
    """What an array is that holds no numbers."""
    if found.dtype == object and found.size:
        odd = next((one for one in found.flat if not isinstance(one, Number)), found.flat[0])
        is_number = isinstance(odd, Number)  # one that numpy has no type for, or in an array made for any object
        return f"is an array of objects, such as {type(odd).__name__:.100}" if is_number else _held(odd, found)
    kind = {"U": "text ", "S": "bytes "}.get(found.dtype.kind, "")
    return f"is {kind}(numpy {found.dtype})" if kind else f"is {found.dtype}"


def _held(value: Any, found: NDArray[Any]) -> str:
    """One of an array's elements, or all that it is."""
    kind = "None" if value is None else type(value).__name__
    return f"{'holds' if found.ndim else 'is'} {kind:.100}"


def _as_bytes(value: Any, spec: Spec, name: str) -> NDArray[Any]:
    wanted = str if spec.datatype == "TEXT" else bytes
    found = np.empty((), object)
    if isinstance(value, str | bytes):
        found[()] = value
    else:
        found = np.array(value, object)
    for one in found.reshape(-1):
        if not isinstance(one, wanted):
            raise MisfitResultError(f"{name} {_held(one, found)}, where {spec.datatype} is {wanted.__name__}")
    return found


def run_batch(program: Program, batch: pb.Batch, mark: Callable[[int, int], None]) -> pb.Result:
    """The outputs of a batch, or why not.  ``mark`` notes which call and instance is at work."""
    result = pb.Result()
    counts = tuple(batch.counts)
    unit = program.unit
    parts = [
        read_column(spec, column, counts) for spec, column in zip(unit.inputs, batch.inputs, strict=True)
    ]  # of each input, an array of each part
    if unit.rules is None:
        _run_each(program, counts, parts, result, mark)
    else:
        _run_whole(program, counts, batch.size, parts, result, mark)
    return result


def texts_of(array: NDArray[Any]) -> NDArray[Any]:
    """Bytes as ``str``."""
    found = np.empty(array.shape, object)
    flat = found.reshape(-1)
    for index, one in enumerate(array.reshape(-1)):
        flat[index] = one.decode()
    return found


def _own(array: NDArray[Any], spec: Spec) -> NDArray[Any]:
    """As a stage may have it: its own to change, texts as ``str``."""
    return texts_of(array) if spec.datatype == "TEXT" else array.copy()


def _run_each(
    program: Program,
    counts: Sequence[int],
    parts: list[list[NDArray[Any]]],
    result: pb.Result,
    mark: Callable[[int, int], None],
) -> None:
    """Instance by instance."""
    kept: list[list[list[Any]]] = [[] for _ in program.outputs]  # of each output, of each part, rows
    kept_counts = []
    position = 0
    for part, count in enumerate(counts):
        rows: list[list[Any]] = [[] for _ in program.outputs]
        stage = program.calls[0].stage.name
        failure: pb.Failure | None = None
        try:
            given = [_own(one[part], spec) for one, spec in zip(parts, program.unit.inputs, strict=True)]
        except UnicodeDecodeError:
            failure = pb.Failure(part=part, instance=-1, stage=stage, kind="input", text="a text is not UTF-8")
            count = 0
        for index in range(count):
            values: dict[int, Any] = {place: one[index] for place, one in zip(program.inputs, given, strict=True)}
            failure = _chain(program.calls, values, None, 0, partial(_mark_at, mark, position + index))
            if failure is not None:
                failure.part, failure.instance = part, index
                break
            for place, row in zip(program.outputs, rows, strict=True):
                row.append(values[place])
        position += counts[part]
        if failure is None:
            failure = _uneven(rows, part, stage)
        if failure is not None:
            result.failures.append(failure)
            continue
        kept_counts.append(count)
        for all_rows, row in zip(kept, rows, strict=True):
            all_rows.append(row)
    for spec, all_rows in zip(program.unit.outputs, kept, strict=True):
        column = result.outputs.add(data=column_data([row for ones in all_rows for row in ones], spec))
        if not spec.is_fixed:
            for ones in all_rows:
                column.sizes.extend(np.shape(ones[0]))


def column_data(rows: Sequence[Any], spec: Spec) -> bytes:
    """Rows as a column has them: arrays of any rank, or single values."""
    if not spec.is_bytes:
        return b"".join([one.tobytes() for one in rows])
    elements: list[Any] = []
    for one in rows:
        if isinstance(one, np.ndarray):
            elements += one.reshape(-1).tolist()
        else:
            elements.append(one)
    if spec.datatype == "TEXT":
        elements = [one.encode("utf-8", "replace") for one in elements]
    return encode_bytes(elements)


def _mark_at(mark: Callable[[int, int], None], instance: int, call: int) -> None:
    mark(call, instance)


def _uneven(rows: list[list[Any]], part: int, stage: str) -> pb.Failure | None:
    """The instances of a request are rows of one tensor: their shapes must be the same."""
    for ones in rows:
        shapes = {np.shape(one) for one in ones}
        if len(shapes) > 1:
            told = f"its instances gave different shapes, {' and '.join(map(str, shapes))[:100]}: send them one by one"
            return pb.Failure(part=part, instance=-1, stage=stage, kind="input", text=told)
    return None


def _run_whole(
    program: Program,
    counts: Sequence[int],
    size: int,
    parts: list[list[NDArray[Any]]],
    result: pb.Result,
    mark: Callable[[int, int], None],
) -> None:
    """The batch at once, padded by its last row."""
    num_rows = sum(counts)
    values: dict[int, Any] = {}
    try:
        for place, arrays, spec in zip(program.inputs, parts, program.unit.inputs, strict=True):
            whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            if size > num_rows:
                whole = np.concatenate([whole, np.repeat(whole[-1:], size - num_rows, 0)])
            values[place] = _own(whole, spec)
    except UnicodeDecodeError:
        stage = program.calls[0].stage.name
        result.failures.add(part=-1, instance=-1, stage=stage, kind="input", text="a text is not UTF-8")
        return
    failure = _chain(program.calls, values, size, num_rows, partial(_mark_at, mark, -1))
    if failure is not None:
        failure.part = -1
        result.failures.append(failure)
        return
    for spec, place in zip(program.unit.outputs, program.outputs, strict=True):
        array = values[place][:num_rows]
        column = result.outputs.add(data=column_data([array], spec))
        if not spec.is_fixed:
            column.sizes.extend([*array.shape[1:]] * len(counts))


def _chain(
    calls: Sequence[Call], values: dict[int, Any], size: int | None, num_rows: int, mark: Callable[[int], None]
) -> pb.Failure | None:
    """Call the stages in order; what failed first.  ``size``: of a batch, ``num_rows`` of it being no padding."""
    for index, call in enumerate(calls):
        mark(index)
        stage = call.stage
        try:
            returned = stage.function(**_arguments(call, values))
            _take(call, returned, values, size)
        except Exception as error:
            return failure_of(error, stage.name, num_rows)
    return None


def _arguments(call: Call, values: dict[int, Any]) -> dict[str, Any]:
    given = {}
    for name, place, is_shared in zip(call.names, call.inputs, call.shared, strict=True):
        value = values[place]
        given[name] = value.copy() if is_shared and isinstance(value, np.ndarray) else value
    return given


def _take(call: Call, returned: Any, values: dict[int, Any], size: int | None) -> None:
    """Check what a stage returned, and keep it."""
    names = [*call.stage.outputs]
    if len(names) == 1 and not isinstance(returned, dict):
        given = [returned]
    elif isinstance(returned, dict):
        if set(returned) != set(names):
            raise MisfitResultError(f"it returned {', '.join(map(str, returned))}; outputs are {', '.join(names)}")
        given = [returned[name] for name in names]
    elif isinstance(returned, tuple | list) and len(returned) == len(names):
        given = [*returned]
    else:
        raise MisfitResultError(f"it must return {len(names)} values ({', '.join(names)})")
    for name, place, spec, value in zip(names, call.outputs, call.specs, given, strict=True):
        values[place] = as_spec(value, spec, size, name)
