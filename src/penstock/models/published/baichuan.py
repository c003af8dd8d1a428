"""Baichuan 1 and 2 (arXiv 2309.10305): Llama with q, k and v in one tensor; the 13B form has ALiBi.

Baichuan 2 divides every row of its output head by the row's length.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.sources import fused_rows
from penstock.nn import Attention
from penstock.nn.attention import alibi_slopes

__all__ = ["Config", "Network"]

_VOCAB_SIZE_2: Final = 125696
"""The vocabulary of Baichuan 2: its folders differ from those of Baichuan 1 in nothing else."""


@dataclass(frozen=True)
class BaichuanConfig(DecoderConfig):
    """The sizes of the network.  ``unit_head``: the rows of the output head are divided by their lengths."""

    alibi: bool = False
    unit_head: bool = False


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> BaichuanConfig:
        """Read and check config.json; errors name the key.

        The two forms have the same model_type.  Only the folders with rotary positions have max_position_embeddings.
        """
        config = read_decoder(reader, (0,) * read_num_layers(reader), context_len=4096)
        if config.num_kv_heads != config.num_heads:
            expected = f"num_attention_heads ({config.num_heads})"
            raise reader.error("num_key_value_heads", expected, config.num_kv_heads)
        values = {field.name: getattr(config, field.name) for field in fields(config)}
        alibi = not reader.has("max_position_embeddings")
        if alibi:
            values["context_len"] = reader.int("model_max_length", 4096)
        return BaichuanConfig(**values, alibi=alibi, unit_head=config.vocab_size == _VOCAB_SIZE_2)


class AlibiAttention(LlamaAttention):
    """Llama's attention with ALiBi instead of rotary positions."""

    def __init__(self, config: DecoderConfig, window: int) -> None:
        super().__init__(config, window, rope=False)
        slopes = alibi_slopes(self.num_heads)
        self.attention = Attention(self.num_heads, self.num_kv_heads, self.head_dim, window=window, slopes=slopes)


class Network(CausalLM):
    """The language model."""

    unread_tensors = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: BaichuanConfig) -> None:
        attention = AlibiAttention if config.alibi else LlamaAttention
        super().__init__(config, [attention(config, window) for window in config.windows])
        self.unit_head = config.unit_head

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: q, k and v lie in one tensor."""
        table = fused_rows(self, "W_pack", ("q_proj", "k_proj", "v_proj"))
        if self.unit_head:
            table["lm_head.weight"] = Source("lm_head.weight", unit_rows=True)
        return table
