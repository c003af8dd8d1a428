"""A network of your own: a decoder with layer norms, learned positions and a GELU feed-forward layer.

    penstock run my_checkpoint "Once" --network examples/my_network.py:Net

runs it on a folder with config.json and model.safetensors whose tensors are named like the modules below.
train_my_network.py makes such a folder.  In Python: penstock.register_network("my_network", Net).
"""

from dataclasses import dataclass

from torch import Tensor

from penstock import nn


@dataclass(frozen=True)
class Config:
    """``vocab_size`` and ``context_len`` are asked of every config; the rest is the network's own affair."""

    vocab_size: int
    context_len: int
    width: int
    num_layers: int
    num_heads: int

    @classmethod
    def read(cls, reader):
        """Reads config.json; a wrong or missing key is an error that names it."""
        return cls(
            vocab_size=reader.int("vocab_size"),
            context_len=reader.int("max_position_embeddings"),
            width=reader.int("width"),
            num_layers=reader.int("num_layers"),
            num_heads=reader.int("num_heads"),
        )


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=True)
        self.attention = nn.Attention(config.num_heads, config.num_heads, config.width // config.num_heads)
        self.out = nn.Linear(config.width, config.width, bias=True)
        self.up = nn.Linear(config.width, 4 * config.width, bias=True)
        self.down = nn.Linear(4 * config.width, config.width, bias=True)

    def forward(self, x: Tensor, batch: nn.Batch) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(self.attention(q, k, v, batch))
        return x + self.down(nn.gelu(self.up(self.norm2(x)), "tanh"))


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
