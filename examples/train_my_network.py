"""Train the network of my_network.py in plain PyTorch, and write the checkpoint folder that Penstock runs.

    python examples/train_my_network.py my-checkpoint
    penstock run my-checkpoint "def add(" --network examples/my_network.py:Net

The tensors have the names of the modules, so that the network script of Penstock finds them.  The tokenizer has one
token for each byte and one that ends a text.  ``--squared-relu`` trains the network of custom_op/network.py instead.
Needs torch and safetensors.  Training takes a few seconds; the result knows little more than the look of Python.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, NUM_LAYERS, NUM_HEADS, CONTEXT_LEN = 48, 2, 3, 64
BATCH, LEARNING_RATE = 16, 1e-2
END = "<|end|>"


class SquaredReLU(nn.Module):
    """min(max(x, 0)^2, 6) * scale, as in custom_op/network.py."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(F.relu(x).square(), max=6.0) * self.scale


class Block(nn.Module):
    def __init__(self, squared_relu: bool):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.activation = SquaredReLU(4 * WIDTH) if squared_relu else nn.GELU("tanh")

    def forward(self, x: Tensor) -> Tensor:
        batch, num_tokens, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, num_tokens, 3, NUM_HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Net(nn.Module):
    """Token ids [batch, tokens] in, logits [batch, tokens, vocabulary] out."""

    def __init__(self, vocab_size: int, squared_relu: bool = False):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, WIDTH), nn.Embedding(CONTEXT_LEN, WIDTH)
        self.blocks = nn.ModuleList(Block(squared_relu) for _ in range(NUM_LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size, bias=False)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.tokens(token_ids) + self.positions.weight[: token_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def train(network: Net, ids: Tensor, steps: int) -> float:
    """Train on random windows of a text; return the mean loss of the last ten steps."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(steps):
        begins = torch.randint(len(ids) - CONTEXT_LEN, (BATCH,))
        windows = torch.stack([ids[begin : begin + CONTEXT_LEN] for begin in begins])
        loss = F.cross_entropy(network(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / len(losses[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the network of my_network.py and write a checkpoint folder.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "demo" / "model" / "valid.txt")
    parser.add_argument("--steps", type=int, default=300, help="number of steps (default: 300)")
    parser.add_argument("--squared-relu", action="store_true", help="the network of custom_op/network.py")
    args = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)  # the network is too small for several
    tokenizer = byte_tokenizer()
    ids = torch.tensor(tokenizer.encode(args.text.read_text()[:200_000]).ids)
    network = Net(tokenizer.get_vocab_size(), args.squared_relu)
    print(f"loss {train(network, ids, args.steps):.2f} nats per byte after {args.steps} steps")

    args.out.mkdir(parents=True, exist_ok=True)
    config = {"model_type": "my_network", "vocab_size": tokenizer.get_vocab_size(), "width": WIDTH}
    config |= {"max_position_embeddings": CONTEXT_LEN, "num_layers": NUM_LAYERS, "num_heads": NUM_HEADS}
    config |= {"eos_token_id": tokenizer.token_to_id(END)}
    (args.out / "config.json").write_text(json.dumps(config, indent=1))
    tokenizer.save(str(args.out / "tokenizer.json"))
    save_file(network.state_dict(), args.out / "model.safetensors")
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
