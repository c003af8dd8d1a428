"""Matrix products and attention of general networks against numpy and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import InvalidArgumentError
from tests.support.errors import raises
from tests.support.general_ops import check, run

PLAIN = {"transpose_a": False, "transpose_b": False, "scale": 1.0}


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("a", "b"),
    [((3, 4), (4, 5)), ((100, 33), (33, 50)), ((2, 3, 7, 8), (2, 3, 8, 9)), ((5, 8), (2, 1, 8, 20)),
     ((4, 1, 200, 16), (3, 16, 17)), ((2, 0, 3), (2, 3, 4)), ((2, 5, 0), (2, 0, 4)), ((1, 70), (70, 1)),
     ((2, 33), (33, 300)), ((3, 1, 40), (3, 40, 257))],
)  # fmt: skip
def test_matmul_matches_numpy(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    x, y = numbers(*a), numbers(*b, seed=1)
    expected = (x.astype(np.float64) @ y).astype(np.float32)
    check("matmul", [x, y], expected, absolute=1e-5, **PLAIN)
    for left, right in ((True, False), (False, True), (True, True)):
        operands = [x.swapaxes(-1, -2) if left else x, y.swapaxes(-1, -2) if right else y]
        attrs = PLAIN | {"transpose_a": left, "transpose_b": right}
        check("matmul", operands, expected, absolute=1e-5, **attrs)
    check("matmul", [x, y], expected / 2, absolute=1e-5, **PLAIN | {"scale": 0.5})


def test_matmul_has_the_same_bits_in_any_batch() -> None:
    x, y = numbers(3, 50, 20), numbers(3, 20, 30, seed=1)
    together = run("matmul", [x, y], [((3, 50, 30), np.float32)], **PLAIN)[0]
    alone = run("matmul", [x[1, 7:9], y[1]], [((2, 30), np.float32)], **PLAIN)[0]
    assert together[1, 7:9].tobytes() == alone.tobytes()
    alone = run("matmul", [x[1, 7:8], y[1]], [((1, 30), np.float32)], **PLAIN)[0]
    assert together[1, 7:8].tobytes() == alone.tobytes()


def test_wrong_products_are_refused_by_name() -> None:
    for a, b, param in (((2, 3), (4, 5), "b"), ((3,), (3, 2), "a"), ((2, 3, 4), (3, 4, 5), "b")):
        with raises(InvalidArgumentError, param=param, match="^matmul: "):
            run("matmul", [numbers(*a), numbers(*b)], [((2, 5), np.float32)], **PLAIN)


def attend(q: Any, k: Any, v: Any, mask: Any = None, **attrs: Any) -> None:
    tensors: Any = [torch.from_numpy(x).double() for x in (q, k, v)]
    function: Any = torch.nn.functional.scaled_dot_product_attention
    theirs = torch.from_numpy(mask) if mask is not None else None
    if theirs is not None and theirs.dtype == torch.float32:
        theirs = theirs.double()
    scale = attrs.pop("scale", q.shape[-1] ** -0.5)
    expected = function(
        *tensors, attn_mask=theirs, is_causal=attrs.get("causal", False), scale=scale, enable_gqa=True
    )  # fmt: skip
    check("sdpa", [q, k, v, mask], expected.float().numpy(), absolute=5e-6, scale=scale, softcap=0.0,
          **{"causal": False} | attrs)  # fmt: skip


def test_sdpa_matches_torch() -> None:
    q, k, v = numbers(2, 6, 50, 24), numbers(2, 3, 41, 24, seed=1), numbers(2, 3, 41, 20, seed=2)
    attend(q, k, v)
    attend(q, k, v, causal=True)
    attend(q, k, v, scale=-0.3)
    attend(q, k, v, numbers(50, 41, seed=3))
    attend(q, k, v, numbers(2, 1, 1, 41, seed=3))
    attend(q, k, v, numbers(50, 1, seed=3))
    seen = numbers(2, 6, 50, 41, seed=4) > 0
    seen[1, 2, 3] = False  # a query that sees nothing
    attend(q, k, v, seen)
    attend(numbers(1, 1, 1, 8), numbers(1, 1, 1, 8), numbers(1, 1, 1, 1))
    attend(numbers(0, 1, 2, 8), numbers(0, 1, 3, 8), numbers(0, 1, 3, 4))


def test_sdpa_has_softcap_and_the_same_bits_in_any_batch() -> None:
    q, k, v = numbers(3, 2, 30, 16), numbers(3, 2, 30, 16, seed=1), numbers(3, 2, 30, 16, seed=2)
    attrs = {"scale": 0.25, "causal": True, "softcap": 2.0}
    scores = 2 * np.tanh(q @ k.swapaxes(-1, -2) * 0.25 / 2)
    scores[..., np.triu(np.ones((30, 30), bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    check("sdpa", [q, k, v, None], expected.astype(np.float32), absolute=5e-6, **attrs)
    together = run("sdpa", [q, k, v, None], [(q.shape, np.float32)], **attrs)[0]
    alone = run("sdpa", [q[1:2], k[1:2], v[1:2], None], [((1, 2, 30, 16), np.float32)], **attrs)[0]
    assert together[1].tobytes() == alone.tobytes()


def test_wrong_attention_is_refused_by_name() -> None:
    q, k = numbers(1, 4, 5, 8), numbers(1, 2, 6, 8)
    attrs = {"scale": 1.0, "causal": False, "softcap": 0.0}
    for operands, name in (
        ([q, numbers(1, 3, 6, 8), numbers(1, 3, 6, 8), None], "k"), ([q, k, numbers(1, 2, 7, 8), None], "v"),
        ([q, k, k, numbers(5, 7)], "mask"), ([q[0], k, k, None], "q"),
    ):  # fmt: skip
        with raises(InvalidArgumentError, param=name):
            run("sdpa", operands, [((1, 4, 5, 8), np.float32)], **attrs)
