"""Networks of known shapes with random weights, which ``benchmarks.networks`` exports as ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

IMAGE: Final = (1, 3, 224, 224)
TOKENS: Final = 128


def conv(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Any = None
) -> nn.Sequential:
    """Return a convolution, its batch norm, and an activation if there is one."""
    parts = [
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*parts, *([act()] if act else []))


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            conv(inputs, width, act=nn.ReLU), conv(width, width, 3, stride, act=nn.ReLU), conv(width, 4 * width)
        )
        plain = stride == 1 and inputs == 4 * width
        self.side = nn.Identity() if plain else conv(inputs, 4 * width, 1, stride)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.relu(self.main(x) + self.side(x))


def head(inputs: int, *middle: nn.Module, last: int = 0) -> list[nn.Module]:
    """Return what makes 1,000 scores of an image's features."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *middle, nn.Linear(last or inputs, 1000)]


def resnet50() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 64, 7, 2, act=nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(blocks):
            parts.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*parts, *head(inputs))


class Gate(nn.Module):
    """Scales channels by what their means tell (squeeze and excitation)."""

    def __init__(self, channels: int, squeezed: int, act: Any, scale: Any) -> None:
        super().__init__()
        parts = [nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, squeezed, 1), act(), nn.Conv2d(squeezed, channels, 1)]
        self.parts = nn.Sequential(*parts, scale())

    def forward(self, x: torch.Tensor) -> Any:
        return x * self.parts(x)


class Inverted(nn.Module):
    """A block of MobileNet and EfficientNet: wider, depthwise, perhaps a gate, narrower."""

    def __init__(
        self, inputs: int, wide: int, outputs: int, kernel: int, stride: int, act: Any, gate: nn.Module | None
    ) -> None:
        super().__init__()
        parts = [conv(inputs, wide, act=act)] if wide != inputs else []
        parts.append(conv(wide, wide, kernel, stride, wide, act))
        self.parts = nn.Sequential(*parts, *([gate] if gate else []), conv(wide, outputs))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.parts(x) if self.adds else self.parts(x)


def mobilenet_v2() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.ReLU6)]
    inputs = 32
    for ratio, outputs, blocks, first in (
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)
    ):  # fmt: skip
        for number in range(blocks):
            stride = first if number == 0 else 1
            parts.append(Inverted(inputs, ratio * inputs, outputs, 3, stride, nn.ReLU6, None))
            inputs = outputs
    return nn.Sequential(*parts, conv(inputs, 1280, act=nn.ReLU6), *head(1280))


def mobilenet_v3() -> nn.Module:
    """Return the large one."""
    relu, swish = nn.ReLU, nn.Hardswish
    parts: list[nn.Module] = [conv(3, 16, 3, 2, act=swish)]
    inputs = 16
    for kernel, wide, outputs, gated, act, stride in (
        (3, 16, 16, 0, relu, 1), (3, 64, 24, 0, relu, 2), (3, 72, 24, 0, relu, 1), (5, 72, 40, 24, relu, 2),
        (5, 120, 40, 32, relu, 1), (5, 120, 40, 32, relu, 1), (3, 240, 80, 0, swish, 2), (3, 200, 80, 0, swish, 1),
        (3, 184, 80, 0, swish, 1), (3, 184, 80, 0, swish, 1), (3, 480, 112, 120, swish, 1),
        (3, 672, 112, 168, swish, 1), (5, 672, 160, 168, swish, 2), (5, 960, 160, 240, swish, 1),
        (5, 960, 160, 240, swish, 1),
    ):  # fmt: skip
        gate = Gate(wide, gated, nn.ReLU, nn.Hardsigmoid) if gated else None
        parts.append(Inverted(inputs, wide, outputs, kernel, stride, act, gate))
        inputs = outputs
    return nn.Sequential(*parts, conv(160, 960, act=swish), *head(960, nn.Linear(960, 1280), swish(), last=1280))


