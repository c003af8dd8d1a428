"""Modules of PyTorch that are captured give what PyTorch gives, at free sizes too; what has no op is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.graph.general.draft import Draft
from penstock.graph.general.lower import write_network
from penstock.graph.general.torch.capture import capture_module
from penstock.graph.general.torch.writer import OPS
from penstock.networks.predictor import open_predictor
from tests.support.errors import raises


@pytest.fixture(autouse=True)
def quiet_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Function(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


class Reshape(nn.Module):
    """Needs eight elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(4, 2)


class Residual(nn.Module):
    """Convolutions with batch norms, groups, activations and a residual; pools, a gate of channels, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.grouped = nn.Conv2d(16, 24, 3, padding=1, groups=4)
        self.back = nn.Conv2d(24, 16, 1)
        self.gate = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 5)
        for buffer, (low, high) in ((self.norm.running_mean, (-1, 1)), (self.norm.running_var, (0.5, 2))):
            assert isinstance(buffer, Tensor)
            nn.init.uniform_(buffer, low, high)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.norm(self.stem(x)))
        y = self.back(F.silu(self.grouped(F.relu6(self.depthwise(x)))))
        x = F.relu(x + y)
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = torch.cat([F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, 2)], 1)[:, 8:24]
        return self.head(x.mean((2, 3))).softmax(-1)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Embeddings, attention with a mask, layer norms, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.embed(ids) + torch.arange(ids.shape[1])[None, :, None] * 0.01
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = (1.0 - mask[:, None, None, :].float()) * -1e4
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + y.transpose(1, 2).reshape(b, s, 32)
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """LSTM and GRU layers, which stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(32, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, (_, c) = self.lstm(x)
        return self.gru(y)[0], c


def outputs(predict: Any, args: tuple[Tensor, ...]) -> list[np.ndarray[Any, Any]]:
    return list(predict.run([arg.numpy() for arg in args]))


def check(
    module: nn.Module, args: tuple[Tensor, ...], others: list[tuple[Tensor, ...]], path: Path, **options: Any
) -> Draft:
    """Compare a captured module with PyTorch, and the fused network with the unfused; return the fused one's draft."""
    module.eval()
    draft = capture_module(module, args, **options)
    write_network(draft, path / "plain.psm", optimised=False)
    write_network(draft, path / "fused.psm")
    with open_predictor(path / "plain.psm") as plain, open_predictor(path / "fused.psm") as fused:
        for case in (args, *others):
            with torch.no_grad():
                expected = module(*case)
            expected = [expected] if isinstance(expected, Tensor) else list(expected)
            for ours, theirs in zip(outputs(fused, case), expected, strict=True):
                np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-4, atol=2e-6)
            for one, other in zip(outputs(plain, case), outputs(fused, case), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-6)
    return draft


def test_convolutions_at_free_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"B": (1, 16), "H": (16, 256, 8), "W": (16, 256, 8)}
    shapes = {"x": ("B", 3, "H", "W")}
    others = [(torch.randn(1, 3, 64, 16),), (torch.randn(5, 3, 24, 40),)]
    graph = check(Residual(), (torch.randn(1, 3, 32, 48),), others, tmp_path, shapes=shapes, sizes=sizes)
    ops = [call.op for call in graph.calls]
    assert ops.count("permute") == 1  # the input's
    assert "relu" not in [call.attrs.get("kind") for call in graph.calls]
    assert {call.attrs["act"] for call in graph.calls if call.op == "conv"} >= {"relu", "silu", "hard_swish", "clip"}


