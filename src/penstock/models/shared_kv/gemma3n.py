"""Gemma 3n from a folder with models of images and audio: only the language model, for text."""

from __future__ import annotations

from penstock.checkpoint.sources import Source
from penstock.config import ConfigReader
from penstock.models.shared_kv.gemma3n_text import Config as TextConfig
from penstock.models.shared_kv.gemma3n_text import Gemma3nConfig
from penstock.models.shared_kv.gemma3n_text import Network as TextNetwork
from penstock.models.shared_kv.parts import OTHER_INPUTS, beside_images, text_section

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma3nConfig:
        """Read and check text_config of config.json; errors name the key."""
        return TextConfig.read(text_section(reader))


class Network(TextNetwork):
    """The language model."""

    def __init__(self, config: Gemma3nConfig) -> None:
        super().__init__(config)
        self.unread_tensors = (*self.unread_tensors, *OTHER_INPUTS)

    def tensor_sources(self) -> dict[str, Source]:
        """Return where the parameters come from: the language model is a part of the folder's."""
        return beside_images(self, super().tensor_sources())
