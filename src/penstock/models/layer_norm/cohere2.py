"""Command R7B and A (Cohere): windowed layers with rotary positions, and full layers without positions."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.errors import UnsupportedError
from penstock.models.layer_norm.cohere import CohereConfig, CohereLM, read_cohere
from penstock.models.layer_windows import read_layer_windows

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> CohereConfig:
        """Read and check config.json; errors name the key."""
        if reader.bool("use_qk_norm", False):
            raise UnsupportedError(f"{reader.file}: use_qk_norm: expected false, got true", param="use_qk_norm")
        windows = read_layer_windows(reader, window=4096, period=4)
        return read_cohere(reader, windows, [window > 0 for window in windows], 10000.0)


class Network(CohereLM):
    """The language model."""
