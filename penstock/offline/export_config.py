"""The configuration file of an export: ``run_mode``, where the checkpoint lies, and where bundles go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidFileError, UnsupportedError

__all__ = ["check_sections"]

SECTIONS: Final = ("run_mode", "load_checkpoint", "src_strategy_path_or_dir", "scheme", "network", "model", "infer")
MODEL_FIELDS: Final = ("use_past", "is_sample_acceleration")


def check_sections(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse by name what a configuration file must not say; InvalidFileError or UnsupportedError."""
    for name in values:
        if name not in SECTIONS:
            raise InvalidFileError(f"{path}: it has no field {name!r:.60}: it has {', '.join(SECTIONS)}")
    if values.get("run_mode", "export") != "export":
        raise UnsupportedError(f"{path}: run_mode must be export, not {values['run_mode']!r:.60}")
    if values.get("src_strategy_path_or_dir"):
        raise UnsupportedError(
            f"{path}: src_strategy_path_or_dir: weights that are cut into ranks must be merged before: a checkpoint "
            "folder holds them whole"
        )
    for name in ("load_checkpoint", "scheme", "network"):
        if not isinstance(values.get(name) or "", str):
            raise InvalidFileError(f"{path}: {name} must be a text, not {values[name]!r:.60}")
    for name in ("model", "infer"):
        if not isinstance(values.get(name) or {}, dict):
            raise InvalidFileError(f"{path}: {name} must be a mapping, not {values[name]!r:.60}")
    _check_model(path, values.get("model") or {})


def _check_model(path: Path, section: Mapping[str, Any]) -> None:
    for name in section:
        if name != "model_config":
            raise InvalidFileError(f"{path}: model has no field {name!r:.60}: it has model_config")
    config = section.get("model_config") or {}
    if not isinstance(config, dict):
        raise InvalidFileError(f"{path}: model.model_config must be a mapping, not {config!r:.60}")
    for name, value in config.items():
        if name not in MODEL_FIELDS:
            raise InvalidFileError(f"{path}: model_config has no field {name!r:.60}: it has {', '.join(MODEL_FIELDS)}")
        if not isinstance(value, bool):
            raise InvalidFileError(f"{path}: model_config.{name} must be true or false, not {value!r:.60}")
