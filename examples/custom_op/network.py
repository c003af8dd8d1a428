"""A network with an op of its own: examples/my_network.py's, with squared_relu.c in the place of GELU.

    penstock run my_checkpoint "Once" --network examples/custom_op/network.py:Net --mode eager
    penstock export my_checkpoint mine.psm --network examples/custom_op/network.py:Net --ops ./libsquared_relu.so
    penstock run mine.psm "Once" --ops ./libsquared_relu.so

The first needs no library: the op is what ``squared_relu`` says.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import penstock
from penstock import nn


def squared_relu(x, scale, *, limit):
    """x [rows, columns] float32, scale [columns] or None: min(max(x, 0)^2, limit) * scale, as [rows, columns]."""
    y = torch.clamp(torch.clamp(x, min=0.0).square(), max=limit)
    return y if scale is None else y * scale


squared_relu_op = penstock.custom_op(
    "example::squared_relu",
    version=1,
    schema="(Tensor x, Weight? scale, *, float limit) -> Tensor",
    reference=squared_relu,
    tolerance=0.0,  # each product is rounded once: the same bits
)


@dataclass(frozen=True)
class Config:
    vocab_size: int
    context_len: int
    width: int
    num_layers: int
    num_heads: int

    @classmethod
    def read(cls, reader):
        return cls(
            vocab_size=reader.int("vocab_size"),
            context_len=reader.int("max_position_embeddings"),
            width=reader.int("width"),
            num_layers=reader.int("num_layers"),
            num_heads=reader.int("num_heads"),
        )


class SquaredReLU(nn.Module):
    def __init__(self, width: int, limit: float):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(width))
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        return squared_relu_op(x, self.scale, limit=self.limit)


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=True)
        self.attention = nn.Attention(config.num_heads, config.num_heads, config.width // config.num_heads)
        self.out = nn.Linear(config.width, config.width, bias=True)
        self.up = nn.Linear(config.width, 4 * config.width, bias=True)
        self.activation = SquaredReLU(4 * config.width, limit=6.0)
        self.down = nn.Linear(4 * config.width, config.width, bias=True)

    def forward(self, x: Tensor, batch: nn.Batch) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(self.attention(q, k, v, batch))
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Net(nn.Module):
    """Flat tokens of several requests in, logits of the wanted rows out."""

    Config = Config

    def __init__(self, config: Config):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.context_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.LMHead(config.width, config.vocab_size)

    def forward(self, batch: nn.Batch) -> Tensor:
        x = self.tokens(batch.token_ids) + self.positions(batch.positions)
        for block in self.blocks:
            x = block(x, batch)
        return self.head(self.norm(x), batch.output_rows)
