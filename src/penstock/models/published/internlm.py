"""InternLM 1: Llama, in the 7B form with biases in its attention."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import LlamaAttention

__all__ = ["Config", "Network", "fixed_rope", "read_internlm"]


def fixed_rope(reader: ConfigReader, key: str) -> ConfigReader:
    """Return the values with dynamic scaling of rotary positions, under ``key``, replaced by positions as they are.

    Dynamic scaling changes angles only behind max_position_embeddings, where the context ends.
    """
    section, values = reader.object(key), dict(reader.values)
    if section is not None:
        kind_key = "rope_type" if section.has("rope_type") else "type"
        if section.one_of(kind_key, ("default", "dynamic", "linear"), "default") == "dynamic":
            section.float("factor", 1.0, min=1.0)
            values[key] = {name: section.values[name] for name in ("rope_theta",) if name in section.values}
    return ConfigReader(values, reader.file)


def read_internlm(reader: ConfigReader, rope_key: str) -> DecoderConfig:
    """Read and check config.json; errors name the key.  ``rope_key`` is that of the scaling of rotary positions."""
    config = read_decoder(fixed_rope(reader, rope_key), (0,) * read_num_layers(reader), context_len=2048)
    return replace(config, attention_bias=reader.bool("bias", True))


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        rotary = reader.object("rotary")
        if rotary is None:
            return read_internlm(reader, "rope_scaling")
        for name in rotary.values:
            if name not in ("base", "type", "factor"):
                raise rotary.error(name, "base, type and factor", rotary.values[name])
        scaling = {key: rotary.values[key] for key in ("type", "factor") if key in rotary.values}
        values = {**reader.values, "rope_theta": rotary.float("base", 10000.0, min=1.0), "rope_scaling": scaling}
        return read_internlm(ConfigReader(values, reader.file), "rope_scaling")


class Network(CausalLM):
    """The language model."""

    unread_tensors = ("*.rotary_emb.inv_freq",)

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config, [LlamaAttention(config, window) for window in config.windows])
