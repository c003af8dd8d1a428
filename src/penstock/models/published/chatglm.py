"""ChatGLM 2 and 3, and GLM-4-9B with its original code: glm's network under other names of keys and tensors.

Half of each head turns, in adjacent pairs; q, k and v lie in one tensor, and so do gate and up.
"""

from __future__ import annotations

from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, RopeConfig, show
from penstock.errors import UnsupportedError
from penstock.models.decoder import MAX_LAYERS, CausalLM, DecoderConfig
from penstock.models.decoders.glm import GlmAttention
from penstock.models.sources import fused_rows, renamed

__all__ = ["Config", "Network"]

_NAMES: Final = (
    ("model.layers.", "transformer.encoder.layers."),
    ("model.embed_tokens.", "transformer.embedding.word_embeddings."),
    ("model.norm.", "transformer.encoder.final_layernorm."),
    ("lm_head.", "transformer.output_layer."),
    ("self_attn.o_proj.", "self_attention.dense."),
    ("self_attn.", "self_attention."),
    ("mlp.down_proj.", "mlp.dense_4h_to_h."),
)
_FIXED: Final = {
    "rmsnorm": True,
    "post_layer_norm": True,
    "original_rope": True,
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "position_encoding_2d": False,
    "prefix_projection": False,
}
"""Switches that have one supported value, which is also the default."""


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        for key, expected in _FIXED.items():
            if reader.bool(key, expected) is not expected:
                actual = show(not expected)
                raise UnsupportedError(f"{reader.file}: {key}: expected {show(expected)}, got {actual}", param=key)
        for key in ("pre_seq_len", "quantization_bit"):
            if reader.int(key, 0, min=0):
                raise reader.error(key, "0 or null", reader.values[key])
        hidden_size, num_heads = reader.int("hidden_size"), reader.int("num_attention_heads")
        head_dim = reader.int("kv_channels", hidden_size // num_heads)
        num_kv_heads = num_heads
        if reader.bool("multi_query_attention", False):
            num_kv_heads = reader.int("multi_query_group_num", 1)
        if num_heads % num_kv_heads:
            raise reader.error("multi_query_group_num", f"a divisor of {num_heads} heads", num_kv_heads)
        if head_dim % 4 or head_dim > 1024:
            raise reader.error("kv_channels", "a multiple of 4, at most 1024", head_dim)
        return DecoderConfig(
            vocab_size=reader.int("padded_vocab_size" if reader.has("padded_vocab_size") else "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.int("ffn_hidden_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            context_len=reader.int("seq_length", 2048),
            norm_eps=reader.float("layernorm_epsilon", 1e-5),
            rope=RopeConfig(theta=10000.0 * reader.float("rope_ratio", 1.0, min=1e-3), rotary_dim=head_dim // 2),
            tied=reader.bool("tie_word_embeddings", False),
            attention_bias=reader.bool("add_qkv_bias", False),
            mlp_bias=False,
            windows=(0,) * reader.int("num_layers", max=MAX_LAYERS),
        )


class Network(CausalLM):
    """The language model."""

    unread_tensors = ("transformer.rotary_pos_emb.inv_freq",)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [GlmAttention(config, window) for window in config.windows])

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that the checkpoint stores in fused tensors, under other names."""
        table = fused_rows(self, "query_key_value", ("q_proj", "k_proj", "v_proj"))
        return renamed(self, table | fused_rows(self, "dense_h_to_4h", ("gate_proj", "up_proj")), _NAMES)
