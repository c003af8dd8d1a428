"""New values for weights of a model that is built: packed as at export, written into private memory."""

from __future__ import annotations

import difflib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.core.layouts import F16, F32
from penstock.core.metadata import StoredPart, StoredWeight, read_metadata, stored_weights
from penstock.core.weights import check_finite
from penstock.errors import InvalidArgumentError
from penstock.lite.open_model import OpenModel
from penstock.lite.tensor import Tensor, array_of

__all__ = ["pack_updates", "write_updates"]

_DTYPES: Final = {np.dtype(np.float32): F32, np.dtype(np.float16): F16}

Updates = list[tuple[StoredWeight, npt.NDArray[np.uint8]]]


def pack_updates(opened: OpenModel, given: object) -> Updates:
    """The new bytes of every weight that the tensors change; nothing is written yet."""
    tensors = _named(given)
    weights = stored_weights(read_metadata(opened.path, opened.native.stamp))
    known = {part.name for weight in weights for part in weight.parts}
    for name in tensors:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InvalidArgumentError(f"weights: the model has no tensor {name!r:.200}{hint}")
    updates: Updates = []
    for weight in weights:
        parts = [part for part in weight.parts if part.name in tensors]
        if not parts:
            continue
        segment = opened.native.segment(weight.segment)
        if segment is None:
            raise InvalidArgumentError(f"weights: the model has no segment {weight.segment!r}")
        packed = np.frombuffer(segment, np.uint8)[weight.offset : weight.offset + weight.num_bytes].copy()
        for part in parts:
            _pack_part(opened.bind().native, weight, part, tensors[part.name], packed)
        updates.append((weight, packed))
    return updates


def write_updates(model: native.Model, updates: Updates) -> None:
    """Into a model in private memory, between steps."""
    for weight, packed in updates:
        model.overwrite(weight.segment, weight.offset, packed)


def _named(given: object) -> dict[str, npt.NDArray[Any]]:
    """The tensors by name; a list of lists is taken as one list."""
    if not isinstance(given, (list, tuple)) or not given:
        raise InvalidArgumentError("weights: expected a list of Tensors that are named as in the checkpoint")
    flat = [one for item in given for one in (item if isinstance(item, (list, tuple)) else [item])]
    found: dict[str, npt.NDArray[Any]] = {}
    for tensor in flat:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(f"weights: expected Tensors, found {type(tensor).__name__}")
        if not tensor.name:
            raise InvalidArgumentError("weights: expected a name of the checkpoint for every Tensor, found one without")
        if tensor.name in found:
            raise InvalidArgumentError(f"weights: {tensor.name!r:.200} is there twice")
        if tensor.dtype not in _DTYPES:
            raise InvalidArgumentError(f"{tensor.name}: dtype: expected float32 or float16, found {tensor.dtype.name}")
        found[tensor.name] = array_of(tensor)
    return found


def _expected_shape(weight: StoredWeight, part: StoredPart) -> list[int]:
    """Of a vector, which has one row; fused vectors lie end to end, and their parts count elements."""
    if weight.rows > 1:
        return [part.num_rows, weight.cols]
    return [weight.cols] if len(weight.parts) == 1 else [part.num_rows]


def _pack_part(
    context: native.Context,
    weight: StoredWeight,
    part: StoredPart,
    array: npt.NDArray[Any],
    packed: npt.NDArray[np.uint8],
) -> None:
    expected = _expected_shape(weight, part)
    found = list(array.shape)
    if weight.rows == 1 and len(found) == 2 and found[0] == 1:
        found = found[1:]
    if found != expected:
        raise InvalidArgumentError(f"{part.name}: shape: expected {expected}, found {found}")
    dtype = _DTYPES[array.dtype]
    try:
        check_finite(array, dtype)
        if weight.rows > 1:
            at = (weight.layout, weight.rows, weight.cols, part.row_start, part.num_rows)
            native.pack(context, *at, dtype, np.ascontiguousarray(array), packed)
            return
        alone = np.zeros(native.layout_bytes(weight.layout, 1, array.size), np.uint8)
        native.pack(context, weight.layout, 1, array.size, 0, 1, dtype, np.ascontiguousarray(array), alone)
    except InvalidArgumentError as error:  # a NaN, say, of which the check knows the place but not the name
        raise InvalidArgumentError(f"{part.name}: {error}") from None
    if len(weight.parts) == 1:
        packed[:] = alone
    else:
        packed.view(np.float32)[part.row_start : part.row_start + array.size] = alone.view(np.float32)[: array.size]
