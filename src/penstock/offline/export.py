"""``penstock.export``: make a bundle from a checkpoint folder, a network or a configuration file."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import FileAccessError, InvalidArgumentError
from penstock.graph.passes.append_tail import check_tail
from penstock.offline.export_config import ExportConfig, read_export_config
from penstock.offline.joined_folder import joined_folder, saved_network, script_of
from penstock.offline.model_file import YAML_SUFFIXES
from penstock.quant.scheme import find_scheme
from penstock.runtime.build import build_in_child
from penstock.runtime.open import registered_script
from penstock.validation import refusal

__all__ = ["export", "export_config"]


def export(
    model: Any,
    out: Path | str | Sequence[Path | str] | None = None,
    *,
    scheme: str | None = None,
    network: str | None = None,
    tail: str | None = None,
    config: Any = None,
    progress: Callable[[Any], None] | None = None,
) -> Path:
    """Make a bundle and return its path.

    ``model``: a checkpoint folder; a sharded one, which gives the bundle of the whole model; a network in memory, with
    its current weights; or a YAML file or a model folder with one, which names the bundles (``out`` must be None).
    ``out``: the bundle to write, whose name ends in ".psm", or a pair of names (prefill, increment) for the same file.
    ``scheme``: how weights are stored (None: as in the checkpoint).  ``network``: your own network script as
    "file.py:Class"; of a network in memory by default the file of its class.  ``tail``: "argmax" or "topk:K" for a
    graph that ends in token ids.  ``config``: a folder with config.json and the tokenizer, for weights that have none
    beside them: a network that was not loaded from a folder, a folder of *.safetensors, or one such file; or a
    config.json as a dictionary.  ``progress`` is called with a ``runtime.build.Progress``.

    The export runs in a child process, which imports PyTorch only for a network of your own.  The file appears complete
    or not at all.  Raises InvalidArgumentError, InvalidFileError, UnsupportedError or FileAccessError, which name the
    option or the file.
    """
    if scheme is not None:
        find_scheme(scheme)
    if tail is not None:
        check_tail(tail)
    options: dict[str, Any] = {"scheme": scheme, "network": network, "tail": tail}
    if not isinstance(model, (str, os.PathLike)):
        names = _checked_out(out)
        with saved_network(model, config) as folder:
            options["network"] = network or registered_script(folder) or script_of(model)
            return export_config(ExportConfig(folder, *names, **options), progress)[0]
    path = Path(model)
    if config is None and (path.suffix in YAML_SUFFIXES or (_has_yaml(path) and out is None)):
        if out is not None:
            raise InvalidArgumentError(f"out must be None: {path} names the bundles", param="out")
        return export_config(with_options(read_export_config(path), options, path), progress)[0]
    return export_config(ExportConfig(path, *_checked_out(out), **options, config=config), progress)[0]


def with_options(config: ExportConfig, options: dict[str, str | None], path: Path) -> ExportConfig:
    """Return a file's configuration with further options; InvalidArgumentError for an option that both set."""
    for name, value in options.items():
        if value is not None and getattr(config, name) is not None:
            raise InvalidArgumentError(f"{name} must not be set: {path} sets it to {getattr(config, name)}", param=name)
    chosen = {name: value or getattr(config, name) for name, value in options.items()}
    return replace(config, scheme=chosen["scheme"], network=chosen["network"], tail=chosen["tail"])


def export_config(config: ExportConfig, progress: Callable[[Any], None] | None = None) -> tuple[Path, dict[str, Any]]:
    """Make the bundle of a configuration; return its path and the report of ``build_in_child``.

    The second name of a bundle is a link to the same file.
    """
    with contextlib.ExitStack() as stack:
        source = config.checkpoint
        if config.config is not None:
            source = stack.enter_context(joined_folder(source, config.config))
        network = config.network or registered_script(source)
        options: dict[str, Any] = {"scheme": config.scheme, "network": network, "tail": config.tail}
        report = build_in_child(source, config.prefill, **options, progress=progress)
    if config.increment is not None:
        _link(config.prefill, config.increment)
    return config.prefill, report


def _link(file: Path, other: Path) -> None:
    """Make ``other`` a hard link to ``file``, or a copy where hard links are not supported.  It appears complete."""
    if other.exists() and other.samefile(file):
        return
    part = other.with_name(f".{other.name}.{secrets.token_hex(6)}.part")
    try:
        try:
            part.hardlink_to(file)
        except OSError:
            shutil.copyfile(file, part)
        part.replace(other)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise FileAccessError(f"{other}: {error.strerror}") from error


def _checked_out(out: Any) -> tuple[Path, Path | None]:
    """Return the name of the bundle, and its second name or None."""
    names = [*out] if isinstance(out, (list, tuple)) else [out]
    if len(names) > 2 or not all(
        isinstance(name, (str, os.PathLike)) and Path(name).suffix == ".psm" for name in names
    ):
        raise refusal("out", "a file name that ends in .psm, or a pair of them", out)
    paths = [Path(name) for name in names]
    return paths[0], paths[1] if len(paths) == 2 else None


def _has_yaml(path: Path) -> bool:
    return path.is_dir() and any(entry.suffix in YAML_SUFFIXES for entry in path.iterdir())
