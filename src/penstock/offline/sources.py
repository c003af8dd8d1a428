"""From what a pipeline was given to the files that it runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock import env
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.graph.bundle import read_graph
from penstock.offline.export_config import INCREMENT_SUFFIX, PREFILL_SUFFIX, YAML_SUFFIXES, check_sections, only_yaml
from penstock.offline.infer_config import InferConfig, checked_copy, infer_config
from penstock.offline.yaml_file import read_yaml

__all__ = ["check_pair", "find_source", "is_checkpoint"]

CONFIG_NAME: Final = "config.ini"


def find_source(model: object, values: Mapping[str, Any], search_path: Sequence[Path] | None) -> InferConfig:
    """The configuration of ``model``: an InferConfig, a pair of bundles, a bundle, a YAML file, a checkpoint folder, a
    model folder, or a name; with ``values``, the fields that the caller gave beside it.

    ``prefill_model_path`` is then a bundle or a checkpoint folder.  Raises InvalidArgumentError, FileAccessError,
    InvalidFileError or UnsupportedError, saying what was looked for and where.
    """
    if isinstance(model, InferConfig):
        if values:
            raise InvalidArgumentError(f"{next(iter(values))}: an InferConfig that is given says it itself")
        return _of_config(checked_copy(model), search_path)
    for name in ("prefill_model_path", "increment_model_path"):
        if name in values and model is not None:
            raise InvalidArgumentError(f"{name}: model says already what to run", param=name)
    if model is None:
        return _of_config(infer_config(values), search_path)
    if isinstance(model, (tuple, list)):
        if len(model) != 2 or not all(isinstance(one, (str, os.PathLike)) and str(one) for one in model):
            raise InvalidArgumentError(
                f"model: expected a pair of bundles (prefill, increment), found {model!r:.100}", param="model"
            )
        paths = {"prefill_model_path": model[0], "increment_model_path": model[1]}
        return _of_config(infer_config({**values, **paths}), search_path)
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise InvalidArgumentError(
            f"model: expected a path, a pair of them or a name, found {type(model).__name__}", param="model"
        )
    path = Path(model)
    is_name = path.name == os.fspath(model) and path.suffix not in (".psm", *YAML_SUFFIXES)
    if path.exists() and not (is_name and search_path is not None):  # a search path says that a name is meant
        _refuse_search(search_path, str(path))
        return _of_path(path, values)
    if not is_name:
        raise FileAccessError(f"{path}: no such file or folder")
    return _of_path(_search(path.name, search_path), {"model_name": path.name, **values})


def _of_config(config: InferConfig, search_path: Sequence[Path] | None) -> InferConfig:
    if not config.prefill_model_path:
        if config.model_name == InferConfig.model_name:
            raise InvalidArgumentError(
                "prefill_model_path is missing, and there is no model_name to look for", param="prefill_model_path"
            )
        given = {name: getattr(config, name) for name in ("infer_seq_length", "config_path", "model_name")}
        given = {name: value for name, value in given.items() if value}
        return _of_path(_search(config.model_name, search_path), given)
    _refuse_search(search_path, config.prefill_model_path)
    return config


def _refuse_search(search_path: Sequence[Path] | None, what: str) -> None:
    if search_path is not None:
        raise InvalidArgumentError(
            f"search_path: expected none, since {what} is a path: it goes with a model's name", param="search_path"
        )


def _of_path(path: Path, values: Mapping[str, Any]) -> InferConfig:
    if path.is_dir() and not is_checkpoint(path):
        return _of_model_folder(path, values)
    if path.suffix in YAML_SUFFIXES:
        found = _infer_section(path, read_yaml(path))
        if "prefill_model_path" not in found:
            raise InvalidFileError(f"{path}: infer: prefill_model_path is missing")
        return _of_config(infer_config({**found, **values}, f"{path}: infer"), None)
    return infer_config({**values, "prefill_model_path": path})


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a network to export rather than bundles."""
    return (folder / "config.json").is_file() and not any(folder.glob(f"*{PREFILL_SUFFIX}"))


