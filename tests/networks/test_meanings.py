"""Operations of PyTorch whose defaults, types or edges are easily mistaken: all in one module, as PyTorch computes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import UnsupportedError

X = torch.linspace(-3, 4, 30).reshape(5, 6)
IDS = torch.tensor([[2, 0, 1], [1, 1, 0]])
FLAG = X > 0
ATTENTION = torch.linspace(-1, 1, 2 * 3 * 4).reshape(1, 2, 3, 4)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "hardtanh": lambda x, ids, flag, q: nn.Hardtanh()(x),
    "clamp": lambda x, ids, flag, q: (x.clamp(min=float("-inf"), max=1), x.clamp(min=2, max=float("inf"))),
    "clamp_infinite": lambda x, ids, flag, q: x.clamp(min=float("inf")),
    "variance": lambda x, ids, flag, q: (x.var(1, correction=0.5), x.std(0, correction=7), x.var()),
    "norm_of_a_number": lambda x, ids, flag, q: torch.linalg.vector_norm(x[0, 0]),
    "cat": lambda x, ids, flag, q: (torch.cat([ids, ids > 0]), torch.cat([ids > 0, x[:2, :3]])),
    "dot": lambda x, ids, flag, q: (torch.dot(x[0], x[1]), x[0] @ x.T, x @ x[0]),
    "large": lambda x, ids, flag, q: torch.full_like(ids, torch.iinfo(torch.int64).max),
    "gather": lambda x, ids, flag, q: (x.gather(1, ids), x.gather(0, ids)),
    "scatter": lambda x, ids, flag, q: (x.scatter(1, ids[:, :1], x * 2), x.scatter(0, ids, 9.0)),
    "scatter_add": lambda x, ids, flag, q: x.scatter_add(1, ids, x.flip(0)),
    "argmax": lambda x, ids, flag, q: (x.argmax(), x.argmax(keepdim=True), x[1, 1].argmax(), x.argmin(1, keepdim=True)),
    "truth": lambda x, ids, flag, q: (flag.any(1), ids.bool().all(), flag & (x < 2), ~flag, flag ^ (x < 2)),
    "sums_of_truth": lambda x, ids, flag, q: (flag.sum(), flag.sum(1), flag + flag, flag * flag, flag.int() + 1),
    "promotion": lambda x, ids, flag, q: (
        ids + 0.5, ids / 2, ids.int() + 1, ids.int() * torch.tensor(3), ids * flag.sum(),
    ),
    "whole": lambda x, ids, flag, q: (
        (ids - 2) // 2, (ids - 2) % 2, torch.fmod(ids - 2, 2), ids.float() // 0.3, -x // 2,
    ),
    "division": lambda x, ids, flag, q: (
        torch.div(x, 0.7, rounding_mode="trunc"), torch.remainder(x, -1.5), x.fmod(1.5),
    ),
    "causal": lambda x, ids, flag, q: F.scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2], is_causal=True),
    "mask": lambda x, ids, flag, q: F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(3, 3).tril().bool()),
    "groups": lambda x, ids, flag, q: F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True),
    "three_dimensions": lambda x, ids, flag, q: F.scaled_dot_product_attention(q[0], q[0], q[0], scale=0.3),
    "sorted": lambda x, ids, flag, q: (ids.sort(1, descending=True)[0], x.sort(0)[1], x.topk(2, 0, largest=False)),
    "indices": lambda x, ids, flag, q: (x[ids], x[:, ids], x[ids, ids], q[:, ids[1, :2], :, ids[0, :2]], x[-ids]),
    "slices": lambda x, ids, flag, q: (
        x[-2:, ::2], x[:, -3:-1], x[1:100], x.roll((1, -2), (0, 1)), x.roll(3), x.flip(1),
    ),
    "assigned": lambda x, ids, flag, q: (
        x.slice_scatter(x[:2] * 3, 0, -2), x.select_scatter(x[0], 0, -1), x.slice_scatter(x[:2] * 3, 0, -9, 2),
    ),
    "filled": lambda x, ids, flag, q: (
        ids.clone().fill_(2**60 + 1), F.pad(ids, (1, 0), value=2**60 + 1), torch.full_like(ids, 2.7),
        torch.full_like(flag, 2), F.pad(ids, (1, 0), value=-2.7),
    ),
    "not_finite": lambda x, ids, flag, q: (
        F.threshold(x.log(), 0.5, 7), x // 0.0, x // float("inf"), (x * 1e39) // 2, x // x.round(), x // -0.7,
    ),
    "orders": lambda x, ids, flag, q: tuple(
        torch.linalg.vector_norm(y, order) for order in (0, float("inf"), -float("inf")) for y in (x.round(), x[0, 0])
    ),
    "of_integers": lambda x, ids, flag, q: (
        ids.floor(), ids.round(), ids.isnan(), ids.isinf(), (ids - 1).relu(), torch.atan2(ids, ids + 1),
        *torch.var_mean(x, 1),
    ),
    "numbers": lambda x, ids, flag, q: (torch.arange(3, -4, -2), torch.linspace(0, 1, 4), x),
    "triangles": lambda x, ids, flag, q: (x.tril(-1), x.triu(2), flag.tril()),
    "edges": lambda x, ids, flag, q: (
        F.pad(x, (1, -2, 0, 1)), F.pad(q[0], (1, 1), mode="reflect"), F.pad(flag, (1, 1)),
    ),
    "softplus": lambda x, ids, flag, q: (
        F.softplus(x, 3, 4), F.threshold(x, 1, 7), F.celu(x, 0.4), F.elu(x, 2), F.glu(x),
    ),
    "pools": lambda x, ids, flag, q: (
        F.avg_pool2d(q, 2, 2, ceil_mode=True), F.avg_pool2d(q, 3, 1, 1, count_include_pad=False),
        F.max_pool1d(x, 3, 2, 1), F.avg_pool2d(q, 2, divisor_override=3), F.adaptive_avg_pool2d(q, (1, 2)),
    ),
    "resized": lambda x, ids, flag, q: (
        F.interpolate(q, scale_factor=1.7), F.interpolate(q, (7, 3), mode="bilinear"),
        F.interpolate(q, (5, 7), mode="bilinear", align_corners=True), F.interpolate(q, (5, 7), mode="nearest-exact"),
    ),
    "rows_resized": lambda x, ids, flag, q: (
        F.interpolate(q[0], 7), F.interpolate(q[0], scale_factor=1.5, mode="linear"),
        F.interpolate(q[0], 9, mode="linear", align_corners=True), F.interpolate(q[0], 3, mode="nearest-exact"),
    ),
    "shuffled": lambda x, ids, flag, q: (
        F.channel_shuffle(q.repeat(1, 3, 1, 1), 3), F.pixel_shuffle(q.repeat(1, 2, 1, 1), 2),
    ),
    "norms": lambda x, ids, flag, q: (
        F.layer_norm(q, (3, 4)), F.group_norm(q, 2), F.rms_norm(x, (6,)), F.instance_norm(q), F.normalize(x, p=1.0),
    ),
}  # fmt: skip


class Part(nn.Module):
    """Returns the results of functions."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor, ids: Tensor, flag: Tensor, q: Tensor) -> Any:
        return [function(x, ids, flag, q) for function in self.functions]


