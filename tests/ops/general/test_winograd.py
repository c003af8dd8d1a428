"""3x3 convolutions by Winograd's F(2x2, 3x3) against float64, and where networks have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.core import layouts
from penstock.errors import InvalidArgumentError
from penstock.graph.bundle import read_graph
from penstock.graph.general.passes.winograd import kernels_of, transformed
from penstock.graph.inspect import describe
from penstock.networks.int8.quantize import quantize_network
from penstock.networks.predictor import open_predictor
from tests.support.errors import raises
from tests.support.general_ops import run
from tests.support.general_weights import conv_weight, packed, tiles, vector

Array = npt.NDArray[Any]
PLAIN: dict[str, Any] = {"act": "none", "alpha": 0.0, "beta": 0.0, "pads": (1, 1, 1, 1)}
DIRECT: dict[str, Any] = {"kernel": (3, 3), "strides": (1, 1), "dilations": (1, 1), "groups": 1}


def numbers(*shape: int, seed: int = 0, scale: float = 1) -> Array:
    return (np.random.default_rng(seed + sum(shape)).standard_normal(shape) * scale).astype(np.float32)


def weight_of(kernels: Array) -> Any:
    return tiles(transformed(kernels).reshape(len(kernels), -1))


def exact(x: Array, kernels: Array, pads: tuple[int, ...]) -> Array:
    """Convolve x [N, H, W, C] by kernels [out, 3, 3, C] in float64, with torch."""
    image, kernel = (torch.from_numpy(np.moveaxis(a.astype(np.float64), 3, 1).copy()) for a in (x, kernels))
    padded = torch.nn.functional.pad(image, (pads[1], pads[3], pads[0], pads[2]))
    return np.moveaxis(torch.nn.functional.conv2d(padded, kernel).numpy(), 1, 3)


@pytest.mark.parametrize(
    ("shape", "out", "pads"),
    [
        ((1, 5, 7, 3), 8, (0, 0, 0, 0)),
        ((2, 9, 8, 5), 17, (1, 1, 1, 1)),
        ((1, 3, 3, 1), 1, (0, 0, 0, 0)),
        ((1, 8, 9, 40), 70, (0, 1, 2, 0)),
        ((3, 1, 30, 16), 16, (1, 0, 1, 0)),
        ((1, 4, 4, 33), 33, (6, 5, 0, 7)),
        ((1, 26, 23, 64), 64, (1, 1, 1, 1)),
        ((1, 7, 7, 600), 20, (1, 1, 1, 1)),
        ((0, 5, 5, 3), 4, (0, 0, 0, 0)),
    ],
)
def test_winograd_matches_float64(shape: tuple[int, ...], out: int, pads: tuple[int, ...]) -> None:
    x, bias = numbers(*shape), numbers(out)
    kernels = numbers(out, 3, 3, shape[3], scale=(9 * shape[3]) ** -0.5)
    expected = exact(x, kernels, pads) + bias
    operands = [x, weight_of(kernels), vector(bias), None]
    (y,) = run("conv_winograd", operands, [(expected.shape, np.float32)], out_channels=out, **PLAIN | {"pads": pads})
    np.testing.assert_allclose(y, expected, 3e-6, 5e-6)


@pytest.mark.parametrize(
    ("act", "alpha", "beta"), [("relu", 0.0, 0.0), ("clip", 0.0, 6.0), ("silu", 0.0, 0.0), ("leaky_relu", 0.1, 0.0)]
)
@pytest.mark.parametrize("channels", [24, 32])
def test_fused_winograd_equals_its_parts(channels: int, act: str, alpha: float, beta: float) -> None:
    shape = (2, 7, 6, channels)
    x, residual, bias = numbers(*shape), numbers(*shape, seed=1), numbers(channels, seed=2)
    weight, attrs = weight_of(numbers(channels, 3, 3, channels, scale=0.1)), PLAIN | {"out_channels": channels}
    output = [(shape, np.float32)]
    activation = {"act": act, "alpha": alpha, "beta": beta}
    fused = run("conv_winograd", [x, weight, vector(bias), residual], output, **attrs | activation)
    plain = run("conv_winograd", [x, weight, vector(bias), None], output, **attrs)[0]
    parts = run("unary", [plain + residual], output, kind=act, alpha=alpha, beta=beta)
    assert fused[0].tobytes() == parts[0].tobytes()


def test_winograd_has_the_same_bits_in_any_batch() -> None:
    x, weight = numbers(5, 21, 17, 19), weight_of(numbers(37, 3, 3, 19, scale=0.1))
    attrs = PLAIN | {"out_channels": 37}
    together = run("conv_winograd", [x, weight, None, None], [((5, 21, 17, 37), np.float32)], **attrs)[0]
    for i in range(5):
        (each,) = run("conv_winograd", [x[i : i + 1], weight, None, None], [((1, 21, 17, 37), np.float32)], **attrs)
        assert each.tobytes() == together[i].tobytes()


def test_winograd_is_more_accurate_than_direct() -> None:
    """Its chains of sums are a ninth as long."""
    x, kernels = np.maximum(numbers(1, 24, 24, 128), 0), numbers(128, 3, 3, 128, scale=(9 * 128) ** -0.5)
    shape, attrs = [((1, 24, 24, 128), np.float32)], PLAIN | {"out_channels": 128}
    (direct,) = run("conv", [x, conv_weight(kernels), None, None], shape, **attrs | DIRECT)
    (ours,) = run("conv_winograd", [x, weight_of(kernels), None, None], shape, **attrs)
    expected = exact(x, kernels, (1, 1, 1, 1))
    errors = [float(np.sqrt(np.mean((y - expected) ** 2))) for y in (direct, ours)]
    assert errors[1] < errors[0]


def test_kernels_come_back_from_their_transform() -> None:
    kernels = numbers(6, 3, 3, 5)
    np.testing.assert_allclose(kernels_of(transformed(kernels)), kernels, 0, 5e-7)


def test_wrong_winograds_are_refused_by_name() -> None:
    x, weight = numbers(1, 4, 4, 8), weight_of(numbers(6, 3, 3, 8))
    attrs = PLAIN | {"out_channels": 6}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"pads": (1, 1)}, "pads"), ({"pads": (0, 0, 0, -1)}, "pads"), ({"out_channels": 7}, "weight"),
        ({"out_channels": 0}, "out_channels"), ({"pads": (1 << 31, 0, 0, 0)}, "output"),
    ]  # fmt: skip
    for change, name in wrong:
        with raises(InvalidArgumentError, param=name):
            run("conv_winograd", [x, weight, None, None], [((1, 4, 4, 6), np.float32)], **attrs | change)
    cases: Any = (
        ([x, conv_weight(numbers(6, 3, 3, 8)), None, None], "weight"),
        ([numbers(1, 2, 0, 8), weight, None, None], "x"),
        ([x, weight, None, numbers(1, 4, 3, 6)], "residual"),
        ([numbers(1, 4, 4, 1), vector(numbers(16)), None, None], "weight"),
    )
    for operands, name in cases:
        own = attrs | ({"pads": (0, 0, 0, 0)} if name == "x" else {})
        with raises(InvalidArgumentError, param=name):
            run("conv_winograd", operands, [((1, 4, 4, 6), np.float32)], **own)


def test_weights_of_depthwise_convolutions_are_refused() -> None:
    """With one channel the numbers of rows and columns fit, but 16 rows of t16_f32 are read."""
    x, weight = numbers(1, 4, 4, 1), packed(layouts.ROWS_F32, numbers(16, 1))
    with raises(InvalidArgumentError, param="weight"):
        run("conv_winograd", [x, weight, None, None], [((1, 4, 4, 1), np.float32)], out_channels=1, **PLAIN)


class Net(nn.Module):
    """Convolutions that are faster so, with a residual and activations, and ones that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 48, 3, 2, 1)
        self.first, self.second = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.wide, self.dilated = nn.Conv2d(48, 32, (3, 1)), nn.Conv2d(32, 32, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(x + self.second(nn.functional.silu(self.first(x))))
        y: Tensor = self.dilated(self.wide(self.down(x)))
        return y


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with direct.psm, winograd.psm and samples of their input."""
    torch.manual_seed(0)
    folder, module = tmp_path_factory.mktemp("winograd"), Net().eval()
    network = penstock.capture(module, torch.randn(1, 3, 15, 22), shapes={"x": ("B", 3, "H", "W")})
    network.save(folder / "winograd.psm")
    network.save(folder / "direct.psm", winograd=False)
    (folder / "samples").mkdir()
    np.save(folder / "samples" / "x.npy", numbers(1, 3, 15, 22))
    return folder


def ops_of(path: Path) -> list[str]:
    return [node.op for node in read_graph(path)[0].nodes if node.op.startswith("conv")]


def test_networks_use_winograd_where_it_is_faster(net: Path) -> None:
    assert ops_of(net / "direct.psm") == ["conv"] * 6
    assert ops_of(net / "winograd.psm") == ["conv", "conv_winograd", "conv_winograd", "conv", "conv", "conv"]
    arrays = []
    for name in ("direct.psm", "winograd.psm"):
        with open_predictor(net / name) as predictor:
            arrays.append(predictor.run([np.load(net / "samples" / "x.npy")])[0])
    np.testing.assert_allclose(arrays[1], arrays[0], 1e-5, 1e-6)


def test_small_images_stay_direct(tmp_path: Path) -> None:
    module = nn.Conv2d(32, 32, 3, padding=1)
    penstock.capture(module, torch.randn(1, 32, 7, 7)).save(tmp_path / "net.psm")
    assert ops_of(tmp_path / "net.psm") == ["conv"]


def test_parameters_are_those_of_the_direct_network(net: Path) -> None:
    assert describe(net / "winograd.psm")["parameters"] == describe(net / "direct.psm")["parameters"]


def test_infinities_pass_the_check_without_winograd() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 32, 16, 16)
    x[0, 3, 5, 5] = torch.inf
    network = penstock.capture(nn.Conv2d(32, 32, 3, padding=1).eval(), x)
    assert not network.check([x.numpy()]).passed
    assert network.check([x.numpy()], winograd=False).passed
    with network.compile(winograd=False) as predictor:
        (y,) = predictor.run([x.numpy()])
    assert not np.isnan(y).any()


def test_int8_of_a_winograd_network_is_that_of_the_direct(net: Path, tmp_path: Path) -> None:
    answers = []
    for name in ("direct.psm", "winograd.psm"):
        quantize_network(net / name, tmp_path / name, net / "samples")
        assert "conv_winograd" not in ops_of(tmp_path / name)
        with open_predictor(tmp_path / name) as predictor:
            answers.append(predictor.run([np.load(net / "samples" / "x.npy")])[0])
    assert answers[0].shape == answers[1].shape
    assert np.abs(answers[0] - answers[1]).max() < 0.02 * np.abs(answers[0]).max()
