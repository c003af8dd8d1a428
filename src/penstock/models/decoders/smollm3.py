"""SmolLM 3: Llama with layers that have no rotary positions, one in four unless the config lists them."""

from __future__ import annotations

from dataclasses import replace

from penstock.config import ConfigReader
from penstock.models.decoder import CausalLM, DecoderConfig, read_decoder, read_num_layers, windows_by_type
from penstock.models.decoders.llama import LlamaAttention

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        num_layers = read_num_layers(reader)
        rope_layers = reader.int_or_list("no_rope_layers", max=1)  # 1 in a layer that has rotary positions
        if not rope_layers:
            interval = reader.int("no_rope_layer_interval", 4)
            rope_layers = tuple(int((layer + 1) % interval != 0) for layer in range(num_layers))
        if len(rope_layers) < num_layers:
            raise reader.error("no_rope_layers", f"an entry for each of {num_layers} layers", len(rope_layers))
        uses_window = reader.bool("use_sliding_window", False)
        window = (reader.optional_int("sliding_window") or 0) if uses_window else 0
        kinds = ["full_attention" if has_rope else "sliding_attention" for has_rope in rope_layers[:num_layers]]
        windows = windows_by_type(reader, window, kinds)
        config = read_decoder(reader, windows, context_len=32768, theta=2000000.0, tied=True)
        if "num_key_value_heads" not in reader.values:
            config = replace(config, num_kv_heads=4)
        return replace(config, rope_layers=tuple(bool(layer) for layer in rope_layers[:num_layers]))


class Network(CausalLM):
    """The language model."""

    def __init__(self, config: DecoderConfig) -> None:
        layers = zip(config.windows, config.rope_layers, strict=True)
        super().__init__(config, [LlamaAttention(config, window, rope=rope) for window, rope in layers])
