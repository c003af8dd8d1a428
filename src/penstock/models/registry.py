"""Find the network of a model_type: in the files of the subfolders, or among those that the user registered."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.config import show
from penstock.errors import InvalidArgumentError, UnsupportedError
from penstock.extras import install_command
from penstock.models.families import built_in_families, family_modules
from penstock.models.network_script import run_network_script, split_spec
from penstock.nn.base import HAS_TORCH, nn
from penstock.validation import refusal

__all__ = [
    "Definition",
    "find_network",
    "load_network_script",
    "register_network",
    "registered_script",
    "supported_types",
]


@dataclass(frozen=True)
class Definition:
    """A network as a file of a subfolder defines it; ``Network(Config.read(reader))`` constructs it.

    The config has at least ``vocab_size`` and ``context_len``.  Errors of ``Config.read`` name the file and the key.
    """

    Config: Any
    Network: type[nn.Module]


_registered: dict[str, Definition] = {}


def supported_types() -> list[str]:
    """Return every model_type that ``find_network`` knows, sorted."""
    return sorted({*built_in_families(), *_registered})


def find_network(model_type: str) -> Definition:
    """Return the network of a model_type; UnsupportedError lists the supported types."""
    if model_type in _registered:
        return _registered[model_type]
    if model_type not in supported_types():
        raise UnsupportedError(
            f"model_type: expected one of {', '.join(supported_types())}, got {show(model_type)}; "
            "use --network or penstock.register_network for a network of your own",
            param="model_type",
        )
    module = importlib.import_module(family_modules()[model_type])
    return Definition(module.Config, module.Network)


def register_network(model_type: str, network_class: type[nn.Module], config_class: Any = None) -> None:
    """Register ``network_class`` as the network of checkpoints whose config.json has this ``model_type``.

    ``config_class.read(reader)`` returns the argument that the class is constructed with; the default is the class's
    own ``Config``.  Registering a type again replaces its network.
    """
    config_class = config_class or getattr(network_class, "Config", None)
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise refusal("network_class", "a subclass of torch.nn.Module", network_class)
    if not callable(getattr(config_class, "read", None)):
        raise InvalidArgumentError(
            f"config_class: expected a class with read(reader), or a class Config inside {network_class.__name__}",
            param="config_class",
        )
    _registered[model_type] = Definition(config_class, network_class)


def registered_script(model_type: str) -> str | None:
    """Return where another process can import a registered network, "file.py:Class"; None for an unregistered type.

    Capture runs in a child process, which does not know the registrations of this one.  Raises UnsupportedError for a
    class that is not defined at the top level of a file together with its config.
    """
    definition = _registered.get(model_type)
    if definition is None:
        return None
    network_class = definition.Network
    module = sys.modules.get(network_class.__module__)
    path = getattr(module, "__file__", None)
    config_class = getattr(network_class, "Config", None) or getattr(module, "Config", None)
    is_importable = (
        getattr(module, network_class.__qualname__, None) is network_class and config_class is definition.Config
    )
    if path is None or not is_importable:
        raise UnsupportedError(
            f"model_type {model_type}: graph mode captures a registered network from its file: expected a class at the "
            f"top level of a .py file, with a class Config inside or beside it, got "
            f"{network_class.__module__}.{network_class.__qualname__}. Use eager mode, or move the class to a file.",
            param="model_type",
        )
    return f"{Path(path).resolve()}:{network_class.__qualname__}"


def load_network_script(spec: str) -> Definition:
    """Import the file of ``"path/my_net.py:Net"``, which the user named, and return the network of its class ``Net``.

    A class ``Config`` is inside the network class or beside it.  Raises FileAccessError, InvalidArgumentError, or
    UnsupportedError without PyTorch.
    """
    path, class_name = split_spec(spec)
    if not HAS_TORCH:
        raise UnsupportedError(
            f"--network: {path}: a network of your own requires PyTorch. Run `{install_command('torch')}`.",
            param="network",
        )
    module = run_network_script(path, class_name)
    network_class = getattr(module, class_name, None)
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise InvalidArgumentError(
            f"--network: {path}: expected a torch.nn.Module named {class_name}, got none", param="network"
        )
    config_class = getattr(network_class, "Config", None) or getattr(module, "Config", None)
    if not callable(getattr(config_class, "read", None)):
        raise InvalidArgumentError(
            f"--network: {path}: expected a class Config with read(reader), got none", param="network"
        )
    return Definition(config_class, network_class)
