"""Sizes that a module computes from tensors of its own, and by rounding quotients."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import UnsupportedError
from penstock.graph.general.torch.capture import capture_module
from tests.networks.library_networks import Case, check_case
from tests.support.errors import raises


class PaddedConv(nn.Module):
    """A causal convolution that pads to whole strides, with its numbers as tensors, as codecs of sound have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 7, 4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("stride", torch.tensor(4), persistent=False)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        self.register_buffer("kernel", torch.tensor(7), persistent=False)
        self.pad = torch.tensor(3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the convolution, and the begin of the padded input."""
        length = x.shape[-1]
        frames = (length - self.kernel + self.pad) / self.stride + 1
        frames = torch.ceil(frames).to(torch.int64) - 1
        extra = frames * self.stride + self.kernel - self.pad - length
        left = self.pad - self.pad // 2
        if length <= max(self.pad, extra):
            raise ValueError("too short")
        x = F.pad(x, (left, self.pad // 2 + extra), "reflect")
        return self.conv(x) * self.scale, x[..., : self.kernel + 1] * self.stride


def padded(lengths: tuple[int, int], name: str | int, sizes: dict[str, tuple[int, ...]]) -> Case:
    examples = [{"x": torch.randn(2, 3, length)} for length in lengths]
    return PaddedConv(), examples, {"x": ("B", 3, name)}, sizes


def test_numbers_that_are_tensors_make_sizes(tmp_path: Path) -> None:
    check_case(lambda: padded((29, 29), 29, {}), tmp_path)
    check_case(lambda: padded((32, 44), "N", {"N": (16, 64, 4)}), tmp_path)


def test_a_module_keeps_its_tensors_after_capture() -> None:
    module = PaddedConv()
    before = dict(module._buffers)
    capture_module(module, torch.randn(1, 3, 32))
    assert list(module._buffers) == list(before)
    assert all(module._buffers[name] is tensor for name, tensor in before.items())
    assert module._non_persistent_buffers_set == {"stride", "scale", "kernel"}
    assert isinstance(module.pad, Tensor)
    assert int(module.stride) == 4


class Aligned(nn.Module):
    """Pads to whole steps, whose length is a tensor; nothing of that needs a value before the pad."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(7), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x padded, and its first elements."""
        length = x.shape[-1]
        return F.pad(x, (math.ceil(length / 2.0), (-length) % self.step)), x[:, : length // self.step]


def test_pads_to_whole_steps_of_a_tensor(tmp_path: Path) -> None:
    def case() -> Case:
        examples = [{"x": torch.randn(2, length)} for length in (29, 35, 61)]
        return Aligned(), examples, {"x": ("B", "N")}, {"N": (8, 64)}

    check_case(case, tmp_path)


class Counting(nn.Module):
    """Pads by the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.tensor(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return x padded."""
        x = F.pad(x, (0, self.calls))  # type: ignore[arg-type]
        self.calls = self.calls + 1
        return x


class Accumulating(nn.Module):
    """Adds up its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of all inputs."""
        self.total = self.total + x
        return self.total


class Moving(nn.Module):
    """Moves a tensor to the device of its input, and keeps a result that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.last = torch.tensor([2.0, 3.0]), torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        """Return x scaled."""
        self.scale = self.scale.to(x.device)
        self.last = x * self.scale
        return self.last


@pytest.mark.parametrize(("module", "name"), [(Counting(), "0.calls"), (Accumulating(), "0.total")])
def test_attributes_that_keep_a_state_are_refused(module: nn.Module, name: str) -> None:
    before = dict(vars(module))
    with raises(UnsupportedError, code="unsupported_parameter", param=name):
        capture_module(nn.Sequential(module), torch.ones(2))
    assert vars(module) == before


def test_attributes_that_keep_no_state_are_no_reason() -> None:
    module = Moving()
    last = module.last
    network = penstock.capture(module, torch.ones(2))
    with network.compile(threads=1) as predictor:
        np.testing.assert_array_equal(predictor.run([np.ones(2, np.float32)])[0], [2, 3])
    assert module.last is last


class Patches(nn.Module):
    """Takes images apart into patches and joins them, as MobileViT does, which resizes to whole patches if needed."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x with each patch turned."""
        batch, channels, height, width = x.shape
        new_height, new_width = int(math.ceil(height / 2) * 2), int(width * 0.5) * 2
        if new_height != height or new_width != width:
            x = F.interpolate(x, size=(new_height, new_width))
        rows, columns = new_height // 2, math.floor(new_width / 2)
        patches = x.reshape(batch * channels * rows, 2, columns, 2).transpose(1, 2)
        patches = patches.reshape(batch, channels, rows * columns, 4).flip(3)
        patches = patches.reshape(batch * channels * rows, columns, 2, 2).transpose(1, 2)
        return patches.reshape(batch, channels, rows * 2, columns * 2)


def test_rounded_quotients_of_free_sizes_are_whole(tmp_path: Path) -> None:
    def case() -> Case:
        examples = [{"x": torch.randn(2, 3, *size)} for size in ((8, 12), (12, 4))]
        return Patches(), examples, {"x": ("B", 3, "H", "W")}, {"H": (4, 64, 4), "W": (4, 64, 4)}

    check_case(case, tmp_path)


class Points(nn.Module):
    """Gives the centres of pixels as a part of the image, and its sizes, as deformable attention needs them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the centres and the sizes."""
        height, width = x.shape
        rows = torch.linspace(0.5, height - 0.5, height, dtype=torch.float32) / height
        columns = torch.linspace(0.5, width - 0.5, width) / width
        return x + rows[:, None] + columns, torch.as_tensor([(height, width)], dtype=torch.long)


def test_numbers_of_free_sizes_in_functions_of_pytorch(tmp_path: Path) -> None:
    examples = [{"x": torch.randn(size)} for size in ((8, 5), (4, 9), (7, 2))]
    check_case(lambda: (Points(), examples, {"x": ("H", "W")}, {}), tmp_path)


class Inexact(nn.Module):
    """Rounds a number that is less than a whole one: 61 / 7 * 7."""

    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.shape[0] / 7 * 7)]


def test_quotients_that_python_rounds_are_refused() -> None:
    with raises(UnsupportedError, param="sizes"):
        capture_module(Inexact(), torch.ones(70), shapes={"x": ("N",)}, sizes={"N": (7, 140)})


class Branch(nn.Module):
    """Needs the value of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Selected(nn.Module):
    """Selects as many rows as values say."""

    def forward(self, x: Tensor) -> Tensor:
        return x[torch.where(x[:, 0] > 0)[0]]


class Foreign(nn.Module):
    """Calls what no exporter sees."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() + 1)


@pytest.mark.parametrize("module", [Branch(), Selected()])
def test_what_depends_on_values_is_refused(module: nn.Module) -> None:
    with raises(UnsupportedError, code="data_dependent", param="module"):
        capture_module(module, torch.ones(3, 2), shapes={"x": ("B", 2)})


def test_the_line_that_cannot_be_exported_is_named() -> None:
    with raises(UnsupportedError, code="not_exported", param="module", match=r"size_numbers\.py, line \d+ \(.*numpy"):
        capture_module(Foreign(), torch.ones(3, 2))
