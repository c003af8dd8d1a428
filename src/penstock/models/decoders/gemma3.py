"""Gemma 3 from a folder with a model of images: only the language model, for text.

Folders have the names of the first release (``language_model.model.layers``) or those that transformers 5 has in memory
(``model.language_model.layers``).  text_config may leave out sizes, which are then transformers' defaults.
"""

from __future__ import annotations

from penstock.checkpoint.sources import Sources
from penstock.config import ConfigReader
from penstock.models.decoders.gemma2 import Gemma2Config
from penstock.models.decoders.gemma3_text import Config as TextConfig
from penstock.models.decoders.gemma3_text import Network as TextNetwork
from penstock.models.families import DEFAULT_SIZES
from penstock.models.shared_kv.parts import text_section
from penstock.models.sources import add_to_norms, renamed

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> Gemma2Config:
        """Read and check text_config of config.json; errors name the key."""
        section = text_section(reader)
        return TextConfig.read(ConfigReader({**DEFAULT_SIZES["gemma3"], **section.values}, section.file))


class Network(TextNetwork):
    """The language model."""

    unread_tensors = ("*vision_tower.*", "*multi_modal_projector.*")
    other_prefixes = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."))

    def tensor_sources(self) -> Sources:
        """Return where the parameters come from: the language model is a part of the folder's."""
        names = [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")]
        return renamed(self, add_to_norms(self), names)
