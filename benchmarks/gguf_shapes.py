"""Networks of real sizes for make_gguf.py: the tensors and keys that llama.cpp expects of each architecture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["SHAPES", "Shape", "keys", "matrices", "vectors"]


class Shape(NamedTuple):
    """Sizes of a network.  ``experts`` of them have ``inner`` rows each, and a token uses ``used``.

    With ``interval`` only every such layer has attention; the others are gated delta layers of ``delta_heads`` heads of
    ``delta_dim``.
    """

    arch: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool
    experts: int = 0
    used: int = 0
    interval: int = 1
    delta_heads: int = 0
    delta_dim: int = 0
    rotary_dim: int = 0
    window: int = 0
    pooling: int | None = None


SHAPES = {
    "348m": Shape("llama", 1024, 2816, 24, 16, 8, 64, 32000, False),
    "0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True),
    "0.6b-embedding": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, pooling=3),
    "30b-a3b-6": Shape("qwen3moe", 2048, 768, 6, 32, 4, 128, 151936, False, experts=128, used=8),
    "gpt-oss-4": Shape("gpt-oss", 2880, 2880, 4, 64, 8, 64, 201088, False, experts=32, used=4, window=128),
    "hybrid-0.8b": Shape("qwen35", 1024, 3584, 24, 8, 2, 256, 248320, True, interval=4, delta_heads=16, delta_dim=128,
                         rotary_dim=64),
}  # fmt: skip
"""A number after the last hyphen is the number of layers, fewer than the original has so that the file fits."""
_CONV_LEN = 4


def matrices(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that is quantized."""
    found: dict[str, tuple[int, ...]] = {"token_embd": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        parts = {**(_attention(shape) if _has_attention(shape, layer) else _delta(shape)), **_mlp(shape)}
        found |= {f"blk.{layer}.{name}": size for name, size in parts.items()}
    return found if shape.is_tied else found | {"output": (shape.vocab, shape.hidden)}


def _has_attention(shape: Shape, layer: int) -> bool:
    return (layer + 1) % shape.interval == 0


def _attention(shape: Shape) -> dict[str, tuple[int, ...]]:
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_q": (2 * q if shape.interval > 1 else q, shape.hidden),  # hybrids have gates beside the queries
        "attn_k": (kv, shape.hidden),
        "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, q),
    }


def _delta(shape: Shape) -> dict[str, tuple[int, ...]]:
    values = shape.delta_heads * shape.delta_dim
    return {
        "attn_qkv": (3 * values, shape.hidden),
        "attn_gate": (values, shape.hidden),
        "ssm_alpha": (shape.delta_heads, shape.hidden),
        "ssm_beta": (shape.delta_heads, shape.hidden),
        "ssm_out": (shape.hidden, values),
    }


def _mlp(shape: Shape) -> dict[str, tuple[int, ...]]:
    suffix, lead = ("_exps", (shape.experts,)) if shape.experts else ("", ())
    return {
        f"ffn_gate{suffix}": (*lead, shape.inner, shape.hidden),
        f"ffn_up{suffix}": (*lead, shape.inner, shape.hidden),
        f"ffn_down{suffix}": (*lead, shape.hidden, shape.inner),
    }


def vectors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that stays float32, by its whole name."""
    found: dict[str, tuple[int, ...]] = {"output_norm.weight": (shape.hidden,)}
    second = "ffn_norm" if shape.arch in ("llama", "qwen3", "qwen3moe") else "post_attention_norm"
    for layer in range(shape.layers):
        parts = {"attn_norm.weight": (shape.hidden,), f"{second}.weight": (shape.hidden,)}
        if not _has_attention(shape, layer):
            parts |= dict(_delta_vectors(shape))
        elif shape.arch.startswith("qwen3"):
            parts |= {"attn_q_norm.weight": (shape.head_dim,), "attn_k_norm.weight": (shape.head_dim,)}
        if shape.experts:
            parts["ffn_gate_inp.weight"] = (shape.experts, shape.hidden)
        if shape.arch == "gpt-oss":
            parts |= dict(_biases(shape))
        found |= {f"blk.{layer}.{name}": size for name, size in parts.items()}
    return found


def _delta_vectors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ssm_conv1d.weight", (3 * shape.delta_heads * shape.delta_dim, _CONV_LEN)
    yield "ssm_dt.bias", (shape.delta_heads,)
    yield "ssm_a", (shape.delta_heads,)
    yield "ssm_norm.weight", (shape.delta_dim,)


def _biases(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, size in (*_attention(shape).items(), *_mlp(shape).items()):
        yield f"{name}.bias", size[:-1]
    yield "ffn_gate_inp.bias", (shape.experts,)
    yield "attn_sinks.weight", (shape.heads,)


def keys(shape: Shape) -> dict[str, int | float | list[int]]:
    """Return the numbers of the file, by their names without the architecture's."""
    found: dict[str, int | float | list[int]] = {
        "context_length": 4096,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
        "vocab_size": shape.vocab,
    }
    if shape.arch != "llama":
        found |= {"attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim}
    if shape.arch == "llama" or shape.rotary_dim:
        found["rope.dimension_count"] = shape.rotary_dim or shape.head_dim
    if shape.experts:
        found |= {"expert_count": shape.experts, "expert_used_count": shape.used}
        found["expert_feed_forward_length"] = shape.inner
    if shape.window:
        found["attention.sliding_window"] = shape.window
    if shape.pooling is not None:
        found["pooling_type"] = shape.pooling
    if shape.delta_heads:
        found |= {
            "full_attention_interval": shape.interval,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": _CONV_LEN,
            "ssm.group_count": shape.delta_heads,
            "ssm.inner_size": shape.delta_heads * shape.delta_dim,
            "ssm.state_size": shape.delta_dim,
            "ssm.time_step_rank": shape.delta_heads,
        }
    return found
