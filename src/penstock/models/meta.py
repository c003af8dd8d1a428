"""Construct a checkpoint's network without its weights, on PyTorch's meta device, for capture."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from penstock.config import ConfigReader
from penstock.errors import InvalidArgumentError, InvalidFileError
from penstock.models.registry import find_network, load_network_script

__all__ = ["MetaNetwork", "construct_on_meta"]


class MetaNetwork(NamedTuple):
    """A network whose parameters are on the meta device, and the sizes that capture needs."""

    network: nn.Module
    name: str
    context_len: int
    vocab_size: int


def construct_on_meta(reader: ConfigReader, script: str | None = None) -> MetaNetwork:
    """Construct the network of config.json's model_type, or the class that ``script`` ("file.py:Class") names.

    Raises UnsupportedError for an unknown model_type, InvalidFileError for sizes that a layer refuses, and
    InvalidArgumentError for an invalid script.
    """
    if script is None and not reader.has("model_type"):
        raise InvalidFileError(
            f"{reader.file}: model_type is missing, so the network is unknown. To run your own network, pass "
            "--network FILE.py:CLASS or network='FILE.py:CLASS'."
        )
    definition = load_network_script(script) if script is not None else find_network(reader.str("model_type"))
    name = reader.str("model_type", definition.Network.__name__)
    config = definition.Config.read(reader)
    try:
        with torch.device("meta"):
            network = definition.Network(config)
    except InvalidArgumentError as error:  # from a layer, whose sizes come from the config
        raise InvalidFileError(f"{reader.file}: {error}") from None
    for field in ("context_len", "vocab_size"):
        if not isinstance(getattr(config, field, None), int):
            raise InvalidArgumentError(f"network {name}: expected a config with an integer {field}, found none")
    return MetaNetwork(network.eval(), name, config.context_len, config.vocab_size)
