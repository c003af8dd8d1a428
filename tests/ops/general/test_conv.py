"""Convolutions and transposed convolutions of general networks against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.errors import InvalidArgumentError, UnsupportedError
from tests.support.errors import raises
from tests.support.general_ops import check, contexts, run
from tests.support.general_weights import conv_weight, packed, tiles, vector

F = torch.nn.functional
PLAIN: dict[str, Any] = {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1), "groups": 1, "act": "none",
                         "alpha": 0.0, "beta": 0.0}  # fmt: skip


def numbers(*shape: int, seed: int = 0, scale: float = 1) -> Any:
    return (np.random.default_rng(seed + sum(shape)).standard_normal(shape) * scale).astype(np.float32)


def nchw(x: Any) -> Any:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, 3, 1)))


def nhwc(x: Any) -> Any:
    return np.ascontiguousarray(np.moveaxis(x.numpy(), 1, 3))


# image (N, H, W, C), outputs, kernel, attributes
CONVS: Any = (
    ((1, 5, 7, 3), 8, (1, 1), {}),
    ((2, 9, 8, 5), 17, (3, 3), {"pads": (1, 1, 1, 1)}),
    ((1, 13, 12, 3), 33, (7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
    ((1, 8, 9, 16), 70, (3, 3), {"pads": (0, 1, 2, 0), "strides": (2, 1)}),
    ((1, 20, 21, 4), 5, (3, 2), {"dilations": (3, 2), "pads": (3, 1, 2, 1)}),
    ((3, 1, 30, 6), 4, (1, 5), {"pads": (0, 2, 0, 2)}),
    ((1, 6, 6, 12), 20, (3, 3), {"groups": 4, "pads": (1, 1, 1, 1)}),
    ((2, 7, 5, 20), 20, (3, 3), {"groups": 20, "pads": (1, 1, 1, 1)}),
    ((1, 9, 9, 33), 33, (5, 5), {"groups": 33, "pads": (2, 2, 2, 2), "strides": (2, 2)}),
    ((1, 9, 9, 6), 12, (3, 3), {"groups": 6, "dilations": (2, 2)}),
    ((0, 5, 5, 3), 4, (3, 3), {}),
)


@pytest.mark.parametrize(("shape", "out", "kernel", "attrs"), CONVS)
def test_conv_matches_torch(shape: tuple[int, ...], out: int, kernel: tuple[int, int], attrs: dict[str, Any]) -> None:
    attrs = PLAIN | attrs
    groups, pads = attrs["groups"], attrs["pads"]
    x, bias = numbers(*shape), numbers(out)
    weight = numbers(out, *kernel, shape[3] // groups, scale=(kernel[0] * kernel[1] * shape[3] / groups) ** -0.5)
    padded = F.pad(nchw(x), (pads[1], pads[3], pads[0], pads[2]))
    expected = F.conv2d(
        padded, nchw(weight), torch.from_numpy(bias), attrs["strides"], 0, attrs["dilations"], groups
    )  # fmt: skip
    check(
        "conv", [x, conv_weight(weight, groups), vector(bias), None], nhwc(expected), absolute=3e-6, relative=3e-6,
        out_channels=out, kernel=kernel, **attrs,
    )  # fmt: skip


def test_one_channel_is_depthwise_or_plain() -> None:
    x, weight = numbers(1, 6, 6, 1), numbers(1, 3, 3, 1)
    attrs = PLAIN | {"out_channels": 1, "kernel": (3, 3), "pads": (1, 1, 1, 1)}
    plain = run("conv", [x, conv_weight(weight), None, None], [((1, 6, 6, 1), np.float32)], **attrs)[0]
    depthwise = run("conv", [x, packed(1, weight.reshape(9, 1)), None, None], [((1, 6, 6, 1), np.float32)], **attrs)[0]
    assert plain.tobytes() == depthwise.tobytes()


@pytest.mark.parametrize("groups", [1, 24])
@pytest.mark.parametrize(
    ("act", "alpha", "beta"),
    [("relu", 0.0, 0.0), ("clip", 0.0, 6.0), ("silu", 0.0, 0.0), ("hard_swish", 0.0, 0.0), ("leaky_relu", 0.1, 0.0),
     ("gelu", 0.0, 0.0)],
)  # fmt: skip
def test_fused_conv_equals_its_parts(groups: int, act: str, alpha: float, beta: float) -> None:
    shape = (2, 7, 6, 24)
    x, residual, bias = numbers(*shape), numbers(*shape, seed=1), numbers(24, seed=2)
    weight = conv_weight(numbers(24, 3, 3, 24 // groups, scale=0.1), groups)
    attrs = PLAIN | {"out_channels": 24, "kernel": (3, 3), "pads": (1, 1, 1, 1), "groups": groups}
    output = [(shape, np.float32)]
    fused = run(
        "conv", [x, weight, vector(bias), residual], output, **attrs | {"act": act, "alpha": alpha, "beta": beta}
    )
    plain = run("conv", [x, weight, vector(bias), None], output, **attrs)[0]
    parts = run("unary", [plain + residual], output, kind=act, alpha=alpha, beta=beta)
    assert fused[0].tobytes() == parts[0].tobytes()


def test_conv_has_the_same_bits_in_any_batch_and_as_linear() -> None:
    x, weight = numbers(5, 6, 7, 19), numbers(37, 3, 3, 19, scale=0.1)
    attrs = PLAIN | {"out_channels": 37, "kernel": (3, 3), "pads": (1, 1, 1, 1)}
    together = run("conv", [x, conv_weight(weight), None, None], [((5, 6, 7, 37), np.float32)], **attrs)[0]
    for i in range(5):
        alone = run("conv", [x[i : i + 1], conv_weight(weight), None, None], [((1, 6, 7, 37), np.float32)], **attrs)
        assert alone[0].tobytes() == together[i].tobytes()
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows = np.stack([padded[:, i : i + 6, j : j + 7] for i in range(3) for j in range(3)], 3).reshape(-1, 9 * 19)
    linear = run("linear", [rows, tiles(weight.reshape(37, -1)), None], [((210, 37), np.float32)], out_features=37,
                 scheme="f32")  # fmt: skip
    assert linear[0].tobytes() == together.tobytes()


TRANSPOSED: Any = (
    ((1, 4, 5, 3), 8, (2, 2), {"strides": (2, 2)}),
    ((2, 3, 4, 6), 5, (3, 3), {"strides": (2, 1), "pads": (1, 1, 1, 1), "output_pads": (1, 0)}),
    ((1, 5, 5, 4), 20, (4, 4), {"strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 4, 4, 8), 8, (3, 2), {"groups": 4, "dilations": (2, 1)}),
    ((1, 4, 3, 6), 6, (3, 3), {"groups": 6, "strides": (3, 4)}),
    ((1, 1, 9, 5), 7, (1, 6), {"strides": (1, 3)}),
)


@pytest.mark.parametrize(("shape", "out", "kernel", "attrs"), TRANSPOSED)
def test_conv_transpose_matches_torch(
    shape: tuple[int, ...], out: int, kernel: tuple[int, int], attrs: dict[str, Any]
) -> None:
    attrs = PLAIN | {"output_pads": (0, 0)} | attrs
    groups = attrs["groups"]
    x, bias = numbers(*shape), numbers(out)
    weight = numbers(out, *kernel, shape[3] // groups, scale=0.2)
    # torch: [in, out / groups, kh, kw]
    blocks = weight.reshape(groups, out // groups, *kernel, shape[3] // groups)
    theirs = np.ascontiguousarray(blocks.transpose(0, 4, 1, 2, 3).reshape(shape[3], out // groups, *kernel))
    expected = F.conv_transpose2d(
        nchw(x), torch.from_numpy(theirs), torch.from_numpy(bias), attrs["strides"], attrs["pads"][:2],
        attrs["output_pads"], groups, attrs["dilations"],
    )  # fmt: skip
    check(
        "conv_transpose", [x, conv_weight(weight, groups), vector(bias)], nhwc(expected), absolute=2e-6, relative=2e-6,
        out_channels=out, kernel=kernel, **attrs,
    )  # fmt: skip


def test_wrong_convs_are_refused_by_name() -> None:
    x, weight = numbers(1, 4, 4, 8), conv_weight(numbers(6, 3, 3, 8))
    attrs = PLAIN | {"out_channels": 6, "kernel": (3, 3)}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"kernel": (3, 3, 3)}, "kernel"), ({"kernel": (0, 3)}, "kernel"), ({"strides": (0, 1)}, "strides"),
        ({"pads": (0, 0, 0, -1)}, "pads"), ({"dilations": (1,)}, "dilations"), ({"groups": 3}, "groups"),
        ({"groups": 0}, "groups"), ({"out_channels": 7}, "weight"), ({"kernel": (2, 2)}, "weight"),
        ({"dilations": (2, 2)}, "x"), ({"kernel": (65536, 65536)}, "kernel"), ({"pads": (1 << 31, 0, 0, 0)}, "output"),
    ]  # fmt: skip
    for change, name in wrong:
        with raises(InvalidArgumentError, param=name):
            run("conv", [x, weight, None, None], [((1, 2, 2, 6), np.float32)], **attrs | change)
    with raises(UnsupportedError, param="act"):
        run("conv", [x, weight, None, None], [((1, 2, 2, 6), np.float32)], **attrs | {"act": "sin"})
    assert len(contexts()) == 3
