"""The configuration file of an export, which names the checkpoint and the bundles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.errors import InvalidFileError, UnsupportedError
from penstock.file_kinds import is_gguf
from penstock.offline.joined_folder import has_config
from penstock.offline.model_file import YAML_SUFFIXES, read_model_file
from penstock.offline.sharded_source import check_sharded

__all__ = ["INCREMENT_SUFFIX", "PREFILL_SUFFIX", "ExportConfig", "only_yaml", "read_export_config"]

PREFILL_SUFFIX: Final = "_prefill_graph.psm"
INCREMENT_SUFFIX: Final = "_inc_graph.psm"


@dataclass(frozen=True)
class ExportConfig:
    """The settings of an export: the checkpoint folder, the bundle, and the second name of the bundle, if any.

    ``config``: where config.json is, if not beside the weights: a folder, or a dictionary.
    """

    checkpoint: Path
    prefill: Path
    increment: Path | None
    scheme: str | None = None
    network: str | None = None
    tail: str | None = None
    config: Any = None


def only_yaml(folder: Path) -> Path:
    """Return the only YAML file of a model folder; InvalidFileError for none or several."""
    files = sorted(path for path in folder.iterdir() if path.suffix in YAML_SUFFIXES)
    if len(files) != 1:
        listed = ", ".join(path.name for path in files) or "none"
        raise InvalidFileError(f"{folder}: expected exactly one YAML file, got {listed}", param="model")
    return files[0]


def read_export_config(path: Path) -> ExportConfig:
    """Read a configuration file, or the only YAML file of a folder.  Paths are relative to the file.

    Without ``load_checkpoint`` the checkpoint is in the folder of the file.  If it has no config.json, that of the
    folder of the file counts.  Without an ``infer`` section the bundle is
    written there too, named after the file with both suffixes.
    """
    path = only_yaml(path) if path.is_dir() else path
    # These fields are for running: the same check as when running.
    file = read_model_file(path, skip=("config_path", "ge_config_path"))
    if file.run_mode != "export":
        raise UnsupportedError(f"{path}: run_mode must be export, not {file.run_mode!r:.60}", param="run_mode")
    prefill, increment = (file.infer.get(name) for name in ("prefill_model_path", "increment_model_path"))
    if not prefill:
        prefill, increment = f"{path.stem}{PREFILL_SUFFIX}", f"{path.stem}{INCREMENT_SUFFIX}"
    for name, out in (("prefill_model_path", prefill), ("increment_model_path", increment)):
        if out and not str(out).endswith(".psm"):
            raise InvalidFileError(f"{path}: infer: {name} must end in .psm, not {out!r:.100}", param=name)
    checkpoint = file.checkpoint() or path.parent
    check_sharded(path, checkpoint, file.strategy, {})
    is_elsewhere = not has_config(checkpoint) and has_config(path.parent)
    return ExportConfig(
        checkpoint=checkpoint,
        prefill=path.parent / prefill,
        increment=path.parent / increment if increment else None,
        scheme=file.scheme,
        tail="argmax" if file.is_sample_acceleration else None,
        config=path.parent if is_elsewhere and not is_gguf(checkpoint) else None,
    )