def _of_model_folder(folder: Path, values: Mapping[str, Any]) -> InferConfig:
    if not any(one.suffix in (".psm", *YAML_SUFFIXES) for one in folder.iterdir()):
        raise InvalidFileError(
            f"{folder}: expected a checkpoint folder (config.json, *.safetensors) or a model folder (a YAML file, "
            f"*{PREFILL_SUFFIX})"
        )
    yaml = only_yaml(folder)
    section = _infer_section(yaml, read_yaml(yaml))
    paths = _folder_bundles(folder)
    for name in ("prefill_model_path", "increment_model_path"):
        told = section.pop(name, "")
        if told and (name not in paths or not _is_same(Path(told), paths[name])):
            raise InvalidFileError(f"{yaml}: infer: {name}: {told} is not a bundle that the folder has for it")
    own_file = [name for name in ("config_path", "ge_config_path") if name in section]
    if "config_path" in values or "ge_config_path" in values:
        for name in own_file:
            del section[name]
    elif not own_file and (folder / CONFIG_NAME).exists():
        section["config_path"] = folder / CONFIG_NAME
    return _of_config(infer_config({**section, **paths, **values}, f"{yaml}: infer"), None)


def _folder_bundles(folder: Path) -> dict[str, Path]:
    """The bundles of a model folder by the field that names them; InvalidFileError when it is not clear which."""
    suffixes = {"prefill_model_path": PREFILL_SUFFIX, "increment_model_path": INCREMENT_SUFFIX}
    found = {name: sorted(folder.glob(f"*{suffix}")) for name, suffix in suffixes.items()}
    for name, paths in found.items():
        if len(paths) > 1:
            raise InvalidFileError(f"{folder}: expected one bundle named *{suffixes[name]}, found {_listed(paths)}")
    others = sorted(set(folder.glob("*.psm")).difference(*found.values()))
    if others:
        raise InvalidFileError(
            f"{folder}: expected only bundles named *{PREFILL_SUFFIX} and *{INCREMENT_SUFFIX}, found {_listed(others)}"
        )
    if not found["prefill_model_path"]:
        raise InvalidFileError(f"{folder}: expected a bundle named *{PREFILL_SUFFIX}, found none")
    return {name: paths[0] for name, paths in found.items() if paths}


def _infer_section(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """The ``infer`` section, whose relative paths begin where the file lies; what else is there is for export."""
    check_sections(path, values)
    section = dict(values.get("infer") or {})
    for name in ("prefill_model_path", "increment_model_path", "config_path", "ge_config_path"):
        if section.get(name):
            section[name] = str(path.parent / str(section[name]))
    return section


def _is_same(a: Path, b: Path) -> bool:
    return a.exists() and a.samefile(b)


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def _search(name: str, search_path: Sequence[Path] | None) -> Path:
    """Where a model of that name lies: a bundle, a folder or a YAML file with an ``infer`` section."""
    folders = list(search_path) if search_path is not None else env.model_folders()
    names = (name, f"{name}.psm", *(f"{begin}{name}{end}" for begin in ("", "run_") for end in YAML_SUFFIXES))
    for folder in folders:
        found = [folder / one for one in names if (folder / one).exists()]
        if len(found) > 1:
            raise InvalidArgumentError(
                f"model {name!r}: {folder} has {_listed(found)}: give the path of one", param="model"
            )
        if found:
            return found[0]
    where = ", ".join(str(folder) for folder in folders) or "nowhere, as PENSTOCK_MODELS names no folder"
    raise FileAccessError(f"model {name!r}: looked for {', '.join(names)} in {where}, and found none of them")


def check_pair(prefill: Path, increment: Path) -> None:
    """See that two bundles hold one graph over the same weights, so that the first does for both.

    InvalidArgumentError names what differs.
    """
    if _is_same(prefill, increment):
        return
    (one, segments), (other, others) = read_graph(prefill), read_graph(increment)
    for name in ("network", "scheme", "vocab_size", "context_len"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            raise _misfit(prefill, increment, name, a, b)
    if one.nodes[-1].op != other.nodes[-1].op:
        raise _misfit(prefill, increment, "the end of the graph", one.nodes[-1].op, other.nodes[-1].op)
    if replace(one, properties={}) != replace(other, properties={}):
        raise _misfit(prefill, increment, "the graph", "one", "another")
    sums = [{segment.name: segment.crc32 for segment in each} for each in (segments, others)]
    for name in sorted(sums[0].keys() | sums[1].keys()):
        if sums[0].get(name) != sums[1].get(name):
            raise _misfit(prefill, increment, f"the checksum of {name}", sums[0].get(name), sums[1].get(name))


def _misfit(prefill: Path, increment: Path, what: str, a: object, b: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"increment_model_path: {increment} does not fit {prefill}: {what} is {b}, and there it is {a}",
        param="increment_model_path",
    )
