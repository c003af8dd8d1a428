"""Phi-3, 3.5 and 4, and Phi-4-mini: Llama whose checkpoints store q, k and v as one tensor, and gate and up as one.

Rotary positions may turn a part of each head (partial_rotary_factor).  The reference chooses longrope's table by the
length of a text.  Here one table serves every request, because a request's tokens must not depend on its final length.
The key ``planned_context_len`` of config.json chooses it: the long table if it is more than
original_max_position_embeddings.  Without the key it is the short table, and the context ends where that does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader, is_number, show
from penstock.errors import UnsupportedError
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention
from penstock.models.sources import fused_rows

__all__ = ["Config", "Network"]

_LONGROPE: Final = ("longrope", "su", "yarn")  # the older names of longrope in this family
_ROPE_KEYS: Final = ("rope_theta", "partial_rotary_factor")
_PLANNED: Final = "planned_context_len"
_ORIGINAL: Final = "original_max_position_embeddings"
_LONGROPE_KEYS: Final = (
    *_ROPE_KEYS, _ORIGINAL, "rope_type", "type", "factor", "attention_factor", "short_factor", "long_factor",
)  # fmt: skip


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        windows = (reader.optional_int("sliding_window") or 0,) * read_num_layers(reader)
        key = "rope_scaling" if reader.has("rope_scaling") else "rope_parameters"
        section = reader.object(key)
        if section is None or section.values.get("rope_type", section.values.get("type")) not in _LONGROPE:
            return read_decoder(reader, windows, context_len=4096, norm_eps=1e-5)
        kept = {name: section.values[name] for name in _ROPE_KEYS if name in section.values}
        plain = ConfigReader(reader.values | {key: kept}, reader.file)
        return _with_table(section, read_decoder(plain, windows, context_len=4096, norm_eps=1e-5), reader)


def _with_table(section: ConfigReader, config: DecoderConfig, reader: ConfigReader) -> DecoderConfig:
    """Return the config with the table of longrope for the planned context, and with that context."""
    outer = section if section.has(_ORIGINAL) else reader
    original = outer.int(_ORIGINAL, 4096, min=2)
    planned = reader.int(_PLANNED, original, max=config.context_len)
    key = "long_factor" if planned > original else "short_factor"
    divisors, num_pairs = section.values.get(key), config.rope.rotary_dim // 2
    if (
        not isinstance(divisors, list)
        or len(divisors) != num_pairs
        or not all(is_number(value, 1e-6, 1e6) for value in divisors)
    ):
        raise section.error(key, f"a list of {num_pairs} numbers above 0", divisors)
    unknown = next((name for name in section.values if name not in _LONGROPE_KEYS), None)
    if unknown is not None:
        raise UnsupportedError(f"{section.file}: the key {show(unknown)} is not supported", param=unknown)
    factor = section.float("factor", config.context_len / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    rope = replace(
        config.rope,
        type="longrope",
        divisors=tuple(float(value) for value in divisors),
        attention_factor=section.float("attention_factor", default),
    )
    return replace(config, rope=rope, context_len=min(planned, config.context_len))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows])

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from that the checkpoint stores in fused tensors."""
        attention = fused_rows(self, "qkv_proj", ("q_proj", "k_proj", "v_proj"))
        return attention | fused_rows(self, "gate_up_proj", ("gate_proj", "up_proj"))
