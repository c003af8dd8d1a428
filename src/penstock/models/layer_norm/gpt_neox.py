"""GPT-NeoX and Pythia (arXiv 2204.06745): parallel branches with a norm each, and partly rotary heads."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.layer_norm.parts import read_gelu, read_sizes
from penstock.models.layer_norm.stacked import StackedConfig, StackedNetwork
from penstock.models.sources import fused_rows, renamed

__all__ = ["Config", "Network"]

_NAMES = (
    ("layers.", "gpt_neox.layers."),
    ("embed_tokens.", "gpt_neox.embed_in."),
    ("final_norm.", "gpt_neox.final_layer_norm."),
    ("lm_head.", "embed_out."),
    ("self_attn.o_proj.", "attention.dense."),
    ("self_attn.", "attention."),
    ("mlp_layernorm.", "post_attention_layernorm."),
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
            gelu_form=read_gelu(reader, "hidden_act", "gelu"),
            tied=False,
            context_len=2048,
            keys={"num_key_value_heads": ""},
        )
        share, theta = reader.float("rotary_pct", 0.25, max=1.0), reader.float("rotary_emb_base", 10000.0, min=1.0)
        return StackedConfig(
            sizes,
            rope=reader.rope(sizes.head_dim, theta=theta, rotary_share=share),
            groups=sizes.num_heads,
            parallel=reader.bool("use_parallel_residual", True),
            attention_bias=reader.bool("attention_bias", True),
        )


class Network(StackedNetwork):
    """The language model."""

    unread_tensors = ("*.attention.bias", "*.attention.masked_bias", "*.attention.rotary_emb.inv_freq")
    other_prefixes = (("embed_out.", "lm_head."),)

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: q, k and v of a head lie together, and names differ."""
        table = fused_rows(self, "query_key_value", ("q_proj", "k_proj", "v_proj"), self.config.groups)
        return renamed(self, table, _NAMES)
