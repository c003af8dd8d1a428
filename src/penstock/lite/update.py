"""Update the weights of a built model: new values are packed as in an export and written into private memory."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.core import native
from penstock.core.layouts import F16, F32
from penstock.core.metadata import StoredPart, StoredWeight, read_metadata, stored_weights
from penstock.core.weights import check_finite
from penstock.errors import InvalidArgumentError
from penstock.graph.metadata import decode_metadata
from penstock.graph.passes.assign_scheme import rotated_weights
from penstock.lite.open_model import OpenModel
from penstock.lite.tensor import Tensor, array_of
from penstock.quant.hadamard import rotate_weight
from penstock.validation import nearest, wrong_type

__all__ = ["pack_updates", "write_updates"]

_DTYPES: Final = {np.dtype(np.float32): F32, np.dtype(np.float16): F16}

Updates = list[tuple[StoredWeight, npt.NDArray[np.uint8]]]


def pack_updates(opened: OpenModel, new_weights: object) -> Updates:
    """Return the new bytes of every weight that the tensors change.  Does not write them."""
    tensors = _by_name(new_weights)
    metadata = read_metadata(opened.path, opened.native.stamp)
    weights, rotated = stored_weights(metadata), rotated_weights(decode_metadata(metadata)[0])
    known = {part.name for weight in weights for part in weight.parts}
    for name in tensors:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near}?" if near else ""
            raise InvalidArgumentError(
                f"weights: expected tensors of the model, got {name!r:.200}{hint}", param="weights"
            )
    updates: Updates = []
    for weight in weights:
        parts = [part for part in weight.parts if part.name in tensors]
        if not parts:
            continue
        segment = opened.native.segment(weight.segment)
        if segment is None:
            raise InvalidArgumentError(
                f"weights: expected a segment {weight.segment!r} in the bundle, got none", param="weights"
            )
        packed = np.frombuffer(segment, np.uint8)[weight.offset : weight.offset + weight.num_bytes].copy()
        for part in parts:
            array = tensors[part.name]
            _check_shape(weight, part, array)
            if weight.name in rotated:
                array = rotate_weight(array.astype(np.float32))
            _pack_part(opened.bind().native, weight, part, array, packed)
        updates.append((weight, packed))
    return updates


def write_updates(model: native.Model, updates: Updates) -> None:
    """Write updates into a model in private memory; call it only between steps."""
    for weight, packed in updates:
        model.overwrite(weight.segment, weight.offset, packed)


def _by_name(new_weights: object) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays by name; a list of lists is flattened."""
    if not isinstance(new_weights, (list, tuple)) or not new_weights:
        raise InvalidArgumentError(
            "weights: expected a list of Tensors that are named as in the checkpoint", param="weights"
        )
    flat = [tensor for item in new_weights for tensor in (item if isinstance(item, (list, tuple)) else [item])]
    arrays: dict[str, npt.NDArray[Any]] = {}
    for tensor in flat:
        if not isinstance(tensor, Tensor):
            raise wrong_type("weights", "Tensors", tensor)
        if not tensor.name:
            raise InvalidArgumentError(
                "weights: expected Tensors named as in the checkpoint, got one without a name", param="weights"
            )
        if tensor.name in arrays:
            raise InvalidArgumentError(
                f"weights: expected each tensor once, got {tensor.name!r:.200} twice", param="weights"
            )
        if tensor.dtype not in _DTYPES:
            raise InvalidArgumentError(
                f"{tensor.name}: dtype: expected float32 or float16, got {tensor.dtype.name}", param=tensor.name
            )
        arrays[tensor.name] = array_of(tensor)
    return arrays


def _expected_shape(weight: StoredWeight, part: StoredPart) -> list[int]:
    """Return the shape of a tensor.  A vector has one row; the parts of fused vectors count elements."""
    if weight.rows > 1:
        return [part.num_rows, weight.cols]
    return [weight.cols] if len(weight.parts) == 1 else [part.num_rows]


def _check_shape(weight: StoredWeight, part: StoredPart, array: npt.NDArray[Any]) -> None:
    expected = _expected_shape(weight, part)
    shape = list(array.shape)
    if weight.rows == 1 and len(shape) == 2 and shape[0] == 1:
        shape = shape[1:]
    if shape != expected:
        raise InvalidArgumentError(f"{part.name}: shape: expected {expected}, got {shape}", param=part.name)


def _pack_part(
    context: native.Context,
    weight: StoredWeight,
    part: StoredPart,
    array: npt.NDArray[Any],
    packed: npt.NDArray[np.uint8],
) -> None:
    dtype = _DTYPES[array.dtype]
    try:
        check_finite(array, dtype)
        if weight.rows > 1:
            at = (weight.layout, weight.rows, weight.cols, part.row_start, part.num_rows)
            native.pack(context, *at, dtype, np.ascontiguousarray(array), packed)
            return
        vector = np.zeros(native.layout_bytes(weight.layout, 1, array.size), np.uint8)
        native.pack(context, weight.layout, 1, array.size, 0, 1, dtype, np.ascontiguousarray(array), vector)
    except InvalidArgumentError as error:  # for example a NaN: the check knows its place but not the tensor's name
        raise InvalidArgumentError(f"{part.name}: {error}", param=part.name) from None
    if len(weight.parts) == 1:
        packed[:] = vector
    else:
        packed.view(np.float32)[part.row_start : part.row_start + array.size] = vector.view(np.float32)[: array.size]
