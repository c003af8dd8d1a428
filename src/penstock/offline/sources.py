"""Find the files that a pipeline runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock import env
from penstock.checkpoint.side_files import model_folder
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError
from penstock.file_kinds import is_bundle, refuse_mindspore
from penstock.graph.bundle import read_graph
from penstock.offline.export_config import INCREMENT_SUFFIX, PREFILL_SUFFIX, only_yaml
from penstock.offline.infer_config import FIELDS, FileConfig, InferConfig, infer_config
from penstock.offline.model_file import YAML_SUFFIXES, ModelFile, read_model_file
from penstock.offline.sharded_source import check_sharded
from penstock.validation import refusal, wrong_type

__all__ = ["check_pair", "find_file", "find_source", "is_checkpoint"]

CONFIG_NAME: Final = "config.ini"


def find_source(model: object, values: Mapping[str, Any], search_path: Sequence[Path] | None) -> InferConfig:
    """Return the configuration of ``model``, with ``values`` for further fields.

    ``model`` is an InferConfig, a pair of bundles, a bundle, a YAML file, a checkpoint folder, a model folder, or a
    name. ``prefill_model_path`` of the result is a bundle or a checkpoint folder.  Raises InvalidArgumentError,
    FileAccessError, InvalidFileError or UnsupportedError, which says what was searched for and where.
    """
    if isinstance(model, InferConfig):
        if values:
            raise InvalidArgumentError(f"{next(iter(values))}: set it in the InferConfig", param=next(iter(values)))
        return _of_config(replace(model), search_path)
    for name in ("prefill_model_path", "increment_model_path"):
        if name in values and model is not None:
            raise InvalidArgumentError(f"{name}: cannot be combined with model", param=name)
    if model is None:
        return _of_config(infer_config(values), search_path)
    if isinstance(model, (tuple, list)):
        if len(model) != 2 or not all(isinstance(path, (str, os.PathLike)) and str(path) for path in model):
            raise refusal("model", "a pair of bundles (prefill, increment)", model)
        paths = {"prefill_model_path": model[0], "increment_model_path": model[1]}
        return _of_config(infer_config({**values, **paths}), search_path)
    if not isinstance(model, (str, os.PathLike)) or not str(model):
        raise wrong_type("model", "a path, a pair of paths or a name", model)
    path = Path(model)
    is_name = path.name == os.fspath(model) and path.suffix not in (".psm", *YAML_SUFFIXES)
    if path.exists() and not (is_name and search_path is not None):  # with a search path, it is a name
        _refuse_search(search_path, str(path))
        return _of_path(path, values)
    if not is_name:
        raise FileAccessError(f"{path}: no such file or folder")
    return _of_path(_search(path.name, search_path), {"model_name": path.name, **values})


def find_file(path: Path) -> FileConfig:
    """Return the configuration of a YAML file.  Raises what ``find_source`` raises."""
    return _of_file(read_model_file(path), {})


def _of_config(config: InferConfig, search_path: Sequence[Path] | None) -> InferConfig:
    if not config.prefill_model_path:
        if config.model_name == InferConfig.model_name:
            raise InvalidArgumentError("prefill_model_path or model_name is required", param="prefill_model_path")
        fields = {name: getattr(config, name) for name in ("infer_seq_length", "config_path", "model_name")}
        values = {name: value for name, value in fields.items() if value}
        return _of_path(_search(config.model_name, search_path), values)
    _refuse_search(search_path, config.prefill_model_path)
    return config


def _refuse_search(search_path: Sequence[Path] | None, what: str) -> None:
    if search_path is not None:
        raise InvalidArgumentError(
            f"search_path: expected none, because {what} is a path; it applies to names only", param="search_path"
        )


def _of_path(path: Path, values: Mapping[str, Any]) -> InferConfig:
    if path.is_dir() and not is_checkpoint(path):
        return _of_model_folder(path, values)
    if path.suffix in YAML_SUFFIXES:
        return _of_file(read_model_file(path), values)
    return infer_config({**values, "prefill_model_path": path})


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder is a checkpoint rather than a folder of bundles."""
    return (model_folder(folder) / "config.json").is_file() and not any(folder.glob(f"*{PREFILL_SUFFIX}"))


