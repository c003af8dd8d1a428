"""OLMo 3: OLMo 2 with a sliding window in three of four layers."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers, windows_by_type
from penstock.models.decoders.olmo2 import Network

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        kinds = [
            "full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(read_num_layers(reader))
        ]
        windows = windows_by_type(reader, reader.int("sliding_window", 4096), kinds)
        return read_decoder(reader, windows, context_len=2048, norm_eps=1e-5, theta=500000.0)
