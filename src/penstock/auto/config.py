"""AutoConfig, and the YAML files of MindFormers that say which model to open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from penstock.checkpoint.side_files import read_side_files
from penstock.config import INFINITY, ConfigReader
from penstock.errors import FileAccessError, InvalidFileError, UnsupportedError
from penstock.llm.llm_options import local_path
from penstock.offline.sources import find_source
from penstock.offline.yaml_file import read_yaml
from penstock.validation import wrong_type

__all__ = ["AutoConfig", "ModelFile", "existing_path", "read_model_yaml"]

_GENERATION: Final = {"do_sample", "top_k", "top_p", "temperature", "repetition_penalty"}
"""The fields of MindFormers' model_config that are defaults for ``generate``, by the same names."""
_LENGTHS: Final = {"max_decode_length": "max_length", "max_length": "max_length", "max_new_tokens": "max_new_tokens"}


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


@dataclass
class ModelFile:
    """The content of a YAML file: the folder or bundle, the options of LLM, and the defaults of ``generate``."""

    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    generation: dict[str, Any] = field(default_factory=dict)


def read_model_yaml(file: Path) -> ModelFile:
    """Read which model a YAML file names: one of ``penstock.pipeline``, or one of MindFormers.

    The fields that count in a file of MindFormers are ``load_checkpoint`` (else ``checkpoint_name_or_path`` of
    ``model.model_config``), ``seq_length``, and the generation fields of ``model_config``.  Paths are relative to the
    file.  InvalidFileError or UnsupportedError names the field at fault.
    """
    values = read_yaml(file)
    if "infer" in values:
        source = find_source(file, {}, None)
        limit = {"context_len": source.infer_seq_length} if source.infer_seq_length else {}
        return ModelFile(source.bundle, limit)
    config = _mapping(file, "model.model_config", _mapping(file, "model", values.get("model")).get("model_config"))
    if values.get("use_parallel"):
        raise UnsupportedError(f"{file}: use_parallel must be false: one process runs a model", param="use_parallel")
    checkpoint = values.get("load_checkpoint") or config.get("checkpoint_name_or_path")
    if not isinstance(checkpoint, str) or not checkpoint:
        raise InvalidFileError(
            f"{file}: load_checkpoint: expected the path of a checkpoint folder or a .psm bundle",
            param="load_checkpoint",
        )
    path = file.parent / checkpoint
    if path.suffix in (".ckpt", ".mindir"):
        raise UnsupportedError(
            f"{file}: load_checkpoint: {checkpoint}: expected a folder with config.json and *.safetensors, or a .psm "
            f"bundle; {path.suffix} files cannot be read. Save the model with transformers' save_pretrained.",
            param="load_checkpoint",
        )
    if not path.exists():
        raise FileAccessError(f"{file}: load_checkpoint: {path}: no such file or folder")
    generation = {name: value for name, value in config.items() if name in _GENERATION}
    for name, option in _LENGTHS.items():
        if name in config:
            generation[option] = config[name]
    limits = {"context_len": config["seq_length"]} if "seq_length" in config else {}
    return ModelFile(path, limits, generation)


def _mapping(file: Path, name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidFileError(f"{file}: {name} must be a mapping, not {value!r:.60}")
    return value