def test_encoder_at_free_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def batch(b: int, s: int) -> tuple[Tensor, Tensor]:
        mask = torch.ones(b, s, dtype=torch.int64)
        mask[-1, s // 2 :] = 0
        return torch.randint(0, 50, (b, s)), mask

    shapes = {"ids": ("B", "S"), "mask": ("B", "S")}
    check(Encoder(), batch(2, 6), [batch(1, 1), batch(3, 17)], tmp_path, shapes=shapes)


def test_recurrent_layers_at_free_lengths(tmp_path: Path) -> None:
    torch.manual_seed(0)
    others = [(torch.randn(1, 1, 8),), (torch.randn(3, 19, 8),)]
    check(Recurrent(), (torch.randn(2, 5, 8),), others, tmp_path, shapes={"x": ("B", "S", 8)})


X = torch.linspace(-2.9, 3.1, 2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x: (x * 0.5 + 1 - x / 3) ** 2 - 2 // 1,
    "numbers": lambda x: 1 - x + torch.rsqrt(x.abs() + 1) + x.clamp(-1, 2) + x.clamp_min(0),
    "activations": lambda x: F.elu(x) + F.leaky_relu(x, 0.2) + F.softplus(x) + F.mish(x) + F.hardsigmoid(x) + F.selu(x),
    "masks": lambda x: torch.where(x > 0, x, x.masked_fill(x < -1, 0.5)) * (x != 0),
    "reductions": lambda x: x.mean((1, 3)) + x.amax((1, 3)) + x.sum((1, 3)) + x.std((1, 3)) + x.logsumexp((1, 3)),
    "softmax": lambda x: x.softmax(1) + x.log_softmax(-1),
    "chosen": lambda x: (x.argmax(1), x.topk(2, -1), x.max(2)),
    "views": lambda x: x.transpose(1, 2).flatten(2).unsqueeze(1).expand(-1, 2, -1, -1)[:, :, 1:3, ::2],
    "parts": lambda x: torch.stack([*x.chunk(3, 1), x[:, -1:]], 0).squeeze(2),
    "rolled": lambda x: x.roll((1, -2), (2, 3)).flip(1).repeat(1, 2, 1, 1),
    "indices": lambda x: x[:, torch.tensor([2, 0])] + x.index_select(1, torch.tensor([0, 1])),
    "points": lambda x: x[:, :, torch.tensor([0, 3]), torch.tensor([5, 1])],
    "pads": lambda x: F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 0, 1), mode="replicate"),
    "made": lambda x: torch.zeros_like(x) + torch.arange(6) + torch.ones(4, 1) + torch.full((1,), 2.0),
    "triangles": lambda x: x.tril() + x.triu(1) + x.cumsum(-1),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x * 2),
    "resized": lambda x: (
        F.interpolate(x, scale_factor=2.0, mode="bilinear") + F.interpolate(x, (8, 12), mode="nearest")
    ),
    "shuffled": lambda x: F.pixel_unshuffle(x, 2).mean(1),
    "matrices": lambda x: x @ x.transpose(-1, -2) + torch.matmul(x, torch.linspace(0, 1, 24).reshape(6, 4)),
    "norms": lambda x: F.layer_norm(x, (4, 6)) + F.group_norm(x, 3) + F.normalize(x, dim=1),
    "pools": lambda x: (F.max_pool2d(x[0], (3, 2), 2, 1), F.adaptive_avg_pool2d(x[0], 1), F.avg_pool1d(x[0], 2)),
    "exact": lambda x: F.interpolate(x, (3, 5), mode="nearest-exact"),
    "infinite": lambda x: x.clamp(0, float("inf")) + F.pad(x, (1, 0), value=float("-inf"))[..., 1:],
    "spread": lambda x: x.var(1, unbiased=False) + x.std(1) + (x > 0).cumsum(1, dtype=torch.float32).sum(1),
    "floors": lambda x: (torch.arange(10) / 10) // 0.1 + x[0, 0, 0, 0] // 0.3,
    "integers": lambda x: (x.to(torch.int64) // 2 + (x * 3).to(torch.int64) % 5).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str, tmp_path: Path) -> None:
    def flat(x: Tensor) -> Any:
        result = FUNCTIONS[name](x)
        items = list(result) if isinstance(result, tuple) else [result]
        return tuple(t for item in items for t in (item if isinstance(item, tuple) else (item,)))

    check(Function(flat), (X,), [], tmp_path)


class Mixed(nn.Module):
    """Maps of equal height, width and channels, beside tensors that no convolution has made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.rows = nn.Conv2d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(self, x, y)


MIXED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "residual": (lambda m, x, y: torch.relu(m.conv(x)) + x * y, (4, 4)),
    "matrix": (lambda m, x, y: m.conv(x) * y, (4, 4, 4)),
    "column": (lambda m, x, y: m.conv(x) * y, (4, 1, 4)),
    "chosen": (lambda m, x, y: torch.where(m.conv(x) > 0, m.conv(x), y), (2, 4, 4, 4)),
    "joined": (lambda m, x, y: torch.cat([m.conv(x), y], 1), (2, 4, 4, 4)),
    "rows": (lambda m, x, y: y + torch.relu(m.rows(y)) + x.mean(), (2, 4, 4)),
}


@pytest.mark.parametrize("name", MIXED)
def test_axes_of_equal_size_are_not_confused(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    function, shape = MIXED[name]
    check(Mixed(function), (torch.randn(2, 4, 4, 4), torch.randn(shape)), [], tmp_path)


def test_compiled_modules_take_tensors() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    compiled = penstock.compile(module, torch.randn(1, 4), shapes={"input": ("B", 4)})
    x = torch.randn(7, 4)
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_compiled_modules_keep_types(dtype: torch.dtype) -> None:
    compiled = penstock.compile(nn.ReLU().to(dtype), torch.randn(2, 3).to(dtype))
    x = torch.randn(2, 3).to(dtype)
    torch.testing.assert_close(compiled(x), x.relu(), rtol=1e-6, atol=1e-7)


def test_captures_describe_themselves(tmp_path: Path) -> None:
    network = penstock.capture(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8), shapes={"input": ("B", 3, "H", 8)})
    assert [(value.name, value.sizes) for value in network.inputs] == [("input", ("B", "3", "H", "8"))]
    assert [value.sizes for value in network.outputs] == [("B", "8", "H-2", "6")]
    assert network.save(tmp_path / "net.psm").file_bytes == (tmp_path / "net.psm").stat().st_size
    with pytest.raises(InvalidArgumentError) as error:
        network.save(tmp_path / "net.bin")
    assert error.value.param == "path"


def test_all_operations_without_an_op_are_named() -> None:
    module = Function(lambda x: torch.linalg.inv(x) + torch.linalg.det(x) + torch.erfinv(x))
    with pytest.raises(UnsupportedError) as error:
        capture_module(module, torch.eye(3))
    assert "inv" in str(error.value)
    assert "erf_inv" in str(error.value)


def test_branches_on_values_and_fixed_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedError):
        capture_module(Function(lambda x: x if x.sum() > 0 else -x), torch.ones(3))
    with pytest.raises(UnsupportedError):
        capture_module(Reshape(), torch.ones(8), shapes={"x": ("N",)})
    with pytest.raises(InvalidArgumentError) as error:
        capture_module(nn.ReLU(), torch.ones(3), shapes={"input": ("N",)}, sizes={"N": (4, 2)})
    assert error.value.param == "sizes"


class Stateful(nn.Module):
    """Counts its runs in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x + self.count


class Pair(nn.Module):
    """Takes two tensors, of which only the first has the free size."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second.sum(0)


def test_outputs_are_the_tensors_that_the_module_returns(tmp_path: Path) -> None:
    with raises(UnsupportedError, param="count"):
        capture_module(Stateful(), torch.ones(3))
    with raises(UnsupportedError, param="output", match="output 1"):
        capture_module(Function(lambda x: (x + 1, 3)), torch.ones(3))
    network = penstock.capture(Function(lambda x: (x.add_(1) * 2, None)), torch.ones(3))
    with network.compile() as predictor:
        (result,) = predictor.run([np.ones(3, np.float32)])
    assert result.tolist() == [4, 4, 4]


def test_keywords_go_to_the_arguments_of_their_names() -> None:
    module = Pair()
    example = {"second": torch.ones(4, 3), "first": torch.ones(2, 3)}
    compiled = penstock.compile(module, example, shapes={"first": ("B", 3)})
    first, second = torch.randn(5, 3), torch.randn(4, 3)
    torch.testing.assert_close(compiled(second=second, first=first), module(first, second))


@pytest.mark.parametrize(
    ("shapes", "sizes", "param"),
    [
        (("B", 3), {"B": 7}, "sizes"),
        (("B", 3), {"C": (1, 7)}, "sizes"),
        (("B", 3), {"B": (5, 7, 8)}, "sizes"),
        (("B", 4), {}, "shapes"),
        (("B", "B"), {}, "shapes"),
        (("B", 3.0), {}, "shapes"),
        (4, {}, "shapes"),
        (("B", 3), [1, 7], "sizes"),
        (("B", 3), {"B": (4, 8)}, "example"),
        (("B", 3), {"B": (1, 8, 4)}, "example"),
    ],
)
def test_examples_shapes_and_sizes_agree(shapes: Any, sizes: Any, param: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        capture_module(nn.ReLU(), torch.ones(2, 3), shapes={"input": shapes}, sizes=sizes)
    assert error.value.param == param


def test_errors_of_readers_name_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise KeyError("gone")

    monkeypatch.setitem(OPS, "aten.relu.default", read)
    with pytest.raises(UnsupportedError, match="relu"):
        capture_module(nn.ReLU(), torch.ones(3))


def test_parts_keep_their_modes() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout())
    module[1].eval()
    capture_module(module, torch.ones(2, 3))
    assert [part.training for part in module.modules()] == [True, True, False]
