"""The modules of the golden bundles of general networks, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock.networks.network import CapturedNetwork

__all__ = ["capture_all"]


class Images(nn.Module):
    """Ops of images and of elements: all kinds of convolutions, pools, resizes, norms, chains and reductions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, 5, padding=2, groups=16)
        self.grouped = nn.Conv2d(16, 24, 3, padding=1, groups=4)
        self.back, self.gate = nn.Conv2d(24, 16, 1), nn.Conv2d(16, 16, 1)
        self.groups, self.up = nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 4, 2, 1)
        self.slope, self.head = nn.PReLU(8), nn.Linear(24, 7)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.hardswish(self.norm(self.stem(x)))
        x = F.relu(x + self.back(F.silu(self.grouped(F.relu6(self.depthwise(x))))))
        x = x * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(x, 1)))
        x = self.groups(torch.cat([F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 2, 2)], 1)[:, 8:24])
        x = F.interpolate(F.pad(x, (1, 1, 0, 2), mode="reflect"), scale_factor=2.0, mode="bilinear")
        x = F.mish(self.slope(self.up(x)) * 0.5 + 0.25)
        maps = torch.where(x > 0.3, x, F.elu(x).square().clamp(0.0, 1.5))
        parts = (maps.mean((2, 3)), maps.amax((2, 3)), maps.std((2, 3)))
        return self.head(torch.cat(parts, 1)).softmax(-1), maps.argmax(1)


class Sequences(nn.Module):
    """Attention with a mask, products, norms, recurrent layers, indices, and numbers made of sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.norm = nn.Embedding(40, 16), nn.Linear(16, 48), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.lstm, self.gru = nn.LSTM(16, 8, bidirectional=True, batch_first=True), nn.GRU(16, 12, batch_first=True)
        self.rows = nn.Conv1d(12, 8, 3, padding=1)

    def forward(self, ids: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        b, s = ids.shape
        x = self.embed(ids) + torch.arange(s)[None, :, None] / s
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(s, s, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, s, 16)
        x = x + self.down(F.gelu(self.up(y * weights[:, :, None])))
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -1e4).softmax(-1).cumsum(-1)
        y, (_, cell) = self.lstm(scores @ x)
        y = self.rows(self.gru(y)[0].transpose(1, 2)).transpose(1, 2)
        best, places = weights.topk(3, 1)
        chosen = y.gather(1, places[:, :, None].expand(-1, -1, 8)) * best[:, :, None]
        placed = torch.zeros_like(weights).scatter(1, places, best)
        return y.log_softmax(-1), cell, chosen, placed.roll(1, 1), x[torch.arange(b), ids.argmax(1)]


def capture_all() -> dict[str, CapturedNetwork]:
    """Return the networks by the names of their bundles."""
    torch.manual_seed(7)
    images, sequences = Images().eval(), Sequences().eval()
    with torch.no_grad():
        for buffer, low in ((images.norm.running_mean, -1.0), (images.norm.running_var, 0.5)):
            if buffer is not None:
                buffer.uniform_(low, 1.5)
    sizes = {"B": (1, 16), "H": (16, 64, 8), "W": (16, 64, 8)}
    captured = penstock.capture(images, torch.randn(2, 3, 16, 24), shapes={"x": ("B", 3, "H", "W")}, sizes=sizes)
    example = (torch.randint(0, 40, (2, 6)), torch.randn(2, 6))
    shapes = {"ids": ("B", "S"), "weights": ("B", "S")}
    limits = {"B": (1, 16), "S": (3, 64)}
    return {"images": captured, "sequences": penstock.capture(sequences, example, shapes=shapes, sizes=limits)}
