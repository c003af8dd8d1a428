"""Convolutions and norms with weights that are computed, and rare ops, give what PyTorch gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.errors import UnsupportedError
from tests.support.errors import raises


class Calls(nn.Module):
    """Calls a function of tensors."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.function(x, w)


FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "conv2d": (lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], padding=(1, 2), stride=(2, 1)), (6, 4, 3, 2)),
    "conv2d of groups": (lambda x, w: F.conv2d(x, w, dilation=2, groups=2), (6, 2, 3, 2)),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding="same", groups=4), (4, 1, 3, 3)),
    "bias": (lambda x, w: F.conv2d(x, torch.ones(3, 4, 1, 1), w), (3,)),
    "conv1d": (lambda x, w: F.conv1d(x.flatten(2), w, padding=1), (5, 4, 3)),
    "conv_transpose": (lambda x, w: F.conv_transpose2d(x, w, w[0, :, 0, 0], stride=2, padding=1), (4, 3, 3, 2)),
    "conv_transpose of groups": (
        lambda x, w: F.conv_transpose2d(x, w, stride=(3, 2), output_padding=1, groups=2, dilation=2), (4, 3, 2, 2),
    ),
    "bias of conv_transpose": (lambda x, w: F.conv_transpose2d(x, torch.ones(4, 3, 2, 2), w), (3,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (6, 5), w, w + 1), (6, 5)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (5,), w), (5,)),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w, -w), (4,)),
    "batch_norm": (lambda x, w: F.batch_norm(x, w, w.square() + 1, w + 2, w), (4,)),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w, bias=w), (4,)),
    "diagonal": (lambda x, w: torch.diagonal(x, -2, 2, 3)[..., :3] + torch.diagonal(x, 1, -2, -1)[..., :3] * w, (3,)),
    "trace": (lambda x, w: torch.trace(w) + x, (6, 5)),
    "cdist": (lambda x, w: torch.cdist(x, w) + torch.cdist(x, w, p=1), (3, 5)),
    "roll of nothing": (lambda x, w: torch.cat([x.flatten(), torch.roll(w[:0], 1, 0).flatten()]), (3,)),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_computed_weights_and_rare_ops(name: str) -> None:
    function, shape = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 6, 5, generator=generator), torch.randn(shape, generator=generator)
    module = Calls(function).eval()
    network = penstock.capture(module, (x, w), shapes={"x": ("B", 4, 6, 5)})
    with network.compile() as predictor:
        for batch in (2, 5):
            x = torch.randn(batch, 4, 6, 5, generator=generator)
            (found,) = predictor.run([x.numpy(), w.numpy()])
            expected = module(x, w).numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))


def test_sizes_of_a_diagonal_may_be_free() -> None:
    module = Calls(lambda x, w: torch.diagonal(x, 1) * w)
    network = penstock.capture(module, (torch.randn(5, 4), torch.ones(1)), shapes={"x": ("H", "W")})
    with network.compile() as predictor:
        for shape in ((3, 8), (8, 3), (4, 4)):
            x = torch.randn(shape)
            np.testing.assert_array_equal(predictor.run([x.numpy(), np.ones(1, np.float32)])[0], torch.diagonal(x, 1))


class Inside(nn.Module):
    """Calls a module that calls an op which PyTorch splits."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.head = Calls(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x, x)  # type: ignore[no-any-return]


REFUSED: dict[str, Callable[..., Any]] = {
    "aten.cumprod.default": lambda x, w: torch.cumprod(x, 1),
    "aten.fft_rfft.default": lambda x, w: torch.fft.rfft(x).abs(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_the_op_of_the_module(name: str) -> None:
    with raises(UnsupportedError) as error:
        penstock.capture(Inside(REFUSED[name]), torch.randn(3, 5))
    assert f"{name} " in str(error.value)
    assert "head." in str(error.value)
