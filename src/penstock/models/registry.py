"""Which network a model_type means: the files of this folder, and what the user registered."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from torch import nn

from penstock.config import ConfigReader, show
from penstock.errors import FileAccessError, InvalidArgumentError, UnsupportedError
from penstock.models.network_script import run_network_script

__all__ = [
    "Definition",
    "find_network",
    "load_network_script",
    "register_network",
    "registered_script",
    "supported_types",
]

# A file of this folder is a network's when it defines or re-exports a class Network.
_DEFINES_NETWORK: Final = re.compile(r"^(class Network\(|from penstock\.models\.\w+ import Network$)", re.MULTILINE)


class ConfigClass(Protocol):
    """Reads config.json; the config that it returns has at least ``vocab_size`` and ``context_len``."""

    def read(self, reader: ConfigReader) -> Any:
        """The config; errors name file and key."""


@dataclass(frozen=True)
class Definition:
    """A network as a file of this folder defines it: ``Network(Config.read(reader))``."""

    Config: Any
    Network: type[nn.Module]


_registered: dict[str, Definition] = {}


def supported_types() -> list[str]:
    """Every model_type that find_network knows, sorted."""
    files = {path.stem for path in Path(__file__).parent.glob("*.py") if _DEFINES_NETWORK.search(path.read_text())}
    return sorted(files | set(_registered))


def find_network(model_type: str) -> Definition:
    """The network of a model_type; UnsupportedError lists the types there are."""
    if model_type in _registered:
        return _registered[model_type]
    if model_type not in supported_types():
        raise UnsupportedError(
            f"model_type: expected one of {', '.join(supported_types())}, found {show(model_type)}; "
            "bring your own network with --network or penstock.register_network"
        )
    module = importlib.import_module(f"penstock.models.{model_type}")
    return Definition(module.Config, module.Network)


def register_network(model_type: str, network_class: type[nn.Module], config_class: Any = None) -> None:
    """Makes ``network_class`` the network of checkpoints whose config.json says ``model_type``.

    ``config_class.read(reader)`` makes what the class is constructed with; by default it is the class's own
    ``Config``.  Registering a type again replaces it.
    """
    config_class = config_class or getattr(network_class, "Config", None)
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise InvalidArgumentError(f"network_class: expected a subclass of torch.nn.Module, found {network_class!r}")
    if not callable(getattr(config_class, "read", None)):
        raise InvalidArgumentError(
            f"config_class: expected a class with read(reader), or one named Config inside {network_class.__name__}"
        )
    _registered[model_type] = Definition(config_class, network_class)


def registered_script(model_type: str) -> str | None:
    """Where another process finds a registered network: "file.py:Class"; None when the type is not registered.

    Capture runs in a child process, which knows nothing of what this one registered.  Raises UnsupportedError for a
    class that no file holds at its top level together with its config.
    """
    definition = _registered.get(model_type)
    if definition is None:
        return None
    network_class = definition.Network
    module = sys.modules.get(network_class.__module__)
    path = getattr(module, "__file__", None)
    config_class = getattr(network_class, "Config", None) or getattr(module, "Config", None)
    found = getattr(module, network_class.__qualname__, None) is network_class and config_class is definition.Config
    if path is None or not found:
        raise UnsupportedError(
            f"model_type {model_type}: graph mode captures a registered network from its file; expected a class at the "
            f"top level of a .py file, its config inside it or beside it as Config, found "
            f"{network_class.__module__}.{network_class.__qualname__}; use eager mode or a file"
        )
    return f"{Path(path).resolve()}:{network_class.__qualname__}"


def load_network_script(spec: str) -> Definition:
    """The network of ``"path/my_net.py:Net"``: runs that file, which the user named, and takes the class.

    The class holds its ``Config``, or the file does.  Raises FileAccessError or InvalidArgumentError.
    """
    if not isinstance(spec, str):
        raise InvalidArgumentError(f"--network: expected path/to/file.py:ClassName, found {spec!r:.80}")
    path_text, colon, class_name = spec.rpartition(":")
    path = Path(path_text)
    if not colon or path.suffix != ".py" or not class_name.isidentifier():
        raise InvalidArgumentError(f"--network: expected path/to/file.py:ClassName, found {spec!r}")
    if not path.is_file():
        raise FileAccessError(f"--network: no such file: {path}")
    module = run_network_script(path, class_name)
    network_class = getattr(module, class_name, None)
    if not (isinstance(network_class, type) and issubclass(network_class, nn.Module)):
        raise InvalidArgumentError(f"--network: {path} has no torch.nn.Module named {class_name}")
    config_class = getattr(network_class, "Config", None) or getattr(module, "Config", None)
    if not callable(getattr(config_class, "read", None)):
        raise InvalidArgumentError(f"--network: {path}: expected a class Config with read(reader)")
    return Definition(config_class, network_class)