def _of_model_folder(folder: Path, values: Mapping[str, Any]) -> InferConfig:
    if not any(entry.suffix in (".psm", *YAML_SUFFIXES) for entry in folder.iterdir()):
        raise InvalidFileError(
            f"{folder}: expected a checkpoint folder (config.json, *.safetensors) or a model folder (a YAML file, "
            f"*{PREFILL_SUFFIX})",
            param="model",
        )
    yaml = only_yaml(folder)
    file = read_model_file(yaml)
    section = _infer_section(file)
    paths = _folder_bundles(folder)
    for name in ("prefill_model_path", "increment_model_path"):
        bundle = section.pop(name, "")
        if bundle and (name not in paths or not _is_same(Path(bundle), paths[name])):
            raise InvalidFileError(
                f"{yaml}: infer: {name}: {bundle} is not the bundle in the folder for this field", param="infer"
            )
    own_file = [name for name in ("config_path", "ge_config_path") if name in section]
    if "config_path" in values or "ge_config_path" in values:
        for name in own_file:
            del section[name]
    elif not own_file and (folder / CONFIG_NAME).exists():
        section["config_path"] = folder / CONFIG_NAME
    return _with_defaults(infer_config({**section, **paths, **values}, f"{yaml}: infer"), file, None)


def _folder_bundles(folder: Path) -> dict[str, Path]:
    """Return the bundles of a model folder by field name; InvalidFileError if they are ambiguous or missing."""
    suffixes = {"prefill_model_path": PREFILL_SUFFIX, "increment_model_path": INCREMENT_SUFFIX}
    bundles = {name: sorted(folder.glob(f"*{suffix}")) for name, suffix in suffixes.items()}
    for name, paths in bundles.items():
        if len(paths) > 1:
            raise InvalidFileError(
                f"{folder}: expected one bundle named *{suffixes[name]}, got {_listed(paths)}", param=name
            )
    others = sorted(set(folder.glob("*.psm")).difference(*bundles.values()))
    if others:
        raise InvalidFileError(
            f"{folder}: expected only bundles named *{PREFILL_SUFFIX} and *{INCREMENT_SUFFIX}, got {_listed(others)}",
            param="model",
        )
    if not bundles["prefill_model_path"]:
        for path in sorted(folder.glob("*.mindir")):
            refuse_mindspore(path)
        raise InvalidFileError(f"{folder}: expected a bundle named *{PREFILL_SUFFIX}, got none")
    return {name: paths[0] for name, paths in bundles.items() if paths}


def _of_file(file: ModelFile, values: Mapping[str, Any]) -> FileConfig:
    """Return the configuration of a YAML file: the bundles of ``infer``, or else the checkpoint."""
    section = _infer_section(file)
    has_bundle = bool(section.get("prefill_model_path"))
    if not has_bundle:
        checkpoint = file.checkpoint()
        if checkpoint is None:
            raise InvalidFileError(
                f"{file.path}: load_checkpoint: expected the path of a checkpoint folder or a .psm bundle, or "
                "infer.prefill_model_path, got neither",
                param="load_checkpoint",
            )
        if not checkpoint.exists():
            raise FileAccessError(
                f"{file.path}: load_checkpoint: {checkpoint}: no such file or folder", param="load_checkpoint"
            )
        check_sharded(file.path, checkpoint, file.strategy, file.ranks)
        section["prefill_model_path"] = checkpoint
    if file.seq_length and not section.get("infer_seq_length"):
        section["infer_seq_length"] = file.seq_length
    config = infer_config({**section, **values}, f"{file.path}: infer")
    scheme = None if has_bundle or is_bundle(config.bundle) else file.scheme  # that of a bundle is in it
    return _with_defaults(config, file, scheme)


