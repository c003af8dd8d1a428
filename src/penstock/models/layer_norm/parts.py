"""The parts that decoders with layer norms share: their sizes, attention, and the plain feed-forward layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.config import ConfigReader
from penstock.models.decoder import MAX_LAYERS
from penstock.nn import Attention, Batch, Linear, Module, apply_rope, gelu
from penstock.nn.base import Tensor

__all__ = ["GELU_FORMS", "PlainMLP", "SelfAttention", "Sizes", "read_gelu", "read_sizes"]

GELU_FORMS: Final = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}


@dataclass(frozen=True)
class Sizes:
    """The sizes of a network in config.json.  ``context_len`` is in tokens; ``gelu_form`` is "none" or "tanh"."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    context_len: int
    norm_eps: float
    gelu_form: str
    tied: bool
    bias: bool

    @property
    def head_dim(self) -> int:
        """The number of elements of a head."""
        return self.hidden_size // self.num_heads


def read_gelu(reader: ConfigReader, key: str, default: str) -> str:
    """Return the form of GELU, "none" (erf) or "tanh", that the activation under ``key`` names."""
    return GELU_FORMS[reader.one_of(key, GELU_FORMS, default)]


def read_sizes(
    reader: ConfigReader,
    *,
    gelu_form: str,
    tied: bool,
    context_len: int,
    bias: bool = True,
    keys: Mapping[str, str] | None = None,
) -> Sizes:
    """Read and check the sizes; errors name the key.

    ``tied`` and ``context_len`` are the family's defaults.  ``keys`` has the family's own names of keys.  A family
    without the key of num_key_value_heads maps it to "".
    """
    own = keys or {}

    def name(key: str) -> str:
        return own.get(key, key)

    hidden_size, num_heads = reader.int(name("hidden_size")), reader.int(name("num_attention_heads"))
    if hidden_size % num_heads:
        raise reader.error(name("hidden_size"), f"a multiple of the number of heads ({num_heads})", hidden_size)
    kv_key = name("num_key_value_heads")
    num_kv_heads = reader.int(kv_key, num_heads) if kv_key else num_heads
    if num_heads % num_kv_heads:
        raise reader.error(kv_key, f"a divisor of the number of heads ({num_heads})", num_kv_heads)
    return Sizes(
        vocab_size=reader.int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.int(name("intermediate_size"), 4 * hidden_size),
        num_layers=reader.int(name("num_hidden_layers"), max=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        context_len=reader.int(name("max_position_embeddings"), context_len),
        norm_eps=reader.float(name("layer_norm_eps"), 1e-5),
        gelu_form=gelu_form,
        tied=reader.bool("tie_word_embeddings", tied),
        bias=bias,
    )


class SelfAttention(Module):
    """Grouped-query attention.  ``output`` is the module path of the output linear.

    Heads are not rotated when ``forward`` gets no cosines and sines.  ``slopes`` are those of ALiBi.
    ``scale`` is that of the scores, by default 1 / sqrt(head_dim); ``bias`` is by default that of ``sizes``.
    """

    def __init__(
        self,
        sizes: Sizes,
        *,
        output: str = "o_proj",
        window: int = 0,
        slopes: Sequence[float] = (),
        interleaved: bool = False,
        scale: float | None = None,
        bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.interleaved, self.output = interleaved, output
        bias = sizes.bias if bias is None else bias
        q_size, kv_size = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.q_proj = Linear(sizes.hidden_size, q_size, bias)
        self.k_proj = Linear(sizes.hidden_size, kv_size, bias)
        self.v_proj = Linear(sizes.hidden_size, kv_size, bias)
        self.add_module(output, Linear(q_size, sizes.hidden_size, bias))
        self.attention = Attention(
            sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, window=window, slopes=slopes, scale=scale
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [T, heads, head_dim], k [T, kv_heads, head_dim] and v [T, kv_heads * head_dim] of x [T, hidden]."""
        q = self.q_proj(x).view(-1, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(-1, self.num_kv_heads, self.head_dim)
        return q, k, self.v_proj(x)

    def forward(self, x: Tensor, cos_sin: Tensor | None, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        q, k, v = self.project(x)
        if cos_sin is not None:
            q = apply_rope(q, cos_sin, interleaved=self.interleaved)
            k = apply_rope(k, cos_sin, interleaved=self.interleaved)
        y: Tensor = self.get_submodule(self.output)(self.attention(q, k, v, batch))
        return y


class PlainMLP(Module):
    """The feed-forward layer without a gate.  ``names`` are the module paths of its linears."""

    def __init__(self, sizes: Sizes, names: tuple[str, str] = ("up_proj", "down_proj")) -> None:
        super().__init__()
        self.names, self.gelu_form = names, sizes.gelu_form
        self.add_module(names[0], Linear(sizes.hidden_size, sizes.intermediate_size, sizes.bias))
        self.add_module(names[1], Linear(sizes.intermediate_size, sizes.hidden_size, sizes.bias))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output [T, hidden] for x [T, hidden]."""
        up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(gelu(up(x), self.gelu_form))
        return y
