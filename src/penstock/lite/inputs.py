"""The inputs and outputs of ``predict``, which are checked before they are passed to the core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.config import is_integer
from penstock.errors import InvalidArgumentError
from penstock.lite.sequences import OutputSpec
from penstock.lite.tensor import Tensor, array_of
from penstock.validation import refusal, wrong_type

__all__ = ["INPUTS", "check_inputs", "check_outputs", "checked_dims", "input_tensors", "named_tensors"]

INPUTS: Final = ("token_ids", "num_tokens", "reset")
_MAX_DIMS: Final = (1 << 16, 1 << 24)
"""The limits on B and T."""

Arrays = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]


def input_tensors(batch_size: int, seq_len: int) -> list[Tensor]:
    """Return inputs whose values are always valid: token ids 0, whole rows, and a reset of every sequence."""
    filled = (
        np.zeros((batch_size, seq_len), np.int32),
        np.full(batch_size, seq_len, np.int32),
        np.ones(batch_size, np.int32),
    )
    return [Tensor(array, name=name) for name, array in zip(INPUTS, filled, strict=True)]


def named_tensors(tensors: object, what: str, names: Sequence[str]) -> list[Tensor]:
    """Return the tensors in the order of ``names``: matched by name if every tensor has one of them, else as given."""
    if not isinstance(tensors, (list, tuple)):
        raise wrong_type(what, "a list of Tensors", tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            hint = "; use Tensor(array)" if isinstance(tensor, np.ndarray) else ""
            raise InvalidArgumentError(
                f"{what}[{index}]: expected a Tensor, got {type(tensor).__name__}{hint}", param=f"{what}[{index}]"
            )
    if len(tensors) != len(names):
        raise InvalidArgumentError(
            f"{what}: expected {len(names)} ({', '.join(names)}), got {len(tensors)}", param=what
        )
    if sorted(tensor.name for tensor in tensors) == sorted(names):
        by_name = {tensor.name: tensor for tensor in tensors}
        return [by_name[name] for name in names]
    return list(tensors)


def _checked(tensor: Tensor, name: str, dtype: npt.DTypeLike, shape: Sequence[int | None]) -> npt.NDArray[Any]:
    array = array_of(tensor)
    if array.dtype != dtype:
        raise InvalidArgumentError(
            f"{name}: dtype: expected {np.dtype(dtype).name}, got {array.dtype.name}", param=name
        )
    if array.ndim != len(shape) or any(w is not None and w != n for w, n in zip(shape, array.shape, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        hint = "; call resize first" if None not in shape else ""
        raise InvalidArgumentError(f"{name}: shape: expected [{expected}], got {list(array.shape)}{hint}", param=name)
    return array


def check_inputs(inputs: object, vocab_size: int, dims: tuple[int, int] | None) -> Arrays:
    """Return checked copies of the three input arrays, which the caller cannot change after the checks.

    Their shapes must be those of ``dims`` [B, T]; None accepts any shapes that agree.
    """
    tensors = named_tensors(inputs, "inputs", INPUTS)
    token_ids = _checked(tensors[0], INPUTS[0], np.int32, dims or (None, None)).copy()
    batch_size, seq_len = token_ids.shape
    num_tokens = _checked(tensors[1], INPUTS[1], np.int32, (batch_size,)).copy()
    reset = _checked(tensors[2], INPUTS[2], np.int32, (batch_size,)).copy()
    _check_range(num_tokens, INPUTS[1], 0, seq_len)
    _check_range(reset, INPUTS[2], 0, 1)
    used = np.arange(seq_len) < num_tokens[:, None]
    wrong = np.argwhere(used & ((token_ids < 0) | (token_ids >= vocab_size)))
    if wrong.size:
        row, column = wrong[0].tolist()
        raise InvalidArgumentError(
            f"token_ids: expected 0 to {vocab_size - 1}, got {token_ids[row, column]} at [{row}, {column}]",
            param="token_ids",
        )
    return token_ids, num_tokens, reset


def _check_range(array: npt.NDArray[np.int32], name: str, low: int, high: int) -> None:
    wrong = np.flatnonzero((array < low) | (array > high))
    if wrong.size:
        raise InvalidArgumentError(
            f"{name}: expected {low} to {high}, got {array[wrong[0]]} at [{wrong[0]}]", param=name
        )


def check_outputs(outputs: object, specs: Sequence[OutputSpec], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return checked tensors that the outputs can be written to."""
    tensors = named_tensors(outputs, "outputs", [spec.name for spec in specs])
    for tensor, spec, shape in zip(tensors, specs, shapes, strict=True):
        if not _checked(tensor, spec.name, spec.dtype, shape).flags.writeable:
            raise InvalidArgumentError(f"{spec.name}: expected writable memory, got read-only memory", param=spec.name)
    return tensors


def checked_dims(inputs: object, dims: object) -> tuple[int, int]:
    """Return B and T of the shapes that ``resize`` was called with."""
    tensors = named_tensors(inputs, "inputs", INPUTS)
    if not isinstance(dims, (list, tuple)) or len(dims) != len(INPUTS):
        raise refusal("dims", f"{len(INPUTS)} shapes, one per input", dims)
    by_tensor = {id(tensor): shape for tensor, shape in zip(inputs, dims, strict=True)}  # type: ignore[call-overload]
    shapes = [by_tensor[id(tensor)] for tensor in tensors]
    for name, shape, rank in zip(INPUTS, shapes, (2, 1, 1), strict=True):
        if (
            not isinstance(shape, (list, tuple))
            or len(shape) != rank
            or not all(map(is_integer, shape, (1, 1), _MAX_DIMS))
        ):
            expected = ", ".join(f"{size} from 1 to {high}" for size, high in zip("BT"[:rank], _MAX_DIMS, strict=False))
            raise InvalidArgumentError(f"dims of {name}: expected [{expected}], got {shape!r:.60}", param="dims")
    batch_size, seq_len = (int(size) for size in shapes[0])
    for name, shape in zip(INPUTS[1:], shapes[1:], strict=True):
        if shape[0] != batch_size:
            raise InvalidArgumentError(
                f"dims of {name}: expected [{batch_size}] as of token_ids, got {list(shape)}", param="dims"
            )
    return batch_size, seq_len
