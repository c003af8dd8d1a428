"""InternLM 2 and 2.5 (arXiv 2403.17297): Llama whose q, k and v lie in one tensor, group by group, with own names."""

from __future__ import annotations

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.published.internlm import read_internlm
from penstock.models.sources import fused_rows, renamed

__all__ = ["Config", "Network"]

_NAMES = (
    ("embed_tokens.", "tok_embeddings."),
    ("lm_head.", "output."),
    ("self_attn.o_proj.", "attention.wo."),
    ("self_attn.", "attention."),
    ("mlp.gate_proj.", "feed_forward.w1."),
    ("mlp.up_proj.", "feed_forward.w3."),
    ("mlp.down_proj.", "feed_forward.w2."),
    ("input_layernorm.", "attention_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
)


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
        return read_internlm(reader, key)


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows])

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: each group has its queries, then its key and its value."""
        table = fused_rows(self, "wqkv", ("q_proj", "k_proj", "v_proj"), self.config.num_kv_heads)
        return renamed(self, table, _NAMES)
