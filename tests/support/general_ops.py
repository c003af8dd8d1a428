"""Runs an op of general networks on numpy arrays: the same bits at each level and number of threads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.core.context import Context
from penstock.core.native import CoreTensor

Array = npt.NDArray[Any]

_DTYPES = {"float32": 1, "float16": 2, "int8": 4, "int32": 5, "uint8": 6, "int64": 7, "bool": 8}
BF16 = 3
"""A core dtype, whose arrays are uint16."""


@functools.cache
def contexts() -> tuple[Context, ...]:
    """The contexts whose results must be equal."""
    return Context(1, cpu_level="generic"), Context(1), Context(3)


def core_tensor(array: Array, dtype: int | None = None) -> CoreTensor:
    """Return the operand that a contiguous array is."""
    assert array.flags.c_contiguous
    code = _DTYPES[array.dtype.name] if dtype is None else dtype
    return CoreTensor(array.ctypes.data, code, array.shape, array.shape[-1] if array.ndim else 1)


def run(
    op: str,
    inputs: Sequence[Array | CoreTensor | None],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    **attrs: Any,
) -> list[Array]:
    """Run an op into new arrays of these shapes and types.  A list among the attributes becomes its text."""
    attrs = {name: ",".join(map(str, v)) if isinstance(v, (list, tuple)) else v for name, v in attrs.items()}
    arrays = [
        x if x is None or isinstance(x, CoreTensor) else np.ascontiguousarray(x).reshape(np.shape(x)) for x in inputs
    ]
    operands = [core_tensor(x) if isinstance(x, np.ndarray) else x for x in arrays]
    results: list[list[Array]] = []
    for context in contexts():
        found = [np.full(shape, 7, dtype) for shape, dtype in outputs]
        native.run_op(context, op, [*operands, *map(core_tensor, found)], attrs)
        results.append(found)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a.tobytes() == b.tobytes(), op
    return results[0]


def check(
    op: str,
    inputs: Sequence[Array | CoreTensor | None],
    *expected: Array,
    relative: float = 0,
    absolute: float = 0,
    **attrs: Any,
) -> None:
    """Run an op and compare its outputs; exactly, unless there is a tolerance."""
    expected = tuple(map(np.asarray, expected))
    found = run(op, inputs, [(e.shape, e.dtype) for e in expected], **attrs)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, relative, absolute, err_msg=f"{op} {attrs}")
