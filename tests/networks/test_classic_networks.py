"""Blocks of well-known convolutional networks give what PyTorch gives, at other batches and sizes than captured."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from tests.networks.library_networks import randomised


def conv(inner: int, outer: int, kernel: int | tuple[int, int] = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution with a batch norm and a ReLU."""
    pads = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    layer = nn.Conv2d(inner, outer, kernel, stride, pads, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outer), nn.ReLU(inplace=True))


class Vgg(nn.Sequential):
    """Convolutions and pools, an adaptive pool, and three linear layers with dropout, as VGG and AlexNet have them."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2), nn.Conv2d(8, 12, 3, padding=1),
            nn.ReLU(inplace=True), nn.MaxPool2d(2, 2), nn.AdaptiveAvgPool2d((4, 4)), nn.Flatten(),
            nn.Linear(192, 16), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(16, 5),
        )  # fmt: skip


class DenseNet(nn.Module):
    """Layers that each see the maps of all before them, as DenseNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(8 + 4 * i), nn.ReLU(inplace=True), nn.Conv2d(8 + 4 * i, 4, 3, padding=1))
            for i in range(3)
        )
        self.transition = nn.Sequential(nn.BatchNorm2d(20), nn.ReLU(), nn.Conv2d(20, 10, 1), nn.AvgPool2d(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        maps = [self.stem(x)]
        for layer in self.layers:
            maps.append(layer(torch.cat(maps, 1)))
        return self.transition(torch.cat(maps, 1)).mean((2, 3))  # type: ignore[no-any-return]


class Inception(nn.Module):
    """Branches with 1x7 and 7x1 kernels and pools in ceil mode, and a local response norm, as GoogLeNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8, 3, 2), nn.MaxPool2d(3, 2, ceil_mode=True))
        self.branches = nn.ModuleList(
            [
                conv(8, 4),
                nn.Sequential(conv(8, 4), conv(4, 6, (1, 7)), conv(6, 6, (7, 1))),
                nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(8, 4)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), conv(8, 4)),
            ]
        )
        self.norm, self.head = nn.LocalResponseNorm(3), nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.norm(torch.cat([branch(x) for branch in self.branches], 1))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))  # type: ignore[no-any-return]


class SqueezeNet(nn.Module):
    """A squeeze to few channels, two ways to expand, and a head that is a convolution, as SqueezeNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.small, self.large = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1)
        self.head = nn.Sequential(nn.Dropout(), nn.Conv2d(16, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x).relu()
        return torch.flatten(self.head(torch.cat([self.small(x).relu(), self.large(x).relu()], 1)), 1)


class ShuffleNet(nn.Module):
    """Halves of the channels, a depthwise convolution on one, and a shuffle by views, as ShuffleNet has them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, 3, 2)
        self.branch = nn.Sequential(conv(4, 4), nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.BatchNorm2d(4), conv(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = self.stem(x).chunk(2, dim=1)
        x = torch.cat([kept, self.branch(changed)], 1)
        batch, channels, height, width = x.shape
        return (
            x.view(batch, 2, channels // 2, height, width)
            .transpose(1, 2)
            .contiguous()
            .view(batch, channels, height, width)
        )


class RegNet(nn.Module):
    """Groups, squeeze and excitation, and a residual with a stride, as RegNet and EfficientNet have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.short = conv(3, 16), conv(16, 16, 3, 2, groups=4), nn.Conv2d(3, 16, 1, 2)
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.SiLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.first(x))
        return F.hardswish(y * self.excite(y) + self.short(x))


class UNet(nn.Module):
    """A step of denoising: group norms, attention over pixels, a time as sines, and skips, as diffusion has them."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.begin, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm, self.attention_norm = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)
        self.middle, self.attention = nn.Conv2d(16, 16, 3, padding=1), nn.MultiheadAttention(16, 2, batch_first=True)
        self.up, self.end = nn.Conv2d(16, 8, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = t[:, None].float() * rates
        time = self.time(torch.cat([angles.cos(), angles.sin()], 1))
        first = self.begin(x)
        y = self.down(first)
        y = self.middle(F.silu(self.norm(y))) + time[:, :, None, None]
        rows = self.attention_norm(y).flatten(2).transpose(1, 2)
        rows, _ = self.attention(rows, rows, rows, need_weights=False)
        y = y + rows.transpose(1, 2).reshape(y.shape)
        y = self.up(F.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.end(torch.cat([y, first], 1))  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind for kind in (Vgg, DenseNet, Inception, SqueezeNet, ShuffleNet, RegNet, UNet)
}


QUICK = ("Vgg", "ShuffleNet")
FIXED = ("Vgg",)  # a pool to 4 x 4 needs one size of images


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in MODULES])
def test_blocks_of_classic_networks(name: str) -> None:
    torch.manual_seed(0)
    module = randomised(MODULES[name]())
    argument = "input" if name == "Vgg" else "x"  # of nn.Sequential
    fixed = name in FIXED
    shapes = {argument: ("B", 3, 32, 32) if fixed else ("B", 3, "H", "W"), "t": ("B",)}
    examples = [(torch.randn(b, 3, *((32, 32) if fixed else size)),) for b, size in ((2, (32, 48)), (3, (64, 40)))]
    if name == "UNet":
        examples = [(x, torch.arange(1, len(x) + 1) * 100) for (x,) in examples]  # type: ignore[misc]
    else:
        del shapes["t"]
    sizes = {} if fixed else {"H": (16, 128, 8), "W": (16, 128, 8)}
    network = penstock.capture(module, examples[0], shapes=shapes, sizes=sizes)
    with network.compile() as predictor, torch.no_grad():
        for example in examples:
            expected = module(*example).numpy()
            (found,) = predictor.run([tensor.numpy() for tensor in example])
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * float(np.abs(expected).max()))
