"""Ops that PyTorch splits into others, numbers made of free sizes, pools of any size, convolutions over volumes."""

from __future__ import annotations

import itertools
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.lower import write_network
from penstock.graph.general.torch import capture, time_limit
from penstock.graph.general.torch.capture import capture_module
from penstock.networks.predictor import open_predictor
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Function(nn.Module):
    """A module of one function, whose tensors it returns in a flat tuple."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Any:
        return tuple(self.function(x, *self.parts))


def check(module: nn.Module, path: Path, examples: Sequence[Tensor], shape: Sequence[Any], **options: Any) -> None:
    write_network(capture_module(module.eval(), examples[0], shapes={"x": shape}, **options), path)
    with open_predictor(path) as predictor:
        for x in examples:
            found = predictor.run([x.numpy()])
            for at, (ours, theirs) in enumerate(zip(found, module(x), strict=True)):
                expected = theirs.detach().numpy()
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5, err_msg=str(at))


def split(x: Tensor) -> list[Tensor]:
    grid = x[:, 1:3, :, :4].permute(0, 2, 3, 1) * 1.7
    kinds = [F.grid_sample(x, grid, mode=m, padding_mode=p, align_corners=c) for m, p, c in (
        ("bilinear", "zeros", False), ("nearest", "border", True), ("nearest", "zeros", False),
        ("bilinear", "reflection", True), ("bicubic", "reflection", False), ("bicubic", "zeros", True),
    )]  # fmt: skip
    rows = F.unfold(x, (2, 3), padding=1, stride=2)
    one_hot = F.one_hot(x[:, 0].abs().long().clamp(0, 3), 5)
    return [*kinds, rows, one_hot, F.glu(x, -1), x.tile(2, 1), torch.addcmul(x, x, x), torch.minimum(x, -x).log1p(),
            F.logsigmoid(x), torch.nan_to_num(x), (x > 0).type_as(x), x.abs().log10(), F.hardshrink(x)]  # fmt: skip


def test_ops_without_a_reader_are_split(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(2, 4, 5, 6), torch.randn(3, 4, 5, 6)]
    check(Function(split), tmp_path / "net.psm", examples, ("B", 4, 5, 6))


def sampled(x: Tensor) -> list[Tensor]:
    grid = torch.stack([x[:, 0, :3], x[:, 1, :3]], -1)
    kinds = itertools.product(("bilinear", "nearest"), ("border", "reflection"), (False, True))
    return [F.grid_sample(x[:, 2:], grid, mode=m, padding_mode=p, align_corners=c) for m, p, c in kinds]


def test_places_that_are_no_numbers_are_the_first_pixel(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(2, 4, 5, 6), torch.randn(3, 4, 5, 6)]
    for x in examples:
        x[:, 0, 0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
        x[:, 1, 1, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    check(Function(sampled), tmp_path / "net.psm", examples, ("B", 4, 5, 6))


def placed(x: Tensor) -> list[Tensor]:
    """Elements that are set by masks and by indices, and windows."""
    rows, columns = torch.tensor([[0], [2]]), torch.tensor([1, 4])
    masked, points, axes, sums = x.clone(), x.clone(), x.clone(), x.clone()
    masked[x[..., 0] > 0] = 0.5
    points[:, :, rows, columns] = torch.arange(4.0).view(2, 2)
    axes[:, torch.tensor([3, 1])] = x[:, :2] * 2
    sums.index_put_((torch.tensor([0, 0]),), x[:2], accumulate=True)
    reduced = x.scatter_reduce(3, torch.tensor([1, 0, 1]).expand(x.shape[0], 4, 5, 3), x[..., :3], "amax")
    return [masked, points, axes, sums, reduced, x.unfold(2, 3, 2), ~(x * 3).long(), torch.logical_not(x)]


def test_elements_that_are_set(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(2, 4, 5, 6), torch.randn(3, 4, 5, 6)]
    check(Function(placed), tmp_path / "net.psm", examples, ("B", 4, 5, 6), sizes={"B": (2, 9)})


def free_numbers(x: Tensor) -> list[Tensor]:
    h, w = x.shape[2:]
    places = torch.arange(0.5, h) / h
    return [
        x.reshape(len(x), -1).sum(1) / len(x), x / (h * w) ** 0.5, x * (1.0 / w), x.sum((2, 3)) * h**-0.5, places,
        x[:, :, : math.ceil(h / 4)],
        x[:, :, : int(h * 0.5)], x[:, :, int(math.ceil(h / 4) * 2) :], x * float(w),
        x * isinstance(3, int) * float("2"),
        x[:, :, : math.floor(h * 0.5)], F.interpolate(x, scale_factor=0.5),
        F.interpolate(x, scale_factor=1.5, mode="bilinear"),
        F.interpolate(x, size=(h // 2, 7), mode="bilinear"), F.adaptive_avg_pool2d(x, (3, 5)),
        F.adaptive_max_pool2d(x, (3, 2)), F.adaptive_avg_pool1d(x[:, 0], 4),
    ]  # fmt: skip


def test_numbers_made_of_free_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(2, 3, 8, 12), torch.randn(1, 3, 14, 9), torch.randn(3, 3, 5, 20)]
    sizes = {"H": (4, 64), "W": (4, 64)}
    check(Function(free_numbers), tmp_path / "net.psm", examples, ("B", 3, "H", "W"), sizes=sizes)


def towards_zero(x: Tensor) -> list[Tensor]:
    h, w = x.shape[2:]
    shifts = int(h * -0.5), int(-h / 2), int((h - 10) * 0.5), int((10 - h) / 4), int(h * 0.5 * -1), int(h / -2)
    rolled = [torch.roll(x, shift, 2) for shift in shifts]
    return [*rolled, x[:, :, int(-h / 2) :], x[..., : int(w * -0.25)], x * int((h - 10) * 0.5)]


def test_int_of_a_free_number_rounds_towards_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    examples = [torch.randn(2, 3, height, width) for height, width in ((7, 13), (3, 9), (11, 6), (13, 20), (16, 4))]
    sizes = {"H": (3, 64), "W": (4, 64)}
    check(Function(towards_zero), tmp_path / "net.psm", examples, ("B", 3, "H", "W"), sizes=sizes)


def test_a_replaced_function_that_fails_is_not_used(tmp_path: Path) -> None:
    def hidden(x: Tensor) -> list[Tensor]:
        return [x + torch.ones(3, dtype=eval("int"))]  # noqa: S307 - a type that the file does not show

    check(Function(hidden), tmp_path / "net.psm", [torch.ones(2, 3)], ("B", 3))


def test_random_numbers_are_refused_by_name() -> None:
    for draw in (torch.randn_like, torch.rand_like, torch.bernoulli, lambda x: torch.randn(x.shape)):
        with raises(UnsupportedError, match="rand|bernoulli"):
            capture_module(Function(lambda x, draw=draw: [x + draw(x)]), torch.ones(2, 3), shapes={"x": ("B", 3)})


def test_tracing_that_takes_too_long_is_refused() -> None:
    module, image = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    with raises(UnsupportedError, code="capture_timeout", param="sizes"):
        capture_module(module, image, shapes={"input": ("B", 3, "H", "W")}, max_seconds=1e-9)
    with raises(UnsupportedError, code="capture_timeout", param="max_seconds"):
        capture_module(module, image, max_seconds=1e-9)
    with raises(InvalidArgumentError, param="max_seconds"):
        capture_module(module, image, max_seconds=0)


@pytest.mark.parametrize("is_late_in", ["export", "decomposed"])
def test_time_that_is_over_late_is_refused(is_late_in: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(now=0.0)
    clock.thread_time = lambda: clock.now
    monkeypatch.setattr(time_limit, "time", clock)
    split = capture.decomposed
    calls: list[Any] = []

    def last(x: Tensor) -> list[Tensor]:
        results = [x + 1]
        clock.now += 10 * (is_late_in == "export")
        return results

    def decomposed(*args: Any) -> Any:
        calls.append(args)
        result = split(*args)
        clock.now += 10
        return result

    monkeypatch.setattr(capture, "decomposed", decomposed)
    with raises(UnsupportedError, code="capture_timeout", param="max_seconds"):
        capture_module(Function(last), torch.ones(2, 3), max_seconds=5)
    assert len(calls) == (is_late_in == "decomposed")


def test_a_size_that_the_module_fixes_is_named() -> None:
    def rows(x: Tensor) -> list[Any]:
        return [sum((x[:, :, at] for at in range(x.shape[2])), torch.zeros(()))]

    for sizes in ({"H": (4, 64)}, {"H": (8, 64, 8)}):
        with raises(UnsupportedError) as found:
            capture_module(Function(rows), torch.randn(2, 3, 8), shapes={"x": ("B", 3, "H")}, sizes=sizes)
        assert " H " in str(found.value)
        assert "L[" not in str(found.value)


def volumes(x: Tensor, plain: nn.Module, grouped: nn.Module) -> list[Tensor]:
    y = F.relu(plain(x))
    pools = F.max_pool3d(y, 2), F.avg_pool3d(y, (2, 1, 2)), F.adaptive_avg_pool3d(y, (1, 2, 3)), y.mean((2, 3, 4))
    return [grouped(y), *pools]


def test_convolutions_over_volumes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Conv3d(3, 8, (3, 5, 3), stride=(2, 1, 2), padding=(1, 2, 0), dilation=(1, 1, 2))
    grouped = nn.Conv3d(8, 12, (2, 3, 1), groups=4, bias=False)
    examples = [torch.randn(2, 3, 10, 9, 16), torch.randn(1, 3, 13, 8, 19)]
    module = Function(volumes, plain, grouped)
    sizes = {"D": (10, 32), "H": (8, 32), "W": (16, 64)}
    check(module, tmp_path / "net.psm", examples, ("B", 3, "D", "H", "W"), sizes=sizes)


def test_factors_that_are_not_exact_are_refused_at_free_sizes() -> None:
    module = Function(lambda x: [F.interpolate(x, scale_factor=0.7)])
    with raises(UnsupportedError, match=r"0\.7"):
        capture_module(module, torch.ones(1, 1, 10, 10), shapes={"x": (1, 1, "H", "W")})
