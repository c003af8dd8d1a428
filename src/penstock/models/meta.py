"""Construct a checkpoint's network without its weights, on the meta device, for capture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from penstock.checkpoint.sources import has_own_names
from penstock.config import ConfigReader
from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.models.families import network_type
from penstock.models.network_script import script_errors
from penstock.models.registry import Definition, find_network, load_network_script, supported_types
from penstock.nn.base import nn, torch

__all__ = ["MetaNetwork", "construct_on_meta"]


class MetaNetwork(NamedTuple):
    """A network whose parameters are on the meta device, and the sizes that capture needs.

    ``script`` is the file of a user's own network, and None for a class of this package.  ``is_named``: the user named
    a file with the network's class, which may be one of this package that the file has changed.
    """

    network: nn.Module
    name: str
    context_len: int
    vocab_size: int
    script: Path | None = None
    is_named: bool = False

    @property
    def is_built_in(self) -> bool:
        """True for a network of this package, as it is."""
        return not self.is_named and type(self.network).__module__.startswith("penstock.")


def construct_on_meta(reader: ConfigReader, script: str | None = None) -> MetaNetwork:
    """Construct the network of config.json's model_type, or the class that ``script`` ("file.py:Class") names.

    Raises UnsupportedError for an unknown model_type, InvalidFileError for sizes that a layer refuses and for an error
    in the script, and InvalidArgumentError for an invalid script.
    """
    definition = load_network_script(script) if script is not None else _network_of_type(reader)
    if reader.has_mxfp4() and not getattr(definition.Network, "reads_mxfp4", False) and not has_own_names(reader):
        raise UnsupportedError(
            f"{reader.file}: quantization_config: quant_method 'mxfp4' is not supported for model_type "
            f"{reader.str('model_type', definition.Network.__name__)}. Use the original float32, float16 or bfloat16 "
            "checkpoint, and quantize it with --scheme w8a8 or w4a8.",
            param="quantization_config",
        )
    name = reader.str("model_type", definition.Network.__name__)
    path = _script_of(definition)
    with script_errors(path):
        config = definition.Config.read(reader)
        try:
            with torch.device("meta"):
                network = definition.Network(config)
        except InvalidArgumentError as error:  # from a layer, whose sizes come from the config
            raise InvalidFileError(f"{reader.file}: {error}", param=error.param) from error
    for field in ("context_len", "vocab_size"):
        if not isinstance(getattr(config, field, None), int):
            raise InvalidArgumentError(f"network {name}: expected a config with an integer {field}, got none")
    return MetaNetwork(network.eval(), name, config.context_len, config.vocab_size, path, script is not None)


def _network_of_type(reader: ConfigReader) -> Definition:
    """Return the network of config.json's model_type; InvalidFileError for a config without one."""
    if reader.values.get("model_type") is None:
        raise InvalidFileError(
            f"{reader.file}: model_type: expected one of {', '.join(supported_types())}, but the key is missing; for a "
            "network of your own add --network FILE.py:CLASS (in Python: network=)",
            param="model_type",
        )
    reader.str("model_type")  # an error unless it is a string
    return find_network(network_type(reader.values))


def _script_of(definition: Definition) -> Path | None:
    """Return the file of a user's network; None for a built-in one, and for one that has no file."""
    module = definition.Network.__module__
    path = getattr(sys.modules.get(module), "__file__", None)
    return None if path is None or module.startswith("penstock.") else Path(path)
