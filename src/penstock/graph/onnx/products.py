"""Products of matrices: MatMul, Gemm, Einsum, and those of integers."""

from __future__ import annotations

import string
from collections.abc import Sequence

from penstock.graph.general.draft import Tensor
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


# Einsum.


@reads("Einsum")
def _einsum(site: Site) -> Tensor:
    equation = site.str_attr("equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    operands = site.every()
    site.expect(len(terms) == len(operands) and bool(operands), "as many terms as inputs")
    labels = [_labels(site, term, tensor.rank) for term, tensor in zip(terms, operands, strict=True)]
    dots = max((tuple(label for label in item if label.isdigit()) for item in labels), key=len)
    if arrow:
        result = _with_dots(site, right, dots)
    else:
        flat = [label for item in labels for label in item if not label.isdigit()]
        result = [*dots, *sorted(label for label in set(flat) if flat.count(label) == 1)]
    site.expect(len(set(result)) == len(result), "different letters in the result")
    pairs = [_without_diagonals(site, tensor, item) for tensor, item in zip(operands, labels, strict=True)]
    x, have = pairs[0]
    for at, (y, others) in enumerate(pairs[1:], 1):
        kept = {*result, *(label for _, item in pairs[at + 1 :] for label in item)}
        x, have = _contracted(site, (x, have), (y, others), kept)
    x, have = _summed(site, x, have, set(result))
    site.expect(set(have) == set(result), "letters of the inputs in the result")
    return site.permute(x, [have.index(label) for label in result])


def _labels(site: Site, term: str, rank: int) -> list[str]:
    """Return a letter for each axis; those of an ellipsis are numbers that count from its last axis."""
    count = rank - len(term.replace("...", ""))
    site.expect(count == 0 or (count > 0 and "..." in term), f"{rank} letters in {term!r}")
    return _with_dots(site, term, tuple(str(count - 1 - i) for i in range(count)))


def _with_dots(site: Site, term: str, dots: Sequence[str]) -> list[str]:
    before, mark, after = term.partition("...")
    letters = before + after
    site.expect(all(letter in string.ascii_letters for letter in letters), "an equation of letters")
    return [*before, *(dots if mark else ()), *after]


def _without_diagonals(site: Site, x: Tensor, labels: list[str]) -> tuple[Tensor, list[str]]:
    for label in list(labels):
        while labels.count(label) > 1:
            first = labels.index(label)
            second = labels.index(label, first + 1)
            size = x.shape[first]
            place = site.add("iota", range=(0, 1, size))
            rows = site.reshape(place, [size if at == first else 1 for at in range(x.rank)])
            columns = site.reshape(place, [size if at == second else 1 for at in range(x.rank)])
            x = site.add("where", site.binary("eq", rows, columns), x, site.like(x, 0))
            x = site.add("reduce", x, kind="sum", axes=(second,), keep=False)
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _summed(site: Site, x: Tensor, labels: list[str], kept: set[str]) -> tuple[Tensor, list[str]]:
    axes = tuple(at for at, label in enumerate(labels) if label not in kept)
    if axes:
        x = site.add("reduce", x, kind="sum", axes=axes, keep=False)
    return x, [label for label in labels if label in kept]


def _contracted(
    site: Site, first: tuple[Tensor, list[str]], second: tuple[Tensor, list[str]], kept: set[str]
) -> tuple[Tensor, list[str]]:
    """Return the product of two terms, summed over the letters that nothing else has."""
    (x, a), (y, b) = first, second
    x, a = _summed(site, x, a, kept | set(b))
    y, b = _summed(site, y, b, kept | set(a))
    batch = [label for label in a if label in b and label in kept]
    inner = [label for label in a if label in b and label not in kept]
    rows = [label for label in a if label not in b]
    columns = [label for label in b if label not in a]
    sizes = dict(zip(a, x.shape, strict=True))
    for label, size in zip(b, y.shape, strict=True):
        sizes[label] = size if sizes.get(label, 1) == 1 else sizes[label]
    x, y = (
        site.add("expand", tensor, sizes=tuple(sizes[label] for label in labels))
        if tuple(sizes[label] for label in labels) != tensor.shape else tensor
        for tensor, labels in ((x, a), (y, b))
    )  # fmt: skip
    shape = [product(sizes[label] for label in group) for group in (batch, rows, inner, columns)]
    left = site.reshape(site.permute(x, [a.index(label) for label in (*batch, *rows, *inner)]), shape[:3])
    right = site.reshape(
        site.permute(y, [b.index(label) for label in (*batch, *columns, *inner)]), (shape[0], shape[3], shape[2])
    )
    made = site.add("matmul", left, right, transpose_b=True)
    labels = [*batch, *rows, *columns]
    return site.reshape(made, [sizes[label] for label in labels]), labels
