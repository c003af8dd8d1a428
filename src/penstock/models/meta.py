"""A checkpoint's network without its weights, ready to be captured."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from penstock.config import ConfigReader
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.models.registry import find_network, load_network_script

__all__ = ["MetaNetwork", "construct_on_meta"]


class MetaNetwork(NamedTuple):
    """A network whose parameters are on the meta device, and the figures that capture wants."""

    network: nn.Module
    name: str
    context_len: int
    vocab_size: int


def construct_on_meta(reader: ConfigReader, script: str | None = None) -> MetaNetwork:
    """The network that config.json's model_type names, or the class of ``script`` ("file.py:Class").

    Raises UnsupportedError for a model_type that there is no network for, InvalidFileError for sizes that no network
    has, InvalidArgumentError for a bad script.
    """
    definition = load_network_script(script) if script is not None else find_network(reader.str("model_type"))
    name = reader.str("model_type", definition.Network.__name__)
    config = definition.Config.read(reader)
    try:
        with torch.device("meta"):
            network = definition.Network(config)
    except InvalidArgumentError as error:  # of a layer, whose sizes come from the config
        raise InvalidFileError(f"{reader.file}: {error}") from None
    for figure in ("context_len", "vocab_size"):
        if not isinstance(getattr(config, figure, None), int):
            raise InvalidArgumentError(f"network {name}: expected a config with an integer {figure}, found none")
    return MetaNetwork(network.eval(), name, config.context_len, config.vocab_size)
