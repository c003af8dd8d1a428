"""UMT5 (Chung et al., arXiv 2304.09151): T5 1.1 with a bias by distance in each layer."""

from __future__ import annotations

from penstock.config import ConfigReader
from penstock.models.encoder_decoder import t5

__all__ = ["Config", "Network"]


class Config:
    """Reads config.json."""

    @staticmethod
    def read(reader: ConfigReader) -> t5.T5Config:
        """Read and check config.json; errors name the key."""
        return t5.read_t5(reader, "UMT5", feed_forward="gated-gelu", each_layer_has_bias=True)


class Network(t5.Network):
    """An encoder with a decoder and an output head, or a bare encoder."""

    unread_tensors = ()
