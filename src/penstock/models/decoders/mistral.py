"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.decoder import DecoderConfig, read_decoder, read_num_layers
from penstock.models.decoders.llama import Network

__all__ = ["Config", "Network"]

_DEFAULT_WINDOW = 4096  # when the key is missing; null means no window


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> DecoderConfig:
        """Read and check config.json; errors name the key."""
        window = reader.int("sliding_window", _DEFAULT_WINDOW)
        if "sliding_window" in reader.values and not reader.has("sliding_window"):
            window = 0
        return read_decoder(reader, (window,) * read_num_layers(reader), context_len=2048)
