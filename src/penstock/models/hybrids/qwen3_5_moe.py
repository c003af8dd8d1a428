"""Qwen3.5 with experts from a folder with a vision model: only the language model, for text."""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.hybrids.delta import beside_images, text_section
from penstock.models.hybrids.qwen3_5_moe_text import Config as TextConfig
from penstock.models.hybrids.qwen3_5_moe_text import Network as TextNetwork
from penstock.models.hybrids.qwen3_next import Qwen3NextConfig

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Qwen3NextConfig:
        """Read and check text_config of config.json; errors name the key."""
        return TextConfig.read(text_section(reader))


class Network(TextNetwork):
    """The language model."""

    unread_tensors = ("mtp.*", "model.visual.*")

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the language model is a part of the folder's."""
        return beside_images(self)
