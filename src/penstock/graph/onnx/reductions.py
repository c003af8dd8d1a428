"""Reductions, sorting and sums along an axis."""

from __future__ import annotations

from typing import Final

from penstock.graph.general.draft import Tensor
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__: list[str] = []

_KINDS: Final = {
    "ReduceSum": "sum", "ReduceMean": "mean", "ReduceMax": "max", "ReduceMin": "min", "ReduceProd": "prod",
    "ReduceL1": "sum", "ReduceL2": "sum", "ReduceSumSquare": "sum", "ReduceLogSum": "sum", "ReduceLogSumExp": "sum",
}  # fmt: skip
_INPUT_SINCE: Final = {"ReduceSum": 13}


@reads(*_KINDS)
def _reduce(site: Site) -> Tensor:
    x, op = site.x(), site.node.op
    if site.version >= _INPUT_SINCE.get(op, 18):
        axes = site.whole(1) if site.has(1) else ()
    else:
        axes = site.ints("axes") or ()
    if not axes and site.flag("noop_with_empty_axes"):
        axes = ()
        return _finished(site, _prepared(site, x, op), op)
    chosen = tuple(site.axis(axis, x.rank) for axis in axes) or tuple(range(x.rank))
    keep = site.flag("keepdims", True)
    if op == "ReduceLogSumExp":
        return _log_sum_exp(site, x, chosen, keep)
    if x.dtype == DType.BOOL:
        x = site.cast(x, DType.I32)
    total: Tensor = site.add("reduce", _prepared(site, x, op), kind=_KINDS[op], axes=chosen, keep=keep)
    if site.x().dtype == DType.BOOL:
        return site.binary("gt", total, 0)
    return _finished(site, total, op)


def _prepared(site: Site, x: Tensor, op: str) -> Tensor:
    if op == "ReduceL1":
        return site.unary("abs", x)
    if op in ("ReduceL2", "ReduceSumSquare"):
        return site.unary("square", x) if x.dtype == DType.F32 else site.binary("mul", x, x)
    return site.unary("exp", x) if op == "ReduceLogSumExp" else x


def _finished(site: Site, x: Tensor, op: str) -> Tensor:
    kind = {"ReduceL2": "sqrt", "ReduceLogSum": "log", "ReduceLogSumExp": "log"}.get(op)
    return x if kind is None else site.unary(kind, x)


def _log_sum_exp(site: Site, x: Tensor, axes: tuple[int, ...], keep: bool) -> Tensor:
    """Return log(sum(exp(x))), less the largest element, which is taken to be finite."""
    most = site.add("reduce", x, kind="max", axes=axes, keep=True)
    most = site.unary("clip", most, -3e38, 3e38)
    total = site.add("reduce", site.unary("exp", site.binary("sub", x, most)), kind="sum", axes=axes, keep=True)
    result = site.binary("add", site.unary("log", total), most)
    shape = [size for at, size in enumerate(result.shape) if keep or at not in axes]
    return site.reshape(result, shape)


@reads("ArgMax", "ArgMin")
def _arg_reduce(site: Site) -> Tensor:
    made: Tensor = site.add(
        "arg_reduce",
        site.x(),
        kind="max" if site.node.op == "ArgMax" else "min",
        axis=site.axis(site.int_attr("axis"), site.x().rank),
        keep=site.flag("keepdims", True),
        last=site.flag("select_last_index"),
    )
    return made


@reads("TopK")
def _top_k(site: Site) -> tuple[Tensor, ...]:
    x = site.x()
    k = site.sizes(1)[0] if site.version >= 10 else site.int_attr("k")
    made: tuple[Tensor, ...] = site.add(
        "top_k",
        x,
        k=(k,),
        axis=site.axis(site.int_attr("axis", -1), x.rank),
        largest=site.flag("largest", True),
        sorted=site.flag("sorted", True),
    )
    return made


@reads("CumSum")
def _cumsum(site: Site) -> Tensor:
    x = site.x()
    made: Tensor = site.add(
        "cumsum",
        x,
        axis=site.axis(site.whole(1)[0], x.rank),
        exclusive=site.flag("exclusive"),
        reverse=site.flag("reverse"),
    )
    return made
