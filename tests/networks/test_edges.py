"""Edges at which a captured network would silently compute something else than PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.errors import UnsupportedError
from penstock.networks.check import _difference
from tests.support.errors import raises


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


def test_a_computed_batch_norm_is_that_of_the_module() -> None:
    def normed(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        return F.batch_norm(x, torch.zeros(4), torch.ones(4), layer(x)[0])

    penstock.capture(Function(normed, nn.Linear(4, 4)), torch.randn(3, 4), check=True)


def test_random_dropout_is_refused() -> None:
    with raises(UnsupportedError, match="dropout|rand"):
        penstock.capture(Function(lambda x: F.dropout(x, 0.5, training=True)), torch.randn(3, 4))
    penstock.capture(Function(lambda x, layer: layer(x), nn.Dropout()), torch.randn(3, 4), check=True)


def test_results_that_no_op_computes_are_no_outputs() -> None:
    for function in (
        lambda x: torch.native_layer_norm(x, (4,), None, None, 1e-5),
        lambda x: F.max_pool1d(x, 2, return_indices=True),
    ):
        with raises(UnsupportedError, param="output"):
            penstock.capture(Function(function), torch.randn(2, 3, 4))


def test_a_mask_of_bytes_is_no_list_of_places() -> None:
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    with raises(UnsupportedError, match="mask"):
        penstock.capture(Function(lambda x: x.index_put((mask,), torch.tensor([7.0, 8.0]))), torch.zeros(3))


def test_images_without_a_batch_keep_their_axes() -> None:
    """With as many rows as channels, another reading has the same shape."""

    def both(x: torch.Tensor, *layers: nn.Module) -> Any:
        return tuple(layer(x) for layer in layers)

    layers = nn.ConvTranspose2d(8, 8, 1), nn.ConvTranspose2d(8, 3, (1, 2), (1, 2)), nn.Conv2d(8, 8, 3)
    assert penstock.capture(Function(both, *layers), torch.randn(8, 8, 10)).check().passed


def test_a_module_may_return_the_input_that_it_changed() -> None:
    compiled = penstock.compile(Function(lambda x: x.mul_(2)), torch.ones(3))
    assert compiled(torch.full((3,), 2.0)).tolist() == [4.0] * 3


def test_a_number_made_of_a_size_is_no_output() -> None:
    with raises(UnsupportedError, match="output 1"):
        penstock.capture(Function(lambda x: (x * 2, x.shape[0] ** 0.5)), torch.randn(3, 4), shapes={"x": ("B", 4)})


def test_whole_numbers_inside_a_number_are_computed() -> None:
    function = Function(lambda x: x / (x.shape[0] // 2) ** 0.5 + (x.shape[0] % 4) / 4)
    assert penstock.capture(function, torch.randn(6, 4), shapes={"x": ("B", 4)}).check().passed


@pytest.mark.parametrize(
    ("ours", "theirs", "count"),
    [
        (np.array([9.0, -9, 0, -3e38]), np.array([1.0, 2, 3, -3e38]), 3),
        (np.array([2**60]), np.array([2**60 + 1]), 1),
        (np.array([2**60]), np.array([2**60]), 0),
        (np.array([np.nan, 1.0]), np.array([np.nan, 1.0]), 0),
    ],
)
def test_masks_and_large_integers_hide_no_difference(ours: Any, theirs: Any, count: int) -> None:
    assert _difference("output y", ours, theirs, 1e-4).count == count


def test_results_of_nan_are_no_comparison() -> None:
    network = penstock.capture(Function(torch.log), -torch.ones(3))
    with raises(UnsupportedError, match="NaN throughout"):
        network.check([-np.ones(3, np.float32)])