def _with_defaults(config: InferConfig, file: ModelFile, scheme: str | None) -> FileConfig:
    fields = {name: getattr(config, name) for name in FIELDS}
    generation = file.generation
    if file.is_sample_acceleration and not is_bundle(config.bundle):
        generation = {**generation, "do_sample": False}  # the tokens of a graph that chooses the likeliest
        generation.pop("temperature", None)
    return FileConfig(**fields, scheme=scheme, generation=generation, ranks=file.ranks)


def _infer_section(file: ModelFile) -> dict[str, Any]:
    """Return the ``infer`` section; its paths are relative to the file."""
    section = dict(file.infer)
    for name in ("prefill_model_path", "increment_model_path", "config_path", "ge_config_path"):
        if section.get(name):
            if not isinstance(section[name], str):
                raise InvalidFileError(
                    f"{file.path}: infer: {name} must be a path, not {section[name]!r:.60}", param=name
                )
            section[name] = str(file.path.parent / str(section[name]))
    return section


def _is_same(a: Path, b: Path) -> bool:
    return a.exists() and a.samefile(b)


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(path.name for path in paths) or "none"


def _search(name: str, search_path: Sequence[Path] | None) -> Path:
    """Return the path of a model with that name: a bundle, a folder or a YAML file with an ``infer`` section."""
    folders = list(search_path) if search_path is not None else env.model_folders()
    names = (name, f"{name}.psm", *(f"{begin}{name}{end}" for begin in ("", "run_") for end in YAML_SUFFIXES))
    for folder in folders:
        paths = [path for file in names if (path := folder / file).exists()]
        if len(paths) > 1:
            raise InvalidArgumentError(
                f"model {name!r}: {folder} has {_listed(paths)}; pass the path of one of them", param="model"
            )
        if paths:
            return paths[0]
    if not folders:
        raise FileAccessError(
            f"model {name!r}: no such file or folder, and no folders to search; set PENSTOCK_MODELS or search_path",
            param="model",
        )
    where = ", ".join(str(folder) for folder in folders)
    raise FileAccessError(f"model {name!r}: no {', '.join(names[:-1])} or {names[-1]} found in {where}", param="model")


def check_pair(prefill: Path, increment: Path) -> None:
    """Check that two bundles have the same graph and the same weights, so that the first can replace the second.

    InvalidArgumentError names the first difference.
    """
    if _is_same(prefill, increment):
        return
    (prefill_graph, prefill_segments), (increment_graph, increment_segments) = (
        read_graph(prefill),
        read_graph(increment),
    )
    for name in ("network", "scheme", "vocab_size", "context_len"):
        a, b = getattr(prefill_graph, name), getattr(increment_graph, name)
        if a != b:
            raise _misfit(prefill, increment, name, a, b)
    if prefill_graph.nodes[-1].op != increment_graph.nodes[-1].op:
        raise _misfit(
            prefill, increment, "the end of the graph", prefill_graph.nodes[-1].op, increment_graph.nodes[-1].op
        )
    if replace(prefill_graph, properties={}) != replace(increment_graph, properties={}):
        raise _misfit(prefill, increment, "the graph", "the same", "different")
    sums = [
        {segment.name: segment.crc32 for segment in graph_segments}
        for graph_segments in (prefill_segments, increment_segments)
    ]
    for name in sorted(sums[0].keys() | sums[1].keys()):
        if sums[0].get(name) != sums[1].get(name):
            raise _misfit(prefill, increment, f"the checksum of {name}", sums[0].get(name), sums[1].get(name))


def _misfit(prefill: Path, increment: Path, what: str, a: object, b: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"increment_model_path: {increment} does not match {prefill}: {what} is {b} instead of {a}",
        param="increment_model_path",
    )