class Cells(nn.Module):
    """Two steps of each recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(6, 5), nn.GRUCell(5, 5, bias=False), nn.RNNCell(5, 3)

    def forward(self, x: Tensor) -> Any:
        h, c = self.lstm(x)
        h, c = self.lstm(x.flip(1), (h, c))
        state = self.gru(h)
        state = self.gru(c, state)
        return c, state, self.rnn(state), self.lstm(x[0])[0]


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def flat(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    else:
        for item in result:
            yield from flat(item)


def test_results_and_types_are_those_of_pytorch() -> None:
    args = (X, IDS, FLAG, ATTENTION)
    functions = list(FUNCTIONS.items())
    expected = [(name, tensor) for name, function in functions for tensor in flat(function(*args))]
    outputs: list[np.ndarray[Any, Any]] = []
    for begin in range(0, len(functions), 10):  # a bundle has at most 64 outputs
        part = Part([function for _, function in functions[begin : begin + 10]])
        with penstock.capture(part, args).compile(threads=1) as predictor:
            outputs += predictor.run([arg.numpy() for arg in args])
    assert len(outputs) == len(expected)
    wrong = []
    for (name, tensor), ours in zip(expected, outputs, strict=True):
        theirs = tensor.numpy()
        same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if not same or not np.allclose(ours, theirs, rtol=1e-5, atol=1e-5, equal_nan=True):
            wrong.append(f"{name}: {ours.dtype} {ours}, expected {theirs.dtype} {theirs}")
    assert not wrong, "\n".join(wrong)


def test_cells_are_captured_at_a_free_batch() -> None:
    torch.manual_seed(0)
    penstock.capture(Cells(), X, shapes={"x": ("B", 6)}, check=True)


def test_types_without_ops_are_refused() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.uint8) + x.to(torch.int8)

    with pytest.raises(UnsupportedError):
        penstock.capture(Mixed(), torch.ones(3, dtype=torch.int64))
