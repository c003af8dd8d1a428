"""Types and shapes of the ops of general networks, over sizes with names.

The core infers them again for the sizes of each run, and refuses what does not fit then.  Here, two sizes whose
equality depends on names are taken to be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias

from penstock.errors import InvalidArgumentError
from penstock.graph.general.sizes import SizeLike, as_text, is_equal, largest, product, smallest
from penstock.graph.ir import DType
from penstock.ops.schema import parse_arguments
from penstock.ops.table import find_op

__all__ = ["TensorLike", "broadcast", "infer", "normalise_axis"]

_Shape: TypeAlias = tuple[SizeLike, ...]
_Types: TypeAlias = list[tuple[DType, _Shape]]


class TensorLike(Protocol):
    """The attributes of a tensor that shape rules need."""

    name: str
    dtype: DType
    shape: _Shape


_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "conv": {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "groups": 1, "act": "none", "alpha": 0.0,
             "beta": 0.0},
    "conv_transpose": {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "output_pads": (0, 0), "groups": 1,
                       "act": "none", "alpha": 0.0, "beta": 0.0},
    "max_pool": {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "ceil": False},
    "avg_pool": {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "ceil": False, "count_pads": False},
    "resize": {"scale_h": 0.0, "scale_w": 0.0, "mode": "nearest", "coordinates": "half_pixel",
               "rounding": "round_prefer_floor", "cubic_a": -0.75, "exclude_outside": False},
    "matmul": {"transpose_a": False, "transpose_b": False, "scale": 1.0},
    "sdpa": {"causal": False, "softcap": 0.0},
    "lstm": {"direction": "forward"},
    "gru": {"direction": "forward", "linear_before_reset": False},
    "unary": {"alpha": 0.0, "beta": 0.0},
    "softmax": {"axis": -1, "log": False},
    "reduce": {"keep": True},
    "arg_reduce": {"keep": True, "last": False},
    "top_k": {"axis": -1, "largest": True, "sorted": True},
    "nms": {"iou": 0.0, "filtered": False, "score": 0.0, "format": "corners"},
    "cumsum": {"exclusive": False, "reverse": False},
    "pad": {"mode": "constant", "value": 0.0},
    "trilu": {"diagonal": (0,), "upper": True},
    "gather": {"axis": 0},
    "gather_nd": {"batch_dims": 0},
    "scatter_elements": {"reduction": "none"},
    "scatter_nd": {"reduction": "none"},
    "linear": {"scheme": "f32"},
}  # fmt: skip


def infer(op: str, inputs: Sequence[Any], attrs: dict[str, Any], name: str) -> tuple[dict[str, Any], _Types]:
    """Return all attributes of a call, defaults included, in the order of the schema, and its outputs' types."""
    all_attrs = {**_DEFAULTS.get(op, {}), **attrs}
    rule = _RULES[op]
    try:
        types = rule(inputs, all_attrs)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name or op} ({op}): {error}", param=error.param) from error
    wanted = [argument.name for argument in parse_arguments(find_op(op).schema) if argument.is_attr]
    unknown = set(all_attrs) - set(wanted)
    missing = [key for key in wanted if key not in all_attrs]
    if unknown or missing:
        raise InvalidArgumentError(f"{name or op} ({op}): expected the attributes {wanted}, got {sorted(all_attrs)}")
    return {key: all_attrs[key] for key in wanted}, types


def normalise_axis(axis: int, rank: int, param: str = "axis") -> int:
    """Return an axis that may count from the end as one from 0.  Raises InvalidArgumentError if it is out of range."""
    if not -rank <= axis < max(rank, 1):
        raise InvalidArgumentError(f"{param}: expected {-rank} to {rank - 1}, got {axis}", param=param)
    return axis + rank if axis < 0 else axis


def broadcast(*shapes: _Shape) -> _Shape:
    """Return the shape to which numpy's rules broadcast."""
    rank = max(len(shape) for shape in shapes)
    result: list[SizeLike] = [1] * rank
    for shape in shapes:
        for at, size in enumerate(shape, rank - len(shape)):
            result[at] = _broadcast_size(result[at], size, shapes)
    return tuple(result)


def _broadcast_size(a: SizeLike, b: SizeLike, shapes: Sequence[_Shape]) -> SizeLike:
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if is_equal(a, b) is False:
        texts = " and ".join(_text(shape) for shape in shapes)
        raise InvalidArgumentError(f"shapes: expected sizes that broadcast, got {texts}", param="shapes")
    return a if isinstance(a, int) else b if isinstance(b, int) else a


