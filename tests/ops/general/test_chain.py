"""Chains of elementwise steps have the same bits as their steps one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.core import native
from penstock.errors import PenstockError
from tests.support.general_ops import contexts, core_tensor, run

F32 = np.float32
UNARY = {"relu": (0.0, 0.0), "hard_swish": (0.0, 0.0), "clip": (0.5, 6.0), "gelu": (0.0, 0.0), "sin": (0.0, 0.0)}


def numbers(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F32)


def one_by_one(x: Any, operands: dict[str, Any], steps: str) -> Any:
    for step in steps.split(";"):
        name, *words = step.split()
        if name in UNARY or name in ("leaky_relu", "rsqrt"):
            alpha, beta = ([float(word) for word in words] + [0.0, 0.0])[:2]
            (x,) = run("unary", [x], [(x.shape, F32)], kind=name, alpha=alpha, beta=beta)
            continue
        other = operands[words[0]] if words[0] in operands else np.asarray(F32(words[0]))
        pair = [other, x] if name in ("rsub", "rdiv", "rpow") else [x, other]
        kind = name[1:] if name in ("rsub", "rdiv", "rpow") else name
        (x,) = run("binary", pair, [(x.shape, F32)], kind=kind)
    return x


STEPS = [
    "relu",
    "mul a;add b;hard_swish;clip 0 6",
    "add 3;clip 0 6;mul 0.16666667;mul c",
    "rsub a;rdiv 1;max d;min e;gelu",
    "sub a;mul a;leaky_relu 0.1;prelu b;sin;pow 2;add 1e-05;rsqrt",
    "div 1.2345679e+1;fmod b;rpow 2",
]


@pytest.mark.parametrize("steps", STEPS)
def test_chain_equals_its_steps(steps: str) -> None:
    for shape in ((2, 13, 11, 24), (3, 5000), (1, 1), (2, 0, 3), (2, 3, 2, 2, 2, 5), (7,), ()):
        x = numbers(*shape)
        middle = [1] * len(shape)
        middle[:1] = shape[:1]
        operands = {
            "a": numbers(*shape[-1:], seed=1),
            "b": numbers(*middle, seed=2),
            "c": numbers(*shape, seed=3),
            "d": numbers(*[1] * len(shape), seed=4),
            "e": numbers(*(1 if i == 1 else size for i, size in enumerate(shape)), seed=5),
        }
        x, operands = np.asarray(x, F32), {name: np.asarray(value, F32) for name, value in operands.items()}
        (found,) = run("chain", [x, *operands.values()], [(shape, F32)], steps=steps)
        with np.errstate(all="ignore"):
            assert found.tobytes() == one_by_one(x, operands, steps).tobytes()


def test_output_may_lie_over_an_operand() -> None:
    x, a, b = numbers(3, 700), numbers(3, 700, seed=1), numbers(3, 700, seed=2)
    expected = (x + a) * b - a
    for target in (0, 1, 2):
        for context in contexts():
            arrays = [x.copy(), a.copy(), b.copy()]
            operands = [*map(core_tensor, arrays), *[None] * 3, core_tensor(arrays[target])]
            native.run_op(context, "chain", operands, {"steps": "add a;mul b;sub a"})
            assert (arrays[target] == expected).all()


@pytest.mark.parametrize(
    "steps",
    ["", ";", "relu;", "relu9", "mul", "mul z", "mul b", "add a a", "clip 0 6 7", "eq a", "is_nan", "xor a", "add 1e",
     "add 1e99", "add --1", "add .", "none", "relu " * 60, ";".join(["relu"] * 9), "r", "rrelu"],
)  # fmt: skip
def test_wrong_steps_are_refused(steps: str) -> None:
    with pytest.raises(PenstockError):
        run("chain", [numbers(3), numbers(3), *[None] * 4], [((3,), F32)], steps=steps)


def test_operands_that_enlarge_x_are_refused() -> None:
    for other in (numbers(2, 3), numbers(4), numbers(3).astype(np.float64).astype(np.int32)):
        with pytest.raises(PenstockError):
            run("chain", [numbers(3), other, *[None] * 4], [((3,), F32)], steps="add a")
    run("chain", [numbers(3), numbers(1), *[None] * 4], [((3,), F32)], steps="add a")
