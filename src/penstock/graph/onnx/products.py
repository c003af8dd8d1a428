"""Products of matrices: MatMul, Gemm, Einsum, and those of integers."""

from __future__ import annotations

from penstock.graph.general.draft import Tensor
from penstock.graph.general.einsum import einsum
from penstock.graph.general.sizes import product
from penstock.graph.ir import DType
from penstock.graph.onnx.context import Site
from penstock.graph.onnx.registry import reads

__all__ = ["exact_product", "matmul"]

_EXACT_TERMS = 256  # products of two bytes, of which so many sum up exactly in f32


@reads("MatMul")
def _matmul(site: Site) -> Tensor:
    a, b = site.x(0), site.x(1)
    site.require(a.dtype == DType.F32, f"products of {a.dtype.name.lower()} are not supported")
    return matmul(site, a, b)


def matmul(site: Site, a: Tensor, b: Tensor) -> Tensor:
    """Return numpy's matmul; a constant matrix on the right is the weight of a ``linear``."""
    site.expect(a.rank > 0 and b.rank > 0, "vectors or matrices")
    if b.rank == 2 and site.is_plain(b) and not site.is_plain(a):
        weight = site.permute(b, (1, 0))
        rows = site.reshape(a, (product(a.shape[:-1]), a.shape[-1]))
        return site.reshape(site.add("linear", rows, weight, None), (*a.shape[:-1], b.shape[1]))
    left = site.reshape(a, (1, *a.shape)) if a.rank == 1 else a
    right = site.reshape(b, (*b.shape, 1)) if b.rank == 1 else b
    y: Tensor = site.add("matmul", left, right)
    shape = list(y.shape)
    if b.rank == 1:
        del shape[-1]
    if a.rank == 1:
        del shape[-1 if b.rank == 1 else -2]
    return site.reshape(y, shape)


@reads("Gemm")
def _gemm(site: Site) -> Tensor:
    a, b, c = site.x(0), site.x(1), site.optional(2)
    site.expect(a.rank == 2 and b.rank == 2, "matrices")
    site.require(a.dtype == DType.F32, f"products of {a.dtype.name.lower()} are not supported")
    alpha, beta = site.float_attr("alpha", 1.0), site.float_attr("beta", 1.0)
    turned = site.flag("transB")
    if site.is_plain(b) and not site.is_plain(a):
        a = site.permute(a, (1, 0)) if site.flag("transA") else a
        weight = b if turned else site.permute(b, (1, 0))
        bias = _bias(site, c, weight) if alpha == 1.0 and beta == 1.0 else None
        y: Tensor = site.add("linear", a, weight, bias)
        y = site.binary("mul", y, alpha) if alpha != 1.0 else y
        c = None if bias is not None else c
    else:
        y = site.add("matmul", a, b, transpose_a=site.flag("transA"), transpose_b=turned, scale=alpha)
    if c is None or beta == 0.0:
        return y
    return site.binary("add", y, site.binary("mul", c, beta) if beta != 1.0 else c)


def _bias(site: Site, c: Tensor | None, weight: Tensor) -> Tensor | None:
    """Return a constant that is one number for each column as the bias of a ``linear``."""
    outputs = weight.shape[0]
    if c is None or not site.is_plain(c) or c.shape not in ((outputs,), (1, outputs)):
        return None
    return site.reshape(c, (outputs,))


# Integers.  Sums of few products are whole numbers below 2^24, which f32 holds exactly.


def exact_product(site: Site, a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices whose elements are whole numbers of at most 9 bits, f32, as i32."""
    inner = site.fixed(a.shape[-1], "the inner size")
    total = None
    for begin in range(0, max(inner, 1), _EXACT_TERMS):
        end = min(begin + _EXACT_TERMS, inner)
        part = matmul(site, site.cut(a, a.rank - 1, begin, end), site.cut(b, max(b.rank - 2, 0), begin, end))
        part = site.cast(part, DType.I32)
        total = part if total is None else site.binary("add", total, part)
    site.expect(total is not None, "an inner size")
    return total  # type: ignore[return-value]


@reads("Einsum")
def _einsum(site: Site) -> Tensor:
    return einsum(site, site.str_attr("equation"), site.every())
