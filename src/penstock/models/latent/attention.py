"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): its sizes, and the layer in its absorbed form.

A checkpoint's kv_b_proj makes the keys and values of all heads from a token's latent.  Here its key half is applied to
the query and its value half to the result, so that attention reads the latents themselves, in prompts and afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers
from penstock.models.sources import fused_rows
from penstock.nn import Batch, HeadLinear, LatentAttention, Linear, Module, RMSNorm, apply_rope
from penstock.nn.base import Tensor, nn

__all__ = ["LatentConfig", "LatentHeads", "latent_sources", "read_latent", "read_latent_decoder"]

_NORM_EPS: Final = 1e-6  # of the norms inside the layer, whatever the others have
_MAX_DIM: Final = 1024  # numbers that a row in pages may have


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of the layer.  ``query_rank`` 0: queries come from the hidden rows in one step.

    ``nope_dim`` and ``rope_dim`` are the parts of a query head without and with rotary positions.
    """

    query_rank: int
    latent_dim: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool
    bias: bool


def read_latent(
    reader: ConfigReader,
    *,
    query_rank: int,
    latent_dim: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    interleaved: bool,
) -> LatentConfig:
    """Read and check the sizes; errors name the key.  The keyword arguments are the family's defaults."""
    nope_dim, rope_dim = reader.int("qk_nope_head_dim", nope_dim), reader.int("qk_rope_head_dim", rope_dim)
    latent_dim = reader.int("kv_lora_rank", latent_dim)
    if latent_dim + rope_dim > _MAX_DIM:
        raise reader.error("kv_lora_rank", f"{_MAX_DIM} at most, with qk_rope_head_dim ({rope_dim})", latent_dim)
    is_direct = "q_lora_rank" in reader.values and not reader.has("q_lora_rank")
    section = reader.object("rope_scaling") or reader.object("rope_parameters")
    scale = (nope_dim + rope_dim) ** -0.5
    if section is not None and section.values.get("rope_type", section.values.get("type", "default")) != "default":
        factor, mscale = section.float("factor", 1.0), section.optional_float("mscale_all_dim")
        if mscale and factor > 1:  # YaRN's magnitude, for the query and for the key
            scale *= (0.1 * mscale * math.log(factor) + 1.0) ** 2
    return LatentConfig(
        query_rank=0 if is_direct else reader.int("q_lora_rank", query_rank),
        latent_dim=latent_dim,
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=reader.int("v_head_dim", value_dim),
        scale=scale,
        interleaved=interleaved,
        bias=reader.bool("attention_bias", False),
    )


def read_latent_decoder(
    reader: ConfigReader, rope_dim: int, *, context_len: int, norm_eps: float = 1e-6, tied: bool = False
) -> DecoderConfig:
    """Read and check the sizes of the decoder around the layer; errors name the key.

    Each head has a key of its own.  The rotary part is ``rope_dim`` wide, and all of it turns.
    """
    heads = reader.int("num_attention_heads")
    if reader.int("num_key_value_heads", heads) != heads:
        raise reader.error("num_key_value_heads", f"num_attention_heads ({heads})", reader.int("num_key_value_heads"))
    values = {key: value for key, value in reader.values.items() if key != "num_key_value_heads"}
    plain = ConfigReader(values | {"head_dim": rope_dim}, reader.file)
    windows = (0,) * read_num_layers(reader)
    return read_decoder(plain, windows, context_len=context_len, norm_eps=norm_eps, tied=tied)


class LatentHeads(Module):
    """The projections around attention over latents."""

    def __init__(self, config: DecoderConfig, latent: LatentConfig) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads
        self.num_heads, self.sizes = heads, latent
        if latent.query_rank:
            self.q_a_proj = Linear(hidden, latent.query_rank, latent.bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, _NORM_EPS)
        query_size = latent.query_rank or hidden
        self.q_nope_proj = Linear(query_size, heads * latent.nope_dim)
        self.q_rope_proj = Linear(query_size, heads * latent.rope_dim)
        self.kv_a_proj_with_mqa = Linear(hidden, latent.latent_dim + latent.rope_dim, latent.bias)
        self.kv_a_layernorm = RMSNorm(latent.latent_dim, _NORM_EPS)
        self.k_up_proj = HeadLinear(heads, latent.nope_dim, latent.latent_dim)
        self.v_up_proj = HeadLinear(heads, latent.latent_dim, latent.value_dim)
        self.o_proj = Linear(heads * latent.value_dim, hidden, latent.bias)
        self.attention = LatentAttention(heads, latent.latent_dim, latent.rope_dim, scale=latent.scale)

    def forward(self, x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
        """Return attention over x [T, hidden]: [T, hidden]."""
        sizes, heads = self.sizes, self.num_heads
        row = self.kv_a_proj_with_mqa(x)
        latent, rope = row[:, : sizes.latent_dim], row[:, sizes.latent_dim :]
        rope = apply_rope(rope.view(-1, 1, sizes.rope_dim), cos_sin, interleaved=sizes.interleaved)
        if sizes.query_rank:
            x = self.q_a_layernorm(self.q_a_proj(x))
        q = self.k_up_proj(self.q_nope_proj(x).view(-1, heads, sizes.nope_dim))
        q_rope = self.q_rope_proj(x).view(-1, heads, sizes.rope_dim)
        q_rope = apply_rope(q_rope, cos_sin, interleaved=sizes.interleaved)
        y = self.attention(q, q_rope, self.kv_a_layernorm(latent), rope.view(-1, sizes.rope_dim), batch)
        return self.o_proj(self.v_up_proj(y).view(-1, heads * sizes.value_dim))


def latent_sources(network: nn.Module) -> dict[str, Source | tuple[Source, ...]]:
    """Return where the parameters of LatentHeads come from: the checkpoint's q_proj or q_b_proj, and kv_b_proj."""
    table: dict[str, Source | tuple[Source, ...]] = {}
    for path, layer in network.named_modules():
        if not isinstance(layer, LatentHeads):
            continue
        sizes = layer.sizes
        if not table:  # the queries of all layers
            fused = "q_b_proj" if sizes.query_rank else "q_proj"
            table |= fused_rows(network, fused, ("q_nope_proj", "q_rope_proj"), layer.num_heads)
        each, stored = sizes.nope_dim + sizes.value_dim, f"{path}.kv_b_proj.weight"
        starts = range(0, layer.num_heads * each, each)
        table[f"{path}.k_up_proj.weight"] = tuple(
            Source(stored, ((start, start + sizes.nope_dim),), rows_transposed=True) for start in starts
        )
        values = tuple((start + sizes.nope_dim, start + each) for start in starts)
        table[f"{path}.v_up_proj.weight"] = Source(stored, values)
    return table
