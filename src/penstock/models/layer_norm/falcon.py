"""Falcon (arXiv 2311.16867): rotary positions, and parallel branches with one norm (7B) or two (40B); RW has ALiBi.

In ALiBi the sum of score and bias is divided by sqrt(head_dim), so a slope is, too.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.layer_norm.parts import read_gelu, read_sizes
from penstock.models.layer_norm.stacked import StackedConfig, StackedNetwork
from penstock.models.sources import fused_rows, renamed
from penstock.nn.attention import alibi_slopes

__all__ = ["Config", "Network"]

_KEYS = {"intermediate_size": "ffn_hidden_size", "layer_norm_eps": "layer_norm_epsilon", "num_key_value_heads": ""}
_NAMES = (
    ("layers.", "transformer.h."),
    ("embed_tokens.", "transformer.word_embeddings."),
    ("final_norm.", "transformer.ln_f."),
    ("self_attn.o_proj.", "self_attention.dense."),
    ("self_attn.", "self_attention."),
    ("mlp.up_proj.", "mlp.dense_h_to_4h."),
    ("mlp.down_proj.", "mlp.dense_4h_to_h."),
)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> StackedConfig:
        """Read and check config.json; errors name the key."""
        sizes = read_sizes(
            reader,
            gelu_form=read_gelu(reader, "activation", "gelu"),
            tied=True,
            context_len=2048,
            bias=reader.bool("bias", False),
            keys=_KEYS,
        )
        is_new, parallel = reader.bool("new_decoder_architecture", False), reader.bool("parallel_attn", True)
        num_norms = reader.int("num_ln_in_parallel_attn", 2 if is_new else 1, max=2)
        if is_new and not parallel:
            raise reader.error("parallel_attn", "true with new_decoder_architecture", False)
        if num_norms == 2 and not is_new and parallel:
            raise reader.error("num_ln_in_parallel_attn", "1 without new_decoder_architecture", 2)
        if is_new:
            sizes = replace(sizes, num_kv_heads=reader.int("num_kv_heads", sizes.num_heads))
        elif reader.bool("multi_query", True):
            sizes = replace(sizes, num_kv_heads=1)
        if sizes.num_heads % sizes.num_kv_heads:
            raise reader.error("num_kv_heads", f"a divisor of {sizes.num_heads} heads", sizes.num_kv_heads)
        slopes: tuple[float, ...] = ()
        if reader.bool("alibi", False):
            slopes = tuple(slope * sizes.head_dim**-0.5 for slope in alibi_slopes(sizes.num_heads))
        return StackedConfig(
            sizes,
            rope=None if slopes else reader.rope(sizes.head_dim),
            slopes=slopes,
            groups=sizes.num_kv_heads,
            parallel=parallel,
            one_norm=parallel and num_norms == 1,
            attention_bias=sizes.bias,
        )


class Network(StackedNetwork):
    """The language model."""

    tensor_prefix = "transformer."
    unread_tensors = ("*.self_attention.rotary_emb.inv_freq",)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: q, k and v of a group lie together, and names differ."""
        table = fused_rows(self, "query_key_value", ("q_proj", "k_proj", "v_proj"), self.config.groups)
        if self.config.parallel and not self.config.one_norm:
            norms = [("input_layernorm.", "ln_attn."), ("mlp_layernorm.", "ln_mlp.")]
        else:
            norms = [("mlp_layernorm.", "post_attention_layernorm.")]
        return renamed(self, table, [*_NAMES, *norms])
