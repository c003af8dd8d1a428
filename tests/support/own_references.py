"""Families that transformers has no class for, in plain PyTorch from their published formulas.

Sources: MiniCPM arXiv 2404.06395, InternLM 2 arXiv 2403.17297, Baichuan 2 arXiv 2309.10305, GLM arXiv 2103.10360 and
2406.12793, and ALiBi arXiv 2108.12409.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional


class OwnReference:
    """A decoder with RMS norms and a gate of SiLU; families override the names and the forms of their tensors."""

    embedding, final_norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    layer_name = "model.layers.{}."
    norms = ("input_layernorm.weight", "post_attention_layernorm.weight")
    output, down = "self_attn.o_proj.weight", "mlp.down_proj.weight"
    tied = False

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.config = SimpleNamespace(to_dict=lambda: dict(values))
        self.hidden, self.heads = values["hidden_size"], values["num_attention_heads"]
        self.head_dim, self.num_layers = self.hidden // self.heads, values.get("num_hidden_layers", 0)
        self.kv_heads, self.inner = values.get("num_key_value_heads", self.heads), values.get("intermediate_size", 0)
        self.vocab, self.eps, self.theta = values["vocab_size"], values.get("rms_norm_eps", 1e-6), 10000.0
        self.weights: dict[str, Tensor] = {}

    def fill(self) -> OwnReference:
        """Give every tensor random values."""
        for name, shape in self.shapes().items():
            is_norm = "norm" in name and name.endswith("weight")
            scale = 0.1 if len(shape) == 2 else 0.2
            self.weights[name] = is_norm * 1.0 + scale * torch.randn(shape)
        return self

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {
            self.embedding: (self.vocab, self.hidden),
            self.final_norm: (self.hidden,),
        }
        if not self.tied:
            shapes[self.head] = (self.vocab, self.hidden)
        for layer in range(self.num_layers):
            shapes |= {self.layer_name.format(layer) + name: shape for name, shape in self.layer_shapes().items()}
        return shapes

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(self.norms, (self.hidden,))
        shapes[self.output] = (self.hidden, self.heads * self.head_dim)
        return shapes | {self.down: (self.hidden, self.inner)} | self.fused_shapes()

    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sizes = {"self_attn.q_proj": rows, "self_attn.k_proj": kv_rows, "self_attn.v_proj": kv_rows}
        sizes |= {"mlp.gate_proj": self.inner, "mlp.up_proj": self.inner}
        return {f"{name}.weight": (size, self.hidden) for name, size in sizes.items()}

    def linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weights[name]

    def project(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
        q, k, v = (self.linear(x, f"{layer}self_attn.{name}_proj") for name in "qkv")
        return tuple(y.view(len(x), -1, self.head_dim) for y in (q, k, v))  # type: ignore[return-value]

    def gate_up(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        return self.linear(x, f"{layer}mlp.gate_proj"), self.linear(x, f"{layer}mlp.up_proj")

    def turn(self, x: Tensor) -> Tensor:
        """Turn the halves of each head as complex numbers."""
        half = self.head_dim // 2
        turned = torch.complex(x[..., :half], x[..., half:]) * self.turns(len(x), self.head_dim)
        return torch.cat((turned.real, turned.imag), -1)

    def turns(self, num_tokens: int, dims: int) -> Tensor:
        angles = torch.outer(torch.arange(num_tokens), self.theta ** -(torch.arange(0, dims, 2) / dims))
        return torch.polar(torch.ones_like(angles), angles)[:, None]

    def bias(self, num_tokens: int) -> Tensor:
        """What is added to the scores [heads, T, T]."""
        return torch.full((num_tokens, num_tokens), -math.inf).triu(1)[None]

    def attend(self, x: Tensor, layer: str) -> Tensor:
        q, k, v = self.project(x, layer)
        q, k = self.turn(q), self.turn(k)
        k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.head_dim**-0.5 + self.bias(len(x))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(len(x), -1)
        return self.linear(attended, layer + self.output.removesuffix(".weight"))

    def layer(self, x: Tensor, layer: str, branch: float) -> Tensor:
        x = x + branch * self.attend(self.norm(x, layer + self.norms[0]), layer)
        gate, up = self.gate_up(self.norm(x, layer + self.norms[1]), layer)
        return x + branch * self.linear(functional.silu(gate) * up, layer + self.down.removesuffix(".weight"))

    def head_rows(self) -> Tensor:
        return self.weights[self.embedding if self.tied else self.head]

    def run(self, ids: Tensor, *, embed: float = 1.0, branch: float = 1.0, final: float = 1.0) -> Tensor:
        x = embed * self.weights[self.embedding][ids]
        for layer in range(self.num_layers):
            x = self.layer(x, self.layer_name.format(layer), branch)
        return final * self.norm(x, self.final_norm) @ self.head_rows().T

    def __call__(self, batch: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.run(batch[0])[None])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.weights)

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.values))
        save_file(self.weights, folder / "model.safetensors", metadata={"format": "pt"})


class MiniCPM(OwnReference):
    tied = True

    def run(self, ids: Tensor, **_: float) -> Tensor:
        return super().run(
            ids,
            embed=self.values["scale_emb"],
            branch=self.values["scale_depth"] / math.sqrt(self.num_layers),
            final=self.values["dim_model_base"] / self.hidden,
        )


class InternLM(OwnReference):
    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = self.heads * self.head_dim
        biases = {f"self_attn.{name}_proj.bias": (rows,) for name in "qkv"} | {"self_attn.o_proj.bias": (self.hidden,)}
        return super().fused_shapes() | (biases if self.values["bias"] else {})


class InternLM2(OwnReference):
    embedding, head = "model.tok_embeddings.weight", "output.weight"
    norms = ("attention_norm.weight", "ffn_norm.weight")
    output, down = "attention.wo.weight", "feed_forward.w2.weight"

    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        gates = {f"feed_forward.{name}.weight": (self.inner, self.hidden) for name in ("w1", "w3")}
        return {"attention.wqkv.weight": (rows, self.hidden)} | gates

    def project(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        groups = self.linear(x, f"{layer}attention.wqkv").view(len(x), self.kv_heads, -1, self.head_dim)
        return groups[:, :, :-2].flatten(1, 2), groups[:, :, -2], groups[:, :, -1]

    def gate_up(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        return self.linear(x, f"{layer}feed_forward.w1"), self.linear(x, f"{layer}feed_forward.w3")


class InternLM3(OwnReference):
    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.head_dim = values["head_dim"]

    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().fused_shapes()
        sizes = {name.removesuffix("weight"): shape[0] for name, shape in shapes.items()}
        sizes |= {"self_attn.o_proj.": self.hidden, "mlp.down_proj.": self.hidden}
        has_bias = {True: self.values["qkv_bias"], False: self.values["bias"]}
        biased = {
            name: size for name, size in sizes.items() if has_bias[name.endswith(("q_proj.", "k_proj.", "v_proj."))]
        }
        return shapes | {f"{name}bias": (size,) for name, size in biased.items()}


class Baichuan(OwnReference):
    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        gates = {f"mlp.{name}_proj.weight": (self.inner, self.hidden) for name in ("gate", "up")}
        return {"self_attn.W_pack.weight": (3 * self.hidden, self.hidden)} | gates

    def project(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.linear(x, f"{layer}self_attn.W_pack").view(len(x), 3, self.heads, self.head_dim).unbind(1)
        return q, k, v

    def turn(self, x: Tensor) -> Tensor:
        return super().turn(x) if "max_position_embeddings" in self.values else x

    def bias(self, num_tokens: int) -> Tensor:
        mask = super().bias(num_tokens)
        if "max_position_embeddings" in self.values:
            return mask
        power = 2 ** math.floor(math.log2(self.heads))
        slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
        slopes += [2 ** (-4 / power * (2 * i + 1)) for i in range(self.heads - power)]
        return mask + torch.tensor(slopes)[:, None, None] * torch.arange(num_tokens)

    def head_rows(self) -> Tensor:
        rows = super().head_rows()
        return functional.normalize(rows) if self.vocab == 125696 else rows


class ChatGLM(OwnReference):
    embedding = "transformer.embedding.word_embeddings.weight"
    final_norm, head = "transformer.encoder.final_layernorm.weight", "transformer.output_layer.weight"
    layer_name = "transformer.encoder.layers.{}."
    output, down = "self_attention.dense.weight", "mlp.dense_4h_to_h.weight"

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values | {"vocab_size": values["padded_vocab_size"]})
        self.values, self.config.to_dict = values, lambda: dict(values)
        self.head_dim, self.num_layers, self.inner = (
            values["kv_channels"],
            values["num_layers"],
            values["ffn_hidden_size"],
        )
        self.kv_heads, self.eps = values["multi_query_group_num"], values["layernorm_epsilon"]
        self.theta = 10000.0 * values["rope_ratio"]

    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"self_attention.query_key_value.weight": (rows, self.hidden)}
        shapes["self_attention.query_key_value.bias"] = (rows,)
        return shapes | {"mlp.dense_h_to_4h.weight": (2 * self.inner, self.hidden)}

    def project(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.linear(x, f"{layer}self_attention.query_key_value").view(len(x), -1, self.head_dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return q, k, v

    def gate_up(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor]:
        gate, up = self.linear(x, f"{layer}mlp.dense_h_to_4h").chunk(2, -1)
        return gate, up

    def turn(self, x: Tensor) -> Tensor:
        """Turn adjacent pairs of the first half of each head."""
        dims = self.head_dim // 2
        pairs = torch.view_as_complex(x[..., :dims].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((torch.view_as_real(pairs * self.turns(len(x), dims)).flatten(-2), x[..., dims:]), -1)


class ChatGLM1(OwnReference):
    """A prompt up to ``bos_token_id`` sees itself; positions inside and behind it turn the halves of each head."""

    embedding, final_norm = "transformer.word_embeddings.weight", "transformer.final_layernorm.weight"
    layer_name = "transformer.layers.{}."
    output, down = "attention.dense.weight", "mlp.dense_4h_to_h.weight"

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.num_layers, self.inner, self.eps = values["num_layers"], values["inner_hidden_size"], 1e-5
        self.prefix = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super().shapes()
        names = [name.removesuffix("weight") for name in shapes if "embed" not in name and name != self.head]
        return shapes | {f"{name}bias": shapes[f"{name}weight"][:1] for name in names}

    def fused_shapes(self) -> dict[str, tuple[int, ...]]:
        sizes = {"attention.query_key_value": 3 * self.hidden, "mlp.dense_h_to_4h": self.inner}
        return {f"{name}.weight": (size, self.hidden) for name, size in sizes.items()}

    def norm(self, x: Tensor, name: str) -> Tensor:
        bias = self.weights[name.removesuffix("weight") + "bias"]
        return functional.layer_norm(x, (self.hidden,), self.weights[name], bias, self.eps)

    def project(self, x: Tensor, layer: str) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.linear(x, f"{layer}attention.query_key_value").view(len(x), self.heads, 3 * self.head_dim)
        q, k, v = heads.chunk(3, -1)
        return q, k, v

    def turn(self, x: Tensor) -> Tensor:
        places, dims = torch.arange(len(x)), self.head_dim // 2
        halves = []
        for half, positions in zip(
            x.chunk(2, -1),
            (places.clamp(max=self.prefix - 1), (places - self.prefix + 1).clamp(min=0)),
            strict=True,
        ):
            angles = torch.outer(positions, self.theta ** -(torch.arange(0, dims, 2) / dims))[:, None].repeat(1, 1, 2)
            first, second = half.chunk(2, -1)
            halves.append(half * angles.cos() + torch.cat((-second, first), -1) * angles.sin())
        return torch.cat(halves, -1)

    def bias(self, num_tokens: int) -> Tensor:
        mask = torch.full((num_tokens, num_tokens), -math.inf).triu(1)
        mask[:, : self.prefix] = 0
        return mask[None]

    def layer(self, x: Tensor, layer: str, branch: float) -> Tensor:
        alpha = (2 * self.num_layers) ** 0.5
        x = self.norm(x, layer + self.norms[0])
        x = self.norm(alpha * x + self.attend(x, layer), layer + self.norms[1])
        up = functional.gelu(self.linear(x, f"{layer}mlp.dense_h_to_4h"), approximate="tanh")
        return alpha * x + self.linear(up, f"{layer}mlp.dense_4h_to_h")

    def run(self, ids: Tensor, **_: float) -> Tensor:
        self.prefix = ids.tolist().index(self.values["bos_token_id"], 1)
        return super().run(ids)


OWN_REFERENCES: dict[str, type[OwnReference]] = {
    "minicpm": MiniCPM,
    "internlm": InternLM,
    "internlm2": InternLM2,
    "internlm3": InternLM3,
    "baichuan": Baichuan,
    "chatglm": ChatGLM,
}