def _text(shape: _Shape) -> str:
    return "[" + ", ".join(as_text(size) for size in shape) + "]"


def _expect_rank(tensor: TensorLike, *ranks: int) -> None:
    if len(tensor.shape) not in ranks:
        wanted = " or ".join(str(rank) for rank in ranks)
        raise InvalidArgumentError(
            f"{tensor.name}: expected {wanted} dimensions, got {_text(tensor.shape)}", param=tensor.name
        )


def _expect_size(got: SizeLike, expected: SizeLike, what: str) -> None:
    if is_equal(got, expected) is False:
        raise InvalidArgumentError(f"{what}: expected {as_text(expected)}, got {as_text(got)}", param=what)


def _window(size: SizeLike, kernel: int, stride: int, pads: int, dilation: int, ceil: bool, begin: int) -> SizeLike:
    spare = size + pads - dilation * (kernel - 1) - 1
    if not ceil:
        count = spare // stride + 1
    else:
        count = (spare + stride - 1) // stride + 1
        # The last window must begin inside the input or the pads before it.
        count = smallest(count, (size + begin - 1) // stride + 1)
    if isinstance(count, int) and count < 1:
        raise InvalidArgumentError(f"kernel: expected a window inside {as_text(size)}, got {kernel}", param="kernel")
    return count


def _windows(shape: _Shape, a: dict[str, Any], ceil: bool = False) -> _Shape:
    pads = a["pads"]
    return tuple(
        _window(shape[1 + i], a["kernel"][i], a["strides"][i], pads[i] + pads[2 + i], a["dilations"][i], ceil, pads[i])
        for i in range(2)
    )


def _conv(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, weight = inputs[0], inputs[1]
    _expect_rank(x, 4)
    _expect_rank(weight, 4)
    a.setdefault("out_channels", weight.shape[0])
    a.setdefault("kernel", tuple(weight.shape[1:3]))
    _expect_size(weight.shape[3] * a["groups"], x.shape[3], "channels")
    if a["out_channels"] % a["groups"]:
        raise InvalidArgumentError(f"groups: expected a divisor of {a['out_channels']}, got {a['groups']}")
    return [(x.dtype, (x.shape[0], *_windows(x.shape, a), a["out_channels"]))]


def _conv_winograd(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, weight = inputs[0], inputs[1]
    _expect_rank(x, 4)
    _expect_rank(weight, 4)
    _expect_size(weight.shape[3], x.shape[3], "channels")
    window = {"kernel": (3, 3), "strides": (1, 1), "pads": a["pads"], "dilations": (1, 1)}
    return [(x.dtype, (x.shape[0], *_windows(x.shape, window), a["out_channels"]))]


def _conv_transpose(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, weight = inputs[0], inputs[1]
    _expect_rank(x, 4)
    _expect_rank(weight, 4)
    a.setdefault("kernel", tuple(weight.shape[1:3]))
    a.setdefault("out_channels", weight.shape[0])
    sizes = [
        (x.shape[1 + i] - 1) * a["strides"][i] - a["pads"][i] - a["pads"][2 + i]
        + a["dilations"][i] * (a["kernel"][i] - 1) + a["output_pads"][i] + 1
        for i in range(2)
    ]  # fmt: skip
    return [(x.dtype, (x.shape[0], *sizes, a["out_channels"]))]


def _pool(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    _expect_rank(x, 4)
    return [(x.dtype, (x.shape[0], *_windows(x.shape, a, a["ceil"]), x.shape[3]))]


def _resize(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    _expect_rank(x, 4)
    return [(x.dtype, (x.shape[0], *a["sizes"], x.shape[3]))]


def _matmul(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, y = inputs[0], inputs[1]
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise InvalidArgumentError(f"a, b: expected 2 dimensions or more, got {_text(x.shape)} and {_text(y.shape)}")
    rows, inner = (x.shape[-1], x.shape[-2]) if a["transpose_a"] else x.shape[-2:]
    other, cols = (y.shape[-1], y.shape[-2]) if a["transpose_b"] else y.shape[-2:]
    _expect_size(other, inner, "inner size")
    return [(x.dtype, (*broadcast(x.shape[:-2], y.shape[:-2]), rows, cols))]


def _sdpa(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    q, k, v = inputs[:3]
    for tensor in (q, k, v):
        _expect_rank(tensor, 4)
    _expect_size(k.shape[3], q.shape[3], "k")
    _expect_size(v.shape[2], k.shape[2], "v")
    a.setdefault("scale", float(q.shape[3]) ** -0.5 if isinstance(q.shape[3], int) else 1.0)
    return [(q.dtype, (*q.shape[:3], v.shape[3]))]


def _recurrent(inputs: Sequence[Any], a: dict[str, Any], states: int) -> _Types:
    x = inputs[0]
    _expect_rank(x, 3)
    directions = 2 if a["direction"] == "bidirectional" else 1
    state = (x.dtype, (directions, x.shape[1], a["hidden"]))
    return [(x.dtype, (x.shape[0], directions, x.shape[1], a["hidden"])), *[state] * states]


def _same(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    return [(inputs[0].dtype, inputs[0].shape)]


def _unary(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    boolean = a["kind"] in ("not", "is_nan", "is_inf")
    return [(DType.BOOL if boolean else inputs[0].dtype, inputs[0].shape)]


_COMPARISONS: Final = ("eq", "ne", "lt", "le", "gt", "ge")


def _binary(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, y = inputs[0], inputs[1]
    if x.dtype != y.dtype:
        raise InvalidArgumentError(f"b: expected {x.dtype.name.lower()} as a has, got {y.dtype.name.lower()}")
    dtype = DType.BOOL if a["kind"] in _COMPARISONS else x.dtype
    return [(dtype, broadcast(x.shape, y.shape))]


def _where(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    condition, x, y = inputs
    if condition.dtype != DType.BOOL or x.dtype != y.dtype:
        raise InvalidArgumentError("condition, a, b: expected bool and two tensors of one type")
    return [(x.dtype, broadcast(condition.shape, x.shape, y.shape))]


def _cast(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    return [(DType[a["dtype"].upper()], inputs[0].shape)]


def _reduce(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    axes = tuple(sorted({normalise_axis(axis, len(x.shape), "axes") for axis in a["axes"]}))
    a["axes"] = axes
    return [(x.dtype, _reduced(x.shape, axes, a["keep"]))]


def _reduced(shape: _Shape, axes: Sequence[int], keep: bool) -> _Shape:
    return tuple(1 if i in axes else size for i, size in enumerate(shape) if keep or i not in axes)


def _arg_reduce(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    a["axis"] = normalise_axis(a["axis"], len(inputs[0].shape))
    return [(DType.I64, _reduced(inputs[0].shape, (a["axis"],), a["keep"]))]


def _top_k(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    axis = a["axis"] = normalise_axis(a["axis"], len(x.shape))
    k, size = a["k"][0], x.shape[axis]
    if isinstance(k, int) and isinstance(size, int) and not 0 <= k <= size:
        raise InvalidArgumentError(f"k: expected 0 to {size}, got {k}", param="k")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return [(x.dtype, shape), (DType.I64, shape)]


def _nms(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    boxes, scores = inputs[0], inputs[1]
    _expect_rank(boxes, 3)
    _expect_rank(scores, 3)
    _expect_size(boxes.shape[0], scores.shape[0], "images")
    _expect_size(boxes.shape[1], scores.shape[2], "boxes")
    _expect_size(boxes.shape[2], 4, "numbers of a box")
    if not 0 <= a["iou"] <= 1:
        raise InvalidArgumentError(f"iou: expected 0 to 1, got {a['iou']}", param="iou")
    return [(DType.I64, (scores.shape[0] * scores.shape[1] * a["limit"][0], 3)), (DType.I64, (1,))]


def _along_axis(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    a["axis"] = normalise_axis(a["axis"], len(inputs[0].shape))
    return _same(inputs, a)


def _reshape(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    sizes = list(a["sizes"])
    unknown = [i for i, size in enumerate(sizes) if isinstance(size, int) and size == -1]
    if len(unknown) > 1:
        raise InvalidArgumentError(f"sizes: expected one -1 at most, got {_text(tuple(sizes))}", param="sizes")
    if unknown:
        known = product(size for i, size in enumerate(sizes) if i != unknown[0])
        sizes[unknown[0]] = product(x.shape) // known if known != 0 else 0
    _expect_size(product(sizes), product(x.shape), "sizes")
    a["sizes"] = tuple(sizes)
    return [(x.dtype, tuple(sizes))]


def _permute(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    order = a["order"] = tuple(normalise_axis(axis, len(x.shape), "order") for axis in a["order"])
    if sorted(order) != list(range(len(x.shape))):
        raise InvalidArgumentError(f"order: expected each axis of {_text(x.shape)} once, got {order}", param="order")
    return [(x.dtype, tuple(x.shape[axis] for axis in order))]


def _slice(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    """Take begins and ends inside the input: from 0 to the size, of negative steps from -1 to the size - 1."""
    shape = []
    for begin, end, step in zip(a["begins"], a["ends"], a["steps"], strict=True):
        distance = end - begin if step > 0 else begin - end
        count = (distance + abs(step) - 1) // abs(step)
        shape.append(largest(count, 0))
    return [(inputs[0].dtype, tuple(shape))]


def _expand(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    shape = a["sizes"] = broadcast(inputs[0].shape, tuple(a["sizes"]))
    return [(inputs[0].dtype, shape)]


def _concat(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    tensors = [tensor for tensor in inputs if tensor is not None]
    first = tensors[0]
    axis = a["axis"] = normalise_axis(a["axis"], len(first.shape))
    size: SizeLike = 0
    for tensor in tensors:
        _expect_rank(tensor, len(first.shape))
        if tensor.dtype != first.dtype:
            raise InvalidArgumentError(
                f"{tensor.name}: expected {first.dtype.name.lower()}, got {tensor.dtype.name.lower()}"
            )
        size = size + tensor.shape[axis]
    shape = [
        _common(tuple(tensor.shape[i] for tensor in tensors), i) if i != axis else size for i in range(len(first.shape))
    ]
    return [(first.dtype, tuple(shape))]


def _common(sizes: Sequence[SizeLike], axis: int) -> SizeLike:
    for size in sizes[1:]:
        _expect_size(size, sizes[0], f"size of axis {axis}")
    return next((size for size in sizes if isinstance(size, int)), sizes[0])


def _pad(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x = inputs[0]
    rank = len(x.shape)
    sizes = tuple(size + a["pads"][i] + a["pads"][rank + i] for i, size in enumerate(x.shape))
    return [(x.dtype, sizes)]


def _gather(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, indices = inputs[0], inputs[1]
    axis = a["axis"] = normalise_axis(a["axis"], len(x.shape))
    return [(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]


def _gather_elements(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    a["axis"] = normalise_axis(a["axis"], len(inputs[0].shape))
    return [(inputs[0].dtype, inputs[1].shape)]


def _gather_nd(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, indices = inputs[0], inputs[1]
    batch, depth = a["batch_dims"], indices.shape[-1]
    if not isinstance(depth, int) or batch + depth > len(x.shape):
        raise InvalidArgumentError(f"indices: expected at most {len(x.shape) - batch} in the last axis, got {depth}")
    return [(x.dtype, (*indices.shape[:-1], *x.shape[batch + depth :]))]


def _fill(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    return [(DType[a["dtype"].upper()], tuple(a["sizes"]))]


def _iota(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    return [(DType.I64, (a["range"][2],))]


def _sizes(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    return [(DType.I64, (len(a["values"]),))]


def _linear(inputs: Sequence[Any], a: dict[str, Any]) -> _Types:
    x, weight = inputs[0], inputs[1]
    _expect_rank(x, 2)
    _expect_rank(weight, 2)
    a.setdefault("out_features", weight.shape[0])
    _expect_size(x.shape[1], weight.shape[1], "in_features")
    return [(x.dtype, (x.shape[0], a["out_features"]))]


_RULES: Final[dict[str, Callable[[Sequence[Any], dict[str, Any]], _Types]]] = {
    "conv": _conv, "conv_winograd": _conv_winograd, "conv_transpose": _conv_transpose, "max_pool": _pool,
    "avg_pool": _pool, "resize": _resize,
    "matmul": _matmul, "sdpa": _sdpa, "lstm": lambda i, a: _recurrent(i, a, 2), "gru": lambda i, a: _recurrent(i, a, 1),
    "group_norm": _same, "unary": _unary, "binary": _binary, "where": _where, "cast": _cast, "chain": _same,
    "softmax": _along_axis, "reduce": _reduce, "arg_reduce": _arg_reduce, "top_k": _top_k, "cumsum": _along_axis,
    "reshape": _reshape, "permute": _permute, "slice": _slice, "expand": _expand, "concat": _concat, "pad": _pad,
    "trilu": _same, "gather": _gather, "gather_elements": _gather_elements, "gather_nd": _gather_nd,
    "scatter_elements": _same, "scatter_nd": _same, "fill": _fill, "iota": _iota, "sizes": _sizes,
    "nms": _nms,
    "linear": _linear, "layer_norm": _same, "rms_norm": _same,
}  # fmt: skip
