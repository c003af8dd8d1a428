"""AutoConfig: the config.json of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from penstock.checkpoint.side_files import read_side_files
from penstock.config import INFINITY, ConfigReader
from penstock.errors import FileAccessError
from penstock.llm.llm_options import local_path
from penstock.validation import wrong_type

__all__ = ["AutoConfig", "existing_path"]


class AutoConfig(ConfigReader):
    """A model's ``config.json``, with the folder or bundle that it was read from.

    Keys are attributes (``config.hidden_size``).  The typed getters of ``ConfigReader`` check the values.
    """

    folder: Path | None = None

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("values", {})
        if name in values:
            return _as_python(values[name])
        raise AttributeError(f"{self.__dict__.get('file', 'config')} has no {name!r}")

    @classmethod
    def from_pretrained(cls, model: Path | str) -> AutoConfig:
        """Read the config of a checkpoint folder, a bundle or a downloaded model."""
        path = existing_path(model)
        data = read_side_files(path, ["config.json"])
        if "config.json" not in data:
            raise FileAccessError(f"{path}: no config.json found")
        file = str(path / "config.json")
        config = cls(ConfigReader.parse(data["config.json"], file).values, file)
        config.folder = path
        return config


def _as_python(value: Any) -> Any:
    """Return a value with floats in place of the tags of infinite numbers, as transformers' config has it."""
    if isinstance(value, dict):
        return float(value["__float__"]) if _is_tag(value) else {key: _as_python(item) for key, item in value.items()}
    return [_as_python(item) for item in value] if isinstance(value, list) else value


def _is_tag(value: dict[str, Any]) -> bool:
    return value.keys() == INFINITY.keys() and value["__float__"] in ("Infinity", "-Infinity", "NaN")


def existing_path(model: Path | str) -> Path:
    """Return the path of a folder, a bundle or a downloaded model; InvalidArgumentError for anything but a path."""
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise wrong_type("model", "the path of a checkpoint folder or a bundle", model)
    return Path(local_path(model))
