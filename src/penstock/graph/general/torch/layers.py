"""Readers of layers: matrices, attention, norms, reductions, images and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from penstock.errors import UnsupportedError
from penstock.graph.general.draft import Tensor
from penstock.graph.general.einsum import einsum
from penstock.graph.general.images import image_op, same_pads, weight_channels_last
from penstock.graph.general.shape_rules import normalise_axis
from penstock.graph.general.sizes import SizeExpression, SizeLike, largest, product
from penstock.graph.general.torch.computed import (
    computed_conv,
    computed_conv_transpose,
    is_computed,
    per_channel,
    scaled,
)
from penstock.graph.general.torch.numbers import scaled_size
from penstock.graph.general.torch.writer import OPS, Writer, dtype_named, reader
from penstock.graph.ir import DType

__all__ = ["adaptive_pool", "convolved", "pooled"]

# ---- matrices and attention


@reader("linear.default")
def _linear(w: Writer, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return w.linear(x, weight, bias)


@reader("addmm.default")
def _addmm(w: Writer, bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    out = w.matmul(a, b)
    out = out if alpha == 1 else w.binary("mul", out, float(alpha))
    return w.binary("add", out, bias if beta == 1 else w.binary("mul", bias, float(beta)))


@reader("baddbmm.default")
def _baddbmm(w: Writer, bias: Tensor, a: Tensor, b: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _addmm(w, bias, a, b, beta, alpha)


@reader("mm.default", "bmm.default", "matmul.default", "mv.default", "dot.default")
def _matmul(w: Writer, a: Tensor, b: Tensor) -> Tensor:
    return w.matmul(w.as_float(a), w.as_float(b))


@reader("einsum.default")
def _einsum(w: Writer, equation: str, operands: Sequence[Tensor], *, path: Any = None) -> Tensor:
    return einsum(w, equation, operands)


@reader("scaled_dot_product_attention.default")
def _attention(
    w: Writer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *rest: Any, scale: float | None = None,
    **options: Any,
) -> Tensor:  # fmt: skip
    causal = bool(rest[1] if len(rest) > 1 else options.get("is_causal", False))
    scale = rest[2] if len(rest) > 2 else scale
    mask = options.get("attn_mask", mask)
    rank = q.rank
    if rank == 3:
        q, k, v = (w.unsqueeze(tensor, 0) for tensor in (q, k, v))
    if rank > 4:
        raise UnsupportedError(f"attention: expected up to four dimensions, got {rank}")
    width = q.shape[-1]
    if scale is None and isinstance(width, SizeExpression):
        raise UnsupportedError("attention: expected heads of a constant size")
    attrs = {"scale": float(width) ** -0.5 if scale is None else float(scale), "causal": causal}  # type: ignore[arg-type]
    out = w.add("sdpa", q, k, v, mask, **attrs)
    return w.reshape(out, out.shape[1:]) if rank == 3 else out


# ---- norms


@reader("native_layer_norm.default")
def _native_layer_norm(w: Writer, *args: Any) -> tuple[Any, ...]:
    return _layer_norm(w, *args), None, None


@reader("native_group_norm.default")
def _native_group_norm(w: Writer, x: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Any, ...]:
    groups, eps = rest[3], rest[4]
    return _group_norm(w, x, groups, weight, bias, eps), None, None


@reader("layer_norm.default")
def _layer_norm(
    w: Writer, x: Tensor, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    width = int(np.prod(list(shape)))
    rows = w.reshape(x, (product(x.shape[: x.rank - len(shape)]), width))
    if is_computed(weight, bias):
        out = w.add("layer_norm", rows, _vector(w, None, width, 1.0), None, eps=float(eps))
        return scaled(w, w.reshape(out, x.shape), weight, bias)
    weight = _vector(w, weight, width, 1.0)
    bias = None if bias is None else _vector(w, bias, width, 0.0)
    return w.reshape(w.add("layer_norm", rows, weight, bias, eps=float(eps)), x.shape)


@reader("rms_norm.default")
def _rms_norm(w: Writer, x: Tensor, shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    width = int(np.prod(list(shape)))
    rows = w.reshape(x, (product(x.shape[: x.rank - len(shape)]), width))
    eps = 1.1920929e-07 if eps is None else float(eps)
    known = None if is_computed(weight) else weight
    out = w.reshape(w.add("rms_norm", rows, _vector(w, known, width, 1.0), eps=eps), x.shape)
    return scaled(w, out, weight if is_computed(weight) else None, None)


def _vector(w: Writer, tensor: Tensor | None, width: int, default: float) -> Tensor:
    if tensor is None:
        return w.constant(np.full(width, default, np.float32))
    return w.constant(np.ascontiguousarray(tensor.value, np.float32).reshape(-1))


@reader("group_norm.default")
def _group_norm(
    w: Writer, x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    channels = x.shape[1]
    if not isinstance(channels, int):
        raise UnsupportedError("group_norm: expected a constant number of channels")
    if is_computed(weight, bias):
        computed = (None if v is None else per_channel(w, x, v) for v in (weight, bias))
        return scaled(w, _group_norm(w, x, groups, None, None, eps), *computed)
    vectors = (_vector(w, weight, channels, 1.0), _vector(w, bias, channels, 0.0))
    flat = w.reshape(x, (*x.shape[:2], product(x.shape[2:]))) if x.rank not in (3, 4) else x
    out = image_op(w.draft, "group_norm", flat, *vectors, name=w.name, groups=groups, eps=float(eps))
    return w.reshape(out, x.shape)


@reader("instance_norm.default")
def _instance_norm(w: Writer, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Tensor:
    mean, var, use_input_stats, momentum, eps = rest[:5]
    if not use_input_stats:
        return cast(Tensor, _batch_norm(w, x, weight, bias, mean, var, momentum, eps)[0])
    return _group_norm(w, x, x.shape[1], weight, bias, eps)  # type: ignore[arg-type]


@reader("_native_batch_norm_legit_no_training.default")
def _batch_norm(
    w: Writer, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Any, ...]:
    """Write x * scale + shift, which a convolution before it takes."""
    if is_computed(mean, var, weight, bias):
        spread = w.unary("rsqrt", w.binary("add", var, float(eps)))
        centred = w.binary("sub", x, per_channel(w, x, mean))
        vectors = (None if v is None else per_channel(w, x, v) for v in (weight, bias))
        return scaled(w, w.binary("mul", centred, per_channel(w, x, spread)), *vectors), None, None
    scale = 1.0 / np.sqrt(np.asarray(var.value, np.float64) + eps)
    scale = scale if weight is None else scale * np.asarray(weight.value, np.float64)
    shift = -np.asarray(mean.value, np.float64) * scale + (0.0 if bias is None else np.asarray(bias.value, np.float64))
    shape = (-1, *[1] * (x.rank - 2))
    factors, summands = (w.constant(v.astype(np.float32).reshape(shape)) for v in (scale, shift))
    return w.binary("add", w.binary("mul", x, factors), summands), None, None


@reader("batch_norm.default", "cudnn_batch_norm.default")
def _batch_norm_eval(w: Writer, x: Tensor, weight: Any, bias: Any, *rest: Any) -> Any:
    mean, var, training, momentum, eps = rest[:5]
    if training:
        raise UnsupportedError("batch_norm: expected a module in eval mode, got one that is training")
    return _batch_norm(w, x, weight, bias, mean, var, momentum, eps)[0]


# ---- reductions


def _axes(x: Tensor, axes: Any) -> tuple[int, ...]:
    if axes is None or axes == []:
        return tuple(range(x.rank))
    return tuple(normalise_axis(axis, x.rank) for axis in ([axes] if isinstance(axes, int) else axes))


def _reduced(w: Writer, kind: str, x: Tensor, axes: Any, keep: bool) -> Tensor:
    if x.rank == 0:
        return x
    return w.add("reduce", x, kind=kind, axes=_axes(x, axes), keep=keep)


@reader("mean.dim", "mean.default")
def _mean(w: Writer, x: Tensor, axes: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    return _reduced(w, "mean", w.as_float(x), axes, keep)


@reader("sum.dim_IntList", "sum.default")
def _sum(w: Writer, x: Tensor, axes: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    x = w.cast(x, dtype_named(dtype)) if dtype is not None else w.cast(x, DType.I64) if x.dtype != DType.F32 else x
    return _reduced(w, "sum", x, axes, keep)


@reader("prod.dim_int", "prod.default")
def _prod(w: Writer, x: Tensor, axis: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    x = w.cast(x, dtype_named(dtype)) if dtype is not None else w.cast(x, DType.I64) if x.dtype != DType.F32 else x
    return _reduced(w, "prod", x, axis, keep)


@reader("amax.default")
def _amax(w: Writer, x: Tensor, axes: Any = None, keep: bool = False) -> Tensor:
    return _reduced(w, "max", x, axes, keep)


@reader("amin.default")
def _amin(w: Writer, x: Tensor, axes: Any = None, keep: bool = False) -> Tensor:
    return _reduced(w, "min", x, axes, keep)


@reader("max.dim")
def _max(w: Writer, x: Tensor, axis: int, keep: bool = False) -> tuple[Tensor, Tensor]:
    return _reduced(w, "max", x, axis, keep), _arg(w, "max", x, axis, keep)


@reader("min.dim")
def _min(w: Writer, x: Tensor, axis: int, keep: bool = False) -> tuple[Tensor, Tensor]:
    return _reduced(w, "min", x, axis, keep), _arg(w, "min", x, axis, keep)


@reader("max.default")
def _max_all(w: Writer, x: Tensor) -> Tensor:
    return _reduced(w, "max", x, None, False)


@reader("min.default")
def _min_all(w: Writer, x: Tensor) -> Tensor:
    return _reduced(w, "min", x, None, False)


@reader("any.dim", "any.default", "any.dims")
def _any(w: Writer, x: Tensor, axes: Any = None, keep: bool = False) -> Tensor:
    return _reduced(w, "max", w.cast(x, DType.BOOL), axes, keep)


@reader("all.dim", "all.default", "all.dims")
def _all(w: Writer, x: Tensor, axes: Any = None, keep: bool = False) -> Tensor:
    return _reduced(w, "min", w.cast(x, DType.BOOL), axes, keep)


@reader("logsumexp.default")
def _logsumexp(w: Writer, x: Tensor, axes: Any, keep: bool = False) -> Tensor:
    return _reduced(w, "log_sum_exp", w.as_float(x), axes, keep)


@reader("var.dim")
def _var_dim(w: Writer, x: Tensor, axes: Any = None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _var(w, x, axes, correction=int(unbiased), keepdim=keepdim)


@reader("std.dim")
def _std_dim(w: Writer, x: Tensor, axes: Any = None, unbiased: bool = True, keepdim: bool = False) -> Tensor:
    return _std(w, x, axes, correction=int(unbiased), keepdim=keepdim)


@reader("var.correction")
def _var(w: Writer, x: Tensor, axes: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    every = _axes(x, axes)
    centred = w.binary("sub", x, _reduced(w, "mean", x, every, True))
    total = _reduced(w, "sum_square", centred, every, keepdim)
    number = product(x.shape[axis] for axis in every)
    less = 1 if correction is None else correction
    if less == int(less):
        count = w.cast(w.constant(largest(number - int(less), 0)), DType.F32)
    else:
        count = w.binary("max", w.binary("sub", w.cast(w.constant(number), DType.F32), float(less)), 0.0)
    return w.binary("div", total, count)


@reader("std.correction")
def _std(w: Writer, x: Tensor, axes: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Tensor:
    return w.unary("sqrt", _var(w, x, axes, correction=correction, keepdim=keepdim))


@reader("var_mean.default")
def _var_mean_all(w: Writer, x: Tensor, unbiased: bool = True) -> Any:
    return _var_mean(w, x, correction=int(unbiased))


@reader("var_mean.dim")
def _var_mean_dim(w: Writer, x: Tensor, axes: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return _var_mean(w, x, axes, correction=int(unbiased), keepdim=keepdim)


@reader("var_mean.correction")
def _var_mean(w: Writer, x: Tensor, axes: Any = None, *, correction: Any = 1, keepdim: bool = False) -> Any:
    return _var(w, x, axes, correction=correction, keepdim=keepdim), _reduced(w, "mean", x, axes, keepdim)


@reader("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def _norm(w: Writer, x: Tensor, order: Any = 2, axes: Any = None, keep: bool = False, *, dtype: Any = None) -> Tensor:
    kinds = {1: "l1", 2: "l2", None: "l2"}
    if order in (math.inf, -math.inf):
        return _reduced(w, "max" if order > 0 else "min", w.unary("abs", x), axes, keep)
    if order == 0:
        return _reduced(w, "sum", w.cast(w.binary("ne", x, 0.0), DType.F32), axes, keep)
    if order not in kinds:
        raise UnsupportedError(f"norm: expected order 0, 1, 2, inf or -inf, got {order}")
    return w.unary("abs", x) if x.rank == 0 else _reduced(w, kinds[order], x, axes, keep)


def _arg(w: Writer, kind: str, x: Tensor, axis: Any, keep: bool) -> Tensor:
    if axis is None or x.rank == 0:
        place = w.add("arg_reduce", w.reshape(x, (-1,)), kind=kind, axis=0, keep=False)
        return w.reshape(place, (1,) * x.rank if keep else ())
    return w.add("arg_reduce", x, kind=kind, axis=axis, keep=keep)


@reader("argmax.default")
def _argmax(w: Writer, x: Tensor, axis: Any = None, keep: bool = False) -> Tensor:
    return _arg(w, "max", x, axis, keep)


@reader("argmin.default")
def _argmin(w: Writer, x: Tensor, axis: Any = None, keep: bool = False) -> Tensor:
    return _arg(w, "min", x, axis, keep)


@reader("softmax.int", "_softmax.default")
def _softmax(w: Writer, x: Tensor, axis: int, *options: Any) -> Tensor:
    return w.add("softmax", w.as_float(x), axis=axis)


@reader("log_softmax.int", "_log_softmax.default")
def _log_softmax(w: Writer, x: Tensor, axis: int, *options: Any) -> Tensor:
    return w.add("softmax", w.as_float(x), axis=axis, log=True)


@reader("cumsum.default")
def _cumsum(w: Writer, x: Tensor, axis: int, *, dtype: Any = None) -> Tensor:
    x = w.cast(x, dtype_named(dtype)) if dtype is not None else w.cast(x, DType.I64) if x.dtype != DType.F32 else x
    return w.add("cumsum", x, axis=axis) if x.rank else x


@reader("topk.default")
def _topk(w: Writer, x: Tensor, k: Any, axis: int = -1, largest: bool = True, ordered: bool = True) -> Any:
    return w.add_many("top_k", x, k=(k,), axis=axis, largest=largest, sorted=ordered)


@reader("sort.default", "sort.stable")
def _sort(w: Writer, x: Tensor, *args: Any, dim: int = -1, descending: bool = False, stable: Any = None) -> Any:
    numbers = [a for a in args if isinstance(a, int) and not isinstance(a, bool)]
    flags = [a for a in args if isinstance(a, bool)]
    axis, largest = (numbers or [dim])[0], (flags or [descending])[-1]
    return w.add_many("top_k", x, k=(x.shape[normalise_axis(axis, x.rank)],), axis=axis, largest=largest, sorted=True)


# ---- images

_MAX_PARTS = 64


def _two(value: Any, axes: int) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * axes if len(values) == 1 else values)


def convolved(
    w: Writer, x: Tensor, weight: Tensor, bias: Tensor | None, strides: Any, pads: tuple[int, ...], dilations: Any,
    groups: int,
) -> Tensor:  # fmt: skip
    """Return a convolution over images or rows, with or without a batch.  ``pads``: all begins, then all ends."""
    axes = weight.rank - 2
    single = x.rank == axes + 1  # without a batch
    x = w.unsqueeze(x, 0) if single else x
    known = None if is_computed(bias) else bias
    if is_computed(weight):
        out = computed_conv(w, x, weight, _two(strides, axes), pads, _two(dilations, axes), groups)
    else:
        out = image_op(
            w.draft, "conv", x, weight_channels_last(w.draft, weight, w.name), known, None, name=w.name,
            kernel=tuple(weight.shape[2:]), strides=_two(strides, axes), pads=pads, dilations=_two(dilations, axes),
            groups=groups,
        )  # fmt: skip
    return _with_bias(w, out, bias if is_computed(weight, bias) else None, single)


def _with_bias(w: Writer, out: Tensor, bias: Tensor | None, single: bool) -> Tensor:
    """Return the result of a convolution with a bias that it has not taken, and without a batch if it had none."""
    out = out if bias is None else w.binary("add", out, per_channel(w, out, bias))
    return w.reshape(out, out.shape[1:]) if single else out


@reader("conv2d.default", "conv1d.default")
def _conv(
    w: Writer, x: Tensor, weight: Tensor, bias: Any = None, strides: Any = 1, pads: Any = 0, dilations: Any = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    return convolved(w, x, weight, bias, strides, _two(pads, weight.rank - 2) * 2, dilations, groups)


@reader("conv2d.padding", "conv1d.padding")
def _conv_padding(
    w: Writer, x: Tensor, weight: Tensor, bias: Any = None, strides: Any = 1, padding: str = "valid",
    dilations: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    axes = weight.rank - 2
    pads = (0,) * (2 * axes)
    if padding == "same":
        extents = [d * (k - 1) + 1 for d, k in zip(_two(dilations, axes), weight.shape[2:], strict=True)]
        pads = same_pads(x.shape[-axes:], extents, [1] * axes)  # type: ignore[arg-type]
    return convolved(w, x, weight, bias, strides, pads, dilations, groups)


@reader("_weight_norm.default")
def _weight_norm(w: Writer, v: Tensor, g: Tensor, axis: int = 0) -> Tensor:
    """Compute the weight of a layer with ``weight_norm`` now, as the layer needs a constant."""
    if v.value is None or g.value is None:
        raise UnsupportedError(f"{w.name}: expected constant weights, got computed ones")
    array, others = np.asarray(v.value, np.float64), tuple(i for i in range(v.rank) if i != axis % v.rank)
    norm = np.sqrt(np.square(array).sum(axis=others if axis != -1 else None, keepdims=True))
    return w.constant((array * (np.asarray(g.value, np.float64) / norm)).astype(np.float32))


@reader("convolution.default")
def _convolution(w: Writer, x: Tensor, weight: Tensor, bias: Any, *rest: Any) -> Tensor:
    strides, pads, dilations, transposed, output_pads, groups = rest
    if transposed:
        return _conv_transpose(w, x, weight, bias, strides, pads, output_pads, groups, dilations)
    if weight.rank == 5:
        return cast(Tensor, OPS["aten.conv3d.default"](w, x, weight, bias, strides, pads, dilations, groups))
    return _conv(w, x, weight, bias, strides, pads, dilations, groups)


@reader("conv_transpose2d.input", "conv_transpose1d.default")
def _conv_transpose(w: Writer, x: Tensor, weight: Tensor, bias: Any = None, *rest: Any, **options: Any) -> Tensor:
    names = ("stride", "padding", "output_padding", "groups", "dilation")
    settings = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1} | options
    settings |= dict(zip(names, rest, strict=False))
    strides, pads, output_pads, groups, dilations = (settings[name] for name in names)
    axes = weight.rank - 2
    single = x.rank == axes + 1
    x = w.unsqueeze(x, 0) if single else x
    strides, pads, dilations, more = (_two(value, axes) for value in (strides, pads, dilations, output_pads))
    if is_computed(weight):
        out = computed_conv_transpose(w, x, weight, strides, pads, dilations, more, groups)
    else:
        kernel = weight_channels_last(w.draft, weight, w.name, transposed=True, groups=groups)
        out = image_op(
            w.draft, "conv_transpose", x, kernel, None if is_computed(bias) else bias, name=w.name,
            kernel=tuple(weight.shape[2:]), strides=strides, pads=pads * 2, dilations=dilations, output_pads=more,
            groups=groups,
        )  # fmt: skip
    return _with_bias(w, out, bias if is_computed(weight, bias) else None, single)


def pooled(w: Writer, op: str, axes: int, x: Tensor, kernel: Any, strides: Any, pads: Any, **attrs: Any) -> Tensor:
    """Pool images or rows, with or without a batch."""
    single = x.rank == axes + 1
    x = w.unsqueeze(x, 0) if single else x
    out = image_op(
        w.draft, op, x, name=w.name, kernel=_two(kernel, axes), strides=_two(strides or kernel, axes),
        pads=_two(pads, axes) * 2, **attrs,
    )  # fmt: skip
    return w.reshape(out, out.shape[1:]) if single else out


def _max_pooled(
    w: Writer, axes: int, x: Tensor, kernel: Any, strides: Any = (), pads: Any = 0, dilations: Any = 1,
    ceil: bool = False,
) -> Tensor:  # fmt: skip
    return pooled(w, "max_pool", axes, x, kernel, strides, pads, dilations=_two(dilations, axes), ceil=ceil)


def _avg_pooled(
    w: Writer, axes: int, x: Tensor, kernel: Any, strides: Any = (), pads: Any = 0, ceil: bool = False,
    count_pads: bool = True, divisor: Any = None,
) -> Tensor:  # fmt: skip
    attrs = {"dilations": (1,) * axes, "ceil": ceil, "count_pads": count_pads}
    out = pooled(w, "avg_pool", axes, x, kernel, strides, pads, **attrs)
    if divisor is None:
        return out
    if any(_two(pads, axes)) or ceil:
        raise UnsupportedError("avg_pool2d: expected no divisor_override beside padding or ceil_mode")
    return w.binary("mul", out, float(np.prod(_two(kernel, axes))) / divisor)


def _declare_pools() -> None:
    for axes in (1, 2):
        OPS[f"aten.max_pool{axes}d.default"] = lambda w, *a, axes=axes, **o: _max_pooled(w, axes, *a, **o)
        OPS[f"aten.avg_pool{axes}d.default"] = lambda w, *a, axes=axes, **o: _avg_pooled(w, axes, *a, **o)
        OPS[f"aten.max_pool{axes}d_with_indices.default"] = lambda w, *a, axes=axes, **o: (
            _max_pooled(w, axes, *a, **o),
            "the indices of a pool",  # no tensor: an output of the module that needs them is refused
        )
        OPS[f"aten.adaptive_avg_pool{axes}d.default"] = lambda w, x, sizes, axes=axes: adaptive_pool(
            w, "avg_pool", "mean", x, _two(sizes, axes)
        )
        OPS[f"aten.adaptive_max_pool{axes}d.default"] = lambda w, x, sizes, axes=axes: (
            adaptive_pool(w, "max_pool", "max", x, _two(sizes, axes)),
            "the indices of a pool",
        )


_declare_pools()


@reader("_adaptive_avg_pool2d.default")
def _adaptive_avg_pool(w: Writer, x: Tensor, sizes: Any) -> Tensor:
    return adaptive_pool(w, "avg_pool", "mean", x, _two(sizes, 2))


def adaptive_pool(w: Writer, op: str, kind: str, x: Tensor, sizes: tuple[Any, ...]) -> Tensor:
    """Pool the last axes to ``sizes``, None for one that stays, as PyTorch's adaptive pools do."""
    axes = len(sizes)
    places = range(x.rank - axes, x.rank)
    wanted = [x.shape[at] if size is None else size for size, at in zip(sizes, places, strict=True)]
    if all(size == 1 for size in wanted):
        return _reduced(w, kind, x, tuple(places), True)
    pairs = [(x.shape[at], size) for size, at in zip(wanted, places, strict=True)]
    if axes < 3 and all(isinstance(own, int) and isinstance(size, int) and own % size == 0 for own, size in pairs):
        steps = [own // size for own, size in pairs]
        attrs = {"count_pads": False} if op == "avg_pool" else {}
        return pooled(w, op, axes, x, steps, steps, 0, dilations=(1,) * axes, ceil=False, **attrs)
    for (own, size), at in zip(pairs, places, strict=True):
        x = x if own == size else _in_parts(w, kind, x, at, size)
    return x


def _in_parts(w: Writer, kind: str, x: Tensor, axis: int, count: SizeLike) -> Tensor:
    """Reduce an axis to ``count`` places, each from the part that PyTorch's adaptive pools give it."""
    own = x.shape[axis]
    if not isinstance(count, int) or count > _MAX_PARTS:
        raise UnsupportedError(f"adaptive pool: expected a size that {own} is a multiple of, or up to {_MAX_PARTS}")
    ends = [(i * own // count, ((i + 1) * own + count - 1) // count) for i in range(count)]
    return w.concat([_reduced(w, kind, w.sliced(x, axis, *part), axis, True) for part in ends], axis)


@reader("_upsample_nearest_exact2d.vec", "_upsample_nearest_exact2d.default")
def _upsample_nearest_exact(w: Writer, x: Tensor, sizes: Any, *scales: Any) -> Tensor:
    return _resized(
        w, x, sizes, _scales(scales), mode="nearest", coordinates="half_pixel", rounding="round_prefer_ceil"
    )


@reader("upsample_nearest2d.vec", "upsample_nearest2d.default")
def _upsample_nearest(w: Writer, x: Tensor, sizes: Any, *scales: Any) -> Tensor:
    return _resized(w, x, sizes, _scales(scales), mode="nearest", coordinates="asymmetric", rounding="floor")


@reader("upsample_bilinear2d.vec", "upsample_bilinear2d.default")
def _upsample_bilinear(w: Writer, x: Tensor, sizes: Any, align_corners: bool, *scales: Any) -> Tensor:
    rule = "align_corners" if align_corners else "half_pixel"
    return _resized(w, x, sizes, _scales(scales), mode="linear", coordinates=rule)


@reader("upsample_bicubic2d.vec", "upsample_bicubic2d.default")
def _upsample_bicubic(w: Writer, x: Tensor, sizes: Any, align_corners: bool, *scales: Any) -> Tensor:
    rule = "align_corners" if align_corners else "half_pixel"
    return _resized(w, x, sizes, _scales(scales), mode="cubic", coordinates=rule)


@reader("upsample_nearest1d.vec", "upsample_nearest1d.default")
def _upsample_rows_nearest(w: Writer, x: Tensor, sizes: Any, *scales: Any) -> Tensor:
    return _rows_resized(w, x, sizes, scales, mode="nearest", coordinates="asymmetric", rounding="floor")


@reader("_upsample_nearest_exact1d.vec", "_upsample_nearest_exact1d.default")
def _upsample_rows_nearest_exact(w: Writer, x: Tensor, sizes: Any, *scales: Any) -> Tensor:
    return _rows_resized(w, x, sizes, scales, mode="nearest", coordinates="half_pixel", rounding="round_prefer_ceil")


@reader("upsample_linear1d.vec", "upsample_linear1d.default")
def _upsample_rows(w: Writer, x: Tensor, sizes: Any, align_corners: bool, *scales: Any) -> Tensor:
    rule = "align_corners" if align_corners else "half_pixel"
    return _rows_resized(w, x, sizes, scales, mode="linear", coordinates=rule)


def _rows_resized(w: Writer, x: Tensor, sizes: Any, scales: Sequence[Any], **attrs: Any) -> Tensor:
    """Resize rows as images of height 1."""
    factors = next((s for s in scales if s is not None), None)
    scale = factors[0] if isinstance(factors, (list, tuple)) else factors
    both = None if scale is None else [1.0, float(scale)]
    out = _resized(w, w.unsqueeze(x, 2), None if sizes is None else (1, *sizes), both, **attrs)
    return w.reshape(out, (*out.shape[:2], out.shape[3]))


def _scales(scales: Sequence[Any]) -> list[float] | None:
    """Return the factors of both axes, from one list or from two numbers; None if the sizes give them."""
    flat = [s for item in scales if item is not None for s in (item if isinstance(item, (list, tuple)) else [item])]
    return [float(s) for s in flat] if len(flat) == 2 else None


def _resized(w: Writer, x: Tensor, sizes: Any, scales: list[float] | None, **attrs: Any) -> Tensor:
    if sizes is None:
        if scales is None:
            raise UnsupportedError("upsample: expected sizes or scale factors")
        sizes = [scaled_size(size, scale) for size, scale in zip(x.shape[2:], scales, strict=True)]
    if scales is not None and attrs.get("coordinates") != "align_corners":
        attrs |= {"scale_h": scales[0], "scale_w": scales[1]}
    return image_op(w.draft, "resize", x, name=w.name, sizes=tuple(sizes), **attrs)
