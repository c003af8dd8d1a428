"""Checkpoint folders that are put together for one export, of weights and of a config from elsewhere.

A network in memory is such weights, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.checkpoint.side_files import model_folder, read_folder_files, write_side_files
from penstock.checkpoint.stored.shards import INDEX, SINGLE
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.validation import wrong_type

__all__ = ["has_config", "joined_folder", "saved_network", "script_of"]


def has_config(folder: Path) -> bool:
    """Return True if a folder has a config.json."""
    return folder.is_dir() and (model_folder(folder) / "config.json").exists()


def _side_files(config: object) -> dict[str, bytes]:
    """Return the files beside the weights: those of a folder, or the config that a mapping is."""
    if isinstance(config, Mapping):
        try:
            return {"config.json": (json.dumps(dict(config), indent=2) + "\n").encode()}
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(f"config: expected values that JSON has, got {error}", param="config") from None
    if not isinstance(config, (str, os.PathLike)):
        raise wrong_type("config", "a folder with config.json, or a dictionary", config)
    folder = Path(config)
    folder = folder.parent if folder.name == "config.json" else folder
    if not has_config(folder):
        raise FileAccessError(f"config: expected a folder with config.json, got {folder}", param="config")
    return read_folder_files(folder)


@contextlib.contextmanager
def joined_folder(weights: Path, config: object) -> Iterator[Path]:
    """Yield a temporary checkpoint folder with links to the weights: a folder or one file of safetensors.

    ``config``: a folder with config.json and the tokenizer, or a dictionary.  Raises InvalidFileError or
    FileAccessError.
    """
    sides = _side_files(config)
    if not weights.exists():
        raise FileAccessError(f"{weights}: no such file or folder", param="model")
    if weights.is_dir():
        files = {path.name: path for path in weights.iterdir() if path.suffix == ".safetensors" or path.name == INDEX}
    else:
        files = {SINGLE: weights} if weights.suffix == ".safetensors" else {}
    if not files:
        raise InvalidFileError(
            f"{weights}: expected *.safetensors beside no config, got none; save the weights as safetensors",
            param="model",
        )
    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        write_side_files(folder, sides)
        for name, path in files.items():
            (folder / name).symlink_to(path.absolute())
        yield folder


@contextlib.contextmanager
def saved_network(network: Any, config: object = None) -> Iterator[Path]:
    """Yield a temporary checkpoint folder with the weights of a network in memory.

    ``config`` as in ``joined_folder``; None for a network of ``load_network``, which has the files of its folder.
    """
    if not callable(getattr(network, "named_parameters", None)):
        raise wrong_type("model", "a path or a network, a torch.nn.Module", network)
    sides = getattr(network, "side_files", None) if config is None else _side_files(config)
    if not isinstance(sides, dict):
        name = type(network).__name__
        raise InvalidArgumentError(
            f"config: expected the config of {name}, a torch.nn.Module without config.json and tokenizer, got none; "
            "pass config=FOLDER or a dictionary. The layers must be those of penstock.nn, as the guide `Write a "
            "network` shows.",
            param="config",
        )
    from penstock.models.loader import save_network

    with tempfile.TemporaryDirectory(prefix="penstock-") as temporary:
        folder = Path(temporary) / "model"
        save_network(network, folder, sides)
        yield folder


def script_of(network: Any) -> str | None:
    """Return where the export process finds the class of a network in memory; None for one of this package.

    Raises InvalidArgumentError for a class that no file defines at its top.
    """
    kind = type(network)
    if kind.__module__.startswith("penstock."):
        return None
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if file is None or not Path(file).exists() or "." in kind.__qualname__:
        raise InvalidArgumentError(
            f"network: expected {kind.__qualname__} at the top of a file, which the export process imports; put the "
            "class into a .py file, or pass network='FILE.py:CLASS'",
            param="network",
        )
    return f"{file}:{kind.__name__}"