def efficientnet_b0() -> nn.Module:
    parts: list[nn.Module] = [conv(3, 32, 3, 2, act=nn.SiLU)]
    inputs = 32
    for ratio, kernel, first, outputs, blocks in (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    ):  # fmt: skip
        for number in range(blocks):
            gate = Gate(ratio * inputs, inputs // 4, nn.SiLU, nn.Sigmoid)
            stride = first if number == 0 else 1
            parts.append(Inverted(inputs, ratio * inputs, outputs, kernel, stride, nn.SiLU, gate))
            inputs = outputs
    return nn.Sequential(*parts, conv(inputs, 1280, act=nn.SiLU), *head(1280))


class Layer(nn.Module):
    """A layer of ViT: norm, attention, norm, two linears."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, 1e-6) for _ in range(2)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norms[1](x))


class VisionTransformer(nn.Module):
    """ViT-B/16."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 197, width) * 0.02)
        self.layers = nn.Sequential(*[Layer(width, heads) for _ in range(layers)])
        self.norm, self.scores = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.patches(x).flatten(2).transpose(1, 2)
        rows = torch.cat([self.first.expand(x.shape[0], -1, -1), rows], 1) + self.positions
        return self.scores(self.norm(self.layers(rows))[:, 0])


class Bert(nn.Module):
    """The encoder of MiniLM-L6 by transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536,
            attn_implementation="eager",
        )  # fmt: skip
        self.model = BertModel(config, add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        hidden = (attention_mask[:, None, None, :].float() - 1) * 1e9
        return self.model(input_ids=input_ids, attention_mask=hidden).last_hidden_state


def silu(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return conv(inputs, outputs, kernel, stride, act=nn.SiLU)


class C2f(nn.Module):
    """YOLOv8's block: the halves of a 1x1 convolution and the outputs of ``count`` bottlenecks, joined."""

    def __init__(self, inputs: int, outputs: int, count: int, shortcut: bool) -> None:
        super().__init__()
        half = outputs // 2
        self.split = silu(inputs, outputs)
        self.blocks = nn.ModuleList(nn.Sequential(silu(half, half, 3), silu(half, half, 3)) for _ in range(count))
        self.join = silu((2 + count) * half, outputs)
        self.shortcut = shortcut

    def forward(self, x: torch.Tensor) -> Any:
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            made = block(parts[-1])
            parts.append(parts[-1] + made if self.shortcut else made)
        return self.join(torch.cat(parts, 1))


class PyramidPool(nn.Module):
    """YOLOv8's SPPF: three 5x5 maximum pools in a row, joined with their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.last = silu(channels, channels // 2), silu(2 * channels, channels)

    def forward(self, x: torch.Tensor) -> Any:
        parts = [self.first(x)]
        for _ in range(3):
            parts.append(nn.functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.last(torch.cat(parts, 1))


class YoloV8(nn.Module):
    """A detector with the layers and sizes of YOLOv8n (80 classes, images of 640 x 640); boxes are left undecoded."""

    def __init__(self) -> None:
        super().__init__()
        self.p3 = nn.Sequential(
            silu(3, 16, 3, 2), silu(16, 32, 3, 2), C2f(32, 32, 1, True), silu(32, 64, 3, 2), C2f(64, 64, 2, True)
        )
        self.p4 = nn.Sequential(silu(64, 128, 3, 2), C2f(128, 128, 2, True))
        self.p5 = nn.Sequential(silu(128, 256, 3, 2), C2f(256, 256, 1, True), PyramidPool(256))
        self.up4, self.up3 = C2f(384, 128, 1, False), C2f(192, 64, 1, False)
        self.down4, self.down5 = silu(64, 64, 3, 2), silu(128, 128, 3, 2)
        self.out4, self.out5 = C2f(192, 128, 1, False), C2f(384, 256, 1, False)
        self.boxes = nn.ModuleList(self.branch(channels, 64, 64) for channels in (64, 128, 256))
        self.scores = nn.ModuleList(self.branch(channels, 80, 80) for channels in (64, 128, 256))

    @staticmethod
    def branch(inputs: int, width: int, outputs: int) -> nn.Module:
        return nn.Sequential(silu(inputs, width, 3), silu(width, width, 3), nn.Conv2d(width, outputs, 1))

    def forward(self, x: torch.Tensor) -> Any:
        p3 = self.p3(x)
        p4 = self.p4(p3)
        p5 = self.p5(p4)
        up4 = self.up4(torch.cat((nn.functional.interpolate(p5, scale_factor=2.0), p4), 1))
        up3 = self.up3(torch.cat((nn.functional.interpolate(up4, scale_factor=2.0), p3), 1))
        out4 = self.out4(torch.cat((self.down4(up3), up4), 1))
        out5 = self.out5(torch.cat((self.down5(out4), p5), 1))
        levels = zip((up3, out4, out5), self.boxes, self.scores, strict=True)
        return torch.cat([torch.cat((box(x), score(x)), 1).flatten(2) for x, box, score in levels], 2)


MODULES: Final[dict[str, Callable[[], nn.Module]]] = {
    "resnet50": resnet50, "mobilenet_v2": mobilenet_v2, "mobilenet_v3": mobilenet_v3,
    "efficientnet_b0": efficientnet_b0, "vit_b_16": VisionTransformer, "minilm": Bert,
    "yolov8n": YoloV8,
}  # fmt: skip


def export(name: str, path: Path) -> None:
    """Write the network ``name`` of MODULES with seeded weights as an ONNX file of fixed sizes."""
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.running_mean is not None and part.running_var is not None:
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.1, 0.4)  # keeps activations of the networks here within a few powers of ten
    for place, parameter in module.named_parameters():
        if place.endswith("bias"):
            nn.init.normal_(parameter, 0, 0.02)  # zeros, which BERT begins with, would be left out
    names: list[str] = ["x"]
    example: tuple[torch.Tensor, ...] = (torch.randn((1, 3, 640, 640) if name == "yolov8n" else IMAGE),)
    if name == "minilm":
        names, example = ["input_ids", "attention_mask"], (torch.ones((1, TOKENS), dtype=torch.int64),) * 2
    with torch.no_grad():
        torch.onnx.export(module, example, str(path), input_names=names, opset_version=17, dynamo=False)
