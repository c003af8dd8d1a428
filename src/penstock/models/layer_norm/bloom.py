"""BLOOM (arXiv 2211.05100): ALiBi instead of position embeddings, and a norm behind the embedding."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.layer_norm.parts import read_sizes
from penstock.models.layer_norm.stacked import StackedConfig, StackedNetwork
from penstock.models.sources import fused_rows, renamed
from penstock.nn.attention import alibi_slopes

__all__ = ["Config", "Network"]

_NAMES = (
    ("layers.", "transformer.h."),
    ("embed_tokens.", "transformer.word_embeddings."),
    ("embed_norm.", "transformer.word_embeddings_layernorm."),
    ("final_norm.", "transformer.ln_f."),
    ("self_attn.o_proj.", "self_attention.dense."),
    ("self_attn.", "self_attention."),
    ("mlp_layernorm.", "post_attention_layernorm."),
    ("mlp.up_proj.", "mlp.dense_h_to_4h."),
    ("mlp.down_proj.", "mlp.dense_4h_to_h."),
)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> StackedConfig:
        """Read and check config.json; errors name the key."""
        key = "apply_residual_connection_post_layernorm"
        if reader.bool(key, False):
            raise UnsupportedError(f"{reader.file}: {key}: expected false, got true", param=key)
        keys = {
            "hidden_size": "n_embed" if reader.has("n_embed") else "hidden_size",
            "num_hidden_layers": "n_layer" if reader.has("n_layer") else "num_hidden_layers",
            "num_attention_heads": "n_head" if reader.has("n_head") else "num_attention_heads",
            "max_position_embeddings": "seq_length",
            "intermediate_size": "n_inner",
            "layer_norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "",
        }
        sizes = read_sizes(reader, gelu_form="tanh", tied=True, context_len=2048, keys=keys)
        slopes = tuple(alibi_slopes(sizes.num_heads))
        return StackedConfig(sizes, slopes=slopes, groups=sizes.num_heads, embedding_norm=True)


class Network(StackedNetwork):
    """The language model."""

    tensor_prefix = "transformer."

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: q, k and v of a head lie together, and names differ."""
        table = fused_rows(self, "query_key_value", ("q_proj", "k_proj", "v_proj"), self.config.groups)
        return renamed(self, table, _NAMES)
