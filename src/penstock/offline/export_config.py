"""The configuration file of an export, which names the checkpoint and the bundles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidArgumentError, InvalidFileError, UnsupportedError
from penstock.offline.infer_config import check_file
from penstock.offline.yaml_file import read_yaml
from penstock.quant.scheme import find_scheme

__all__ = ["INCREMENT_SUFFIX", "PREFILL_SUFFIX", "YAML_SUFFIXES", "ExportConfig", "check_sections", "only_yaml",
           "read_export_config"]  # fmt: skip

PREFILL_SUFFIX: Final = "_prefill_graph.psm"
INCREMENT_SUFFIX: Final = "_inc_graph.psm"
YAML_SUFFIXES: Final = (".yaml", ".yml")
SECTIONS: Final = ("run_mode", "load_checkpoint", "src_strategy_path_or_dir", "scheme", "model", "infer")
MODEL_FIELDS: Final = ("use_past", "is_sample_acceleration")


@dataclass(frozen=True)
class ExportConfig:
    """The settings of an export: the checkpoint folder, the bundle, and the second name of the bundle, if any."""

    checkpoint: Path
    prefill: Path
    increment: Path | None
    scheme: str | None = None
    network: str | None = None
    tail: str | None = None


def check_sections(path: Path, values: Mapping[str, Any]) -> None:
    """Check the fields of a configuration file; InvalidFileError or UnsupportedError names the wrong one."""
    if "network" in values:
        raise UnsupportedError(
            f"{path}: network: not allowed in a file, because it names code to run; use --network or network="
        )
    for name in values:
        if name not in SECTIONS:
            raise InvalidFileError(f"{path}: unknown field {name!r:.60}; expected one of {', '.join(SECTIONS)}")
    if values.get("run_mode", "export") != "export":
        raise UnsupportedError(f"{path}: run_mode must be export, not {values['run_mode']!r:.60}")
    if values.get("src_strategy_path_or_dir"):
        raise UnsupportedError(
            f"{path}: src_strategy_path_or_dir: merge the weights of all ranks first; a checkpoint folder "
            "has whole weights",
            param="src_strategy_path_or_dir",
        )
    for name in ("load_checkpoint", "scheme"):
        if not isinstance(values.get(name) or "", str):
            raise InvalidFileError(f"{path}: {name} must be a string, not {values[name]!r:.60}")
    if values.get("scheme"):
        try:
            find_scheme(values["scheme"])
        except InvalidArgumentError as error:
            raise InvalidFileError(f"{path}: {error}", param="scheme") from None
    for name in ("model", "infer"):
        if values.get(name) is not None and not isinstance(values[name], dict):
            raise InvalidFileError(f"{path}: {name} must be a mapping, not {values[name]!r:.60}")
    _check_model(path, values.get("model") or {})


def _check_model(path: Path, section: Mapping[str, Any]) -> None:
    for name in section:
        if name != "model_config":
            raise InvalidFileError(f"{path}: model: unknown field {name!r:.60}; expected model_config")
    config = section.get("model_config") or {}
    if not isinstance(config, dict):
        raise InvalidFileError(f"{path}: model.model_config must be a mapping, not {config!r:.60}")
    for name, value in config.items():
        if name not in MODEL_FIELDS:
            raise InvalidFileError(
                f"{path}: model_config: unknown field {name!r:.60}; expected one of {', '.join(MODEL_FIELDS)}"
            )
        if not isinstance(value, bool):
            raise InvalidFileError(f"{path}: model_config.{name} must be true or false, not {value!r:.60}")
    if config.get("use_past") is False:
        raise UnsupportedError(f"{path}: model_config.use_past must be true: every graph keeps keys and values")


def only_yaml(folder: Path) -> Path:
    """Return the only YAML file of a model folder; InvalidFileError for none or several."""
    files = sorted(path for path in folder.iterdir() if path.suffix in YAML_SUFFIXES)
    if len(files) != 1:
        listed = ", ".join(path.name for path in files) or "none"
        raise InvalidFileError(f"{folder}: expected exactly one YAML file, found {listed}")
    return files[0]


def read_export_config(path: Path) -> ExportConfig:
    """Read a configuration file, or the only YAML file of a folder.  Paths are relative to the file.

    Without ``load_checkpoint`` the checkpoint is in the folder of the file.  Without an ``infer`` section the bundle is
    written there too, named after the file with both suffixes.
    """
    file = only_yaml(path) if path.is_dir() else path
    values = read_yaml(file)
    check_sections(file, values)
    base = file.parent
    infer = dict(values.get("infer") or {})
    # These fields are for running: the same check as when running.
    check_file(infer, file, skip=("config_path", "ge_config_path"))
    prefill, increment = infer.get("prefill_model_path"), infer.get("increment_model_path")
    if not prefill:
        prefill, increment = f"{file.stem}{PREFILL_SUFFIX}", f"{file.stem}{INCREMENT_SUFFIX}"
    for name, out in (("prefill_model_path", prefill), ("increment_model_path", increment)):
        if out and not str(out).endswith(".psm"):
            raise InvalidFileError(f"{file}: infer: {name} must end in .psm, not {out!r:.100}")
    accelerated = ((values.get("model") or {}).get("model_config") or {}).get("is_sample_acceleration", False)
    return ExportConfig(
        checkpoint=base / (values.get("load_checkpoint") or "."),
        prefill=base / prefill,
        increment=base / increment if increment else None,
        scheme=values.get("scheme") or None,
        tail="argmax" if accelerated else None,
    )
